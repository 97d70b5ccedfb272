"""Who sleeps or wakes memory now, and who must wait or be refused?

One sleep, wake or switch at a time. It may go on in another thread than the one that
began it (a wake that is not waited for).
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager

from cumem import _registry
from cumem._runtime import Runtime
from cumem.errors import BusyError

_operation = threading.Lock()
_operating: int | None = None  # the thread that has it


@contextmanager
def exclusive(operation: str, tags: Collection[str]) -> Iterator[list[_registry.OpenScope]]:
    """One sleep or wake at a time; yields the scopes of these tags that are open.

    Raises:
        BusyError: this thread is in one already (a hook calls it).
    """
    global _operating
    if _operating == threading.get_ident():
        raise BusyError(
            f"{operation}: called from inside a hook of another sleep or wake. Nothing was "
            "changed; return from the hook first."
        )
    with _operation, _registry.moving(tags) as scopes:
        operate_here()
        try:
            yield scopes
        finally:
            _operating = None


def operate_here() -> None:
    """Says that the operation under way is this thread's."""
    global _operating
    _operating = threading.get_ident()
    _registry.move_here()


def operate_elsewhere() -> None:
    """Says that another thread will go on with it; it calls operate_here()."""
    global _operating
    if _operating == threading.get_ident():
        _operating = None
        _registry.move_elsewhere()


def refuse_open(operation: str, scopes: list[_registry.OpenScope]) -> None:
    """Raises BusyError when a scope is open."""
    if not scopes:
        return
    scope = scopes[0]
    raise BusyError(
        f"{operation}: thread {scope.thread!r} has a scope of tag {scope.tag!r} open. "
        "Nothing was put to sleep; leave the scope and repeat the call."
    )


def refuse_capture(operation: str, runtime: Runtime) -> None:
    """Raises BusyError when the current stream is in a graph capture."""
    if runtime.backend.is_capturing():
        raise BusyError(
            f"{operation}: a CUDA graph capture is under way on this stream. "
            "Nothing was changed; end the capture and repeat the call."
        )
