"""Who is to act before and after an engine changes its state?

Before: clear a prefix cache, drop registrations of NCCL. After: register again, tell a
scheduler. A plain function runs in the controller's worker thread, a coroutine function on
the event loop: neither blocks the loop.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from cumem._text import choices, raised, traced
from cumem.errors import CumemError
from cumem.serving.states import Kind

Hook = Callable[[], Any]
RestoreHook = Callable[[frozenset[str]], Any]
InWorker = Callable[[Hook], Awaitable[Any]]

_log = logging.getLogger("cumem")


class Registration:
    """A registered callback; :meth:`remove` takes it back, once or more often."""

    def __init__(self, callbacks: list[Any], callback: Any) -> None:
        self._callbacks, self._callback = callbacks, callback

    def remove(self) -> None:
        if self._callback in self._callbacks:
            self._callbacks.remove(self._callback)
        self._callbacks = []  # the same callback may be registered another time


def register(callbacks: list[Any], callback: Any) -> Registration:
    if not callable(callback):
        raise TypeError(f"a hook must be callable, not {type(callback).__name__}")
    callbacks.append(callback)
    return Registration(callbacks, callback)


class TransitionHooks:
    """The hooks of one controller, in order of registration."""

    def __init__(self, in_worker: InWorker) -> None:
        self._in_worker = in_worker
        self.before: dict[Kind, list[Hook]] = {kind: [] for kind in Kind}
        self.after: dict[Kind, list[Hook]] = {kind: [] for kind in Kind}
        self.restore: list[RestoreHook] = []

    async def run_before(self, kind: Kind) -> None:
        """Calls the hooks; the first exception ends it, as a CumemError."""
        for hook in list(self.before[kind]):
            try:
                await self._call(hook)
            except Exception as error:
                left = "The transition was given up; the memory is as it was."
                raise _failed(f"before {kind.value}", hook, error, left) from error

    async def run_restore(self, tags: frozenset[str]) -> None:
        """Lets the hooks fill these tags; the first exception ends it, as a CumemError."""
        for hook in list(self.restore):
            try:
                await self._call(partial(hook, tags))
            except Exception as error:
                left = (
                    f"The memory is awake, contents of {choices(tags)} are undefined and no "
                    "request is served; call wake_up again."
                )
                raise _failed("which restores contents", hook, error, left) from error

    async def run_after(self, kind: Kind) -> None:
        """Calls all hooks, then raises the first exception as a CumemError; others are logged."""
        first: CumemError | None = None
        for hook in list(self.after[kind]):
            try:
                await self._call(hook)
            except Exception as error:  # noqa: BLE001 - collected: the other hooks must run
                left = "The memory has changed its state."
                failed = _failed(f"after {kind.value}", hook, error, left)
                if first is None:
                    first = failed
                else:
                    _log.error("%s", traced(failed))
        if first is not None:
            raise first

    async def run_after_failure(self, kind: Kind) -> None:
        """As :meth:`run_after`, for a transition that has an error already: others are logged."""
        try:
            await self.run_after(kind)
        except CumemError as error:
            _log.error("after a transition that failed, a hook failed too\n%s", traced(error))

    async def _call(self, hook: Hook) -> None:
        result = hook() if inspect.iscoroutinefunction(hook) else await self._in_worker(hook)
        if inspect.isawaitable(result):
            await result


def _failed(when: str, hook: Callable[..., Any], error: Exception, left: str) -> CumemError:
    name = getattr(hook, "__qualname__", repr(hook))
    failed = CumemError(f"the hook {name}, {when}, raised {raised(error)}. {left}")
    failed.__cause__ = error
    return failed
