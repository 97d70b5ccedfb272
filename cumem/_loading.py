"""Which segments get their first contents? To the core they sleep, to everybody else not.

A load reserves segments that sleep with a file as their backup, and wakes them. A wake of
somebody else must pass over them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from cumem import _C
from cumem._owned import OwnedSegment
from cumem._runtime import Runtime

# Held while a segment begins to exist and is noted, and while both are asked for. The
# garbage collector may run inside it.
_lock = threading.RLock()
_addresses: set[int] = set()


def reserve(make: Callable[[], OwnedSegment]) -> OwnedSegment:
    """What ``make`` returns: a segment that nobody wakes until :func:`forget`."""
    with _lock:
        segment = make()
        _addresses.add(segment.address)
    return segment


def forget(addresses: Iterable[int]) -> None:
    """Says that these segments have their contents, or are gone."""
    with _lock:
        _addresses.difference_update(addresses)


def sleeping(runtime: Runtime) -> list[_C.SegmentInfo]:
    """The segments that sleep, but for those that are being loaded."""
    with _lock:
        segments = runtime.allocator.segments()
        return [info for info in segments if info.asleep and info.address not in _addresses]
