"""Who else holds on to this memory, and must know when it goes and comes back?

Registrations with a network card, NCCL buffers and imported handles refer to
physical memory, not to addresses: they must be dropped before memory is unmapped
and taken again after it is mapped.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cumem import _C
from cumem._text import raised, traced
from cumem.errors import CumemError


@dataclass(frozen=True)
class SegmentRange:
    """A segment that a hook is told of.

    Attributes:
        address: where it starts.
        bytes: its size.
        tag: its tag.
        device: ordinal of its device.
    """

    address: int
    bytes: int
    tag: str
    device: int


Hook = Callable[[tuple[SegmentRange, ...]], object]

_log = logging.getLogger("cumem")
_lock = threading.Lock()


class HookHandle:
    """A registered hook; :meth:`remove` takes it back, once or more often."""

    def __init__(self, hooks: list[HookHandle], hook: Hook) -> None:
        self._hooks, self._hook = hooks, hook

    def remove(self) -> None:
        with _lock:
            if self in self._hooks:
                self._hooks.remove(self)


_before_unmap: list[HookHandle] = []
_after_unmap: list[HookHandle] = []
_after_map: list[HookHandle] = []


def on_before_unmap(hook: Hook) -> HookHandle:
    """Calls ``hook(segments)`` in every sleep, while the memory is still mapped.

    Once per sleep that has something to do, in order of registration. If a hook
    raises, nothing is put to sleep, the ``on_after_map`` hooks are called (the
    memory is mapped and stays so), and the sleep raises :class:`CumemError`.
    A hook must not call sleep or wake_up, nor open a scope of these tags. What is backed
    up was decided before: :func:`cumem.keep` in a hook counts from the next sleep on.
    """
    return _add(_before_unmap, hook)


def on_after_unmap(hook: Hook) -> HookHandle:
    """Calls ``hook(segments)`` after every sleep, when the memory has gone back.

    Once per sleep that has put something to sleep, in order of registration. If a hook
    raises, the others are still called, the memory is asleep as it was to be, and the
    sleep raises :class:`CumemError`. A hook must not touch that memory, nor call sleep
    or wake_up.
    """
    return _add(_after_unmap, hook)


def on_after_map(hook: Hook) -> HookHandle:
    """Calls ``hook(segments)`` after every wake, when contents are valid again.

    Once per wake that has something to do, in order of registration; also after a
    sleep that failed, for the segments that stayed awake. If a hook raises, the
    others are still called, everything is awake, and the call raises
    :class:`CumemError`.
    """
    return _add(_after_map, hook)


def run_before_unmap(segments: Sequence[_C.SegmentInfo]) -> None:
    """Calls the hooks; the first exception ends it, as a CumemError."""
    registered = _registered(_before_unmap)
    ranges = _ranges(segments) if registered else ()
    for hook in registered:
        try:
            hook(ranges)
        except Exception as error:
            raise _failed("on_before_unmap", hook, error, "Nothing was put to sleep.") from error


def run_after_unmap(segments: Sequence[_C.SegmentInfo]) -> None:
    """Calls all hooks, then raises the first exception as a CumemError; others are logged."""
    _run_all("on_after_unmap", _after_unmap, segments, "The memory is asleep.")


def run_after_map(segments: Sequence[_C.SegmentInfo]) -> None:
    """Calls all hooks, then raises the first exception as a CumemError; others are logged."""
    left = "The memory is awake and its contents valid."
    _run_all("on_after_map", _after_map, segments, left)


def _run_all(
    kind: str, hooks: list[HookHandle], segments: Sequence[_C.SegmentInfo], left: str
) -> None:
    registered = _registered(hooks) if segments else []
    ranges = _ranges(segments) if registered else ()
    first: CumemError | None = None
    for hook in registered:
        try:
            hook(ranges)
        except Exception as error:  # noqa: BLE001 - collected: the other hooks must run
            failed = _failed(kind, hook, error, left)
            if first is None:
                first = failed
            else:
                _log.error("%s", traced(failed))
    if first is not None:
        raise first


def _add(hooks: list[HookHandle], hook: Hook) -> HookHandle:
    if not callable(hook):
        raise TypeError(f"a hook must be callable, not {type(hook).__name__}")
    handle = HookHandle(hooks, hook)
    with _lock:
        hooks.append(handle)
    return handle


def _registered(hooks: list[HookHandle]) -> list[Hook]:
    with _lock:
        return [handle._hook for handle in hooks]


def _ranges(segments: Sequence[_C.SegmentInfo]) -> tuple[SegmentRange, ...]:
    ordered = sorted(segments, key=lambda info: info.serial)
    return tuple(SegmentRange(info.address, info.bytes, info.tag, info.device) for info in ordered)


def _failed(kind: str, hook: Hook, error: Exception, left: str) -> CumemError:
    name = getattr(hook, "__qualname__", repr(hook))
    failed = CumemError(f"the {kind} hook {name} raised {raised(error)}. {left}")
    failed.__cause__ = error
    return failed
