"""Who is to act before and after an engine changes its state?

Before: clear a prefix cache, drop registrations of NCCL. After: register again, tell a
scheduler. A plain function runs in the controller's worker thread, a coroutine function on
the event loop: neither blocks the loop.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from cumem.errors import CumemError
from cumem.serving.states import Kind

Hook = Callable[[], Any]
InWorker = Callable[[Hook], Awaitable[Any]]

_log = logging.getLogger("cumem")


class Registration:
    """A registered callback; :meth:`remove` takes it back, once or more often."""

    def __init__(self, callbacks: list[Any], callback: Any) -> None:
        self._callbacks, self._callback = callbacks, callback

    def remove(self) -> None:
        if self._callback in self._callbacks:
            self._callbacks.remove(self._callback)


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

    async def run_before(self, kind: Kind) -> None:
        """Calls the hooks; the first exception ends it, as a CumemError."""
        for hook in list(self.before[kind]):
            try:
                await self._call(hook)
            except Exception as error:
                left = "The transition was given up; the memory is as it was."
                raise _failed("before", kind, hook, left) from error

    async def run_after(self, kind: Kind) -> None:
        """Calls all hooks, then raises the first exception as a CumemError."""
        first: CumemError | None = None
        for hook in list(self.after[kind]):
            try:
                await self._call(hook)
            except Exception as error:  # noqa: BLE001 - collected: the other hooks must run
                failed = _failed("after", kind, hook, "The memory has changed its state.")
                failed.__cause__ = error
                first = first or failed
        if first is not None:
            raise first

    async def run_after_failure(self, kind: Kind) -> None:
        """As :meth:`run_after`, for a transition that has an error already: others are logged."""
        try:
            await self.run_after(kind)
        except CumemError:
            _log.exception("after a transition that failed, a hook failed too")

    async def _call(self, hook: Hook) -> None:
        result = hook() if inspect.iscoroutinefunction(hook) else await self._in_worker(hook)
        if inspect.isawaitable(result):
            await result


def _failed(when: str, kind: Kind, hook: Hook, left: str) -> CumemError:
    name = getattr(hook, "__qualname__", repr(hook))
    return CumemError(f"the hook {name}, {when} {kind.value}, raised (see the cause). {left}")
