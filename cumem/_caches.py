"""How does a full device get room? Torch gives up what it only caches."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from cumem import _C, _snapshot
from cumem._runtime import Runtime

_T = TypeVar("_T")


def with_cleared_caches(runtime: Runtime, work: Callable[[], _T]) -> _T:
    """Does it; when the device is full, once more without what torch only caches."""
    try:
        return work()
    except _C.StatusError as error:
        if error.fault != "device_memory":
            raise
    _snapshot.empty_cache(runtime)
    return work()


def clear_caches_when_short(
    runtime: Runtime,
    segments: Collection[_C.SegmentInfo],
    leaving: Collection[_C.SegmentInfo] = (),
) -> None:
    """Lets torch give up what it caches where what is to come finds no room."""
    for device in {info.device for info in segments}:
        wanted = sum(info.bytes for info in segments if info.device == device)
        wanted -= sum(info.mapped_bytes for info in leaving if info.device == device)
        if runtime.allocator.device_info(device).free_bytes < wanted:
            _snapshot.empty_cache(runtime)
