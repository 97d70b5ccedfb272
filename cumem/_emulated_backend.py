"""How does cumem reach tensors on the cpu when the driver is emulated?

The same interface as :mod:`cumem._torch`, over a model of torch's pool that asks
the same two C functions for memory.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

from cumem import _C, _emulated_pool
from cumem._backend import TorchPool
from cumem._emulated_tensors import placing_into


def _plugin_functions() -> _emulated_pool.PluginFunctions:
    library = ctypes.CDLL(_C.__file__)
    malloc = library.cumem_malloc
    malloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
    malloc.restype = ctypes.c_void_p
    free = library.cumem_free
    free.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
    free.restype = None
    return _emulated_pool.PluginFunctions(malloc, free)


class _PlainPool:
    """Stands for a pool of torch's own memory: ordinary tensors of the host."""

    _numbers = itertools.count(1)

    def __init__(self) -> None:
        self.id = (0, -next(self._numbers))  # no emulated pool has a number below zero

    def use_count(self) -> int:
        return 1


class EmulatedBackend:
    """A model of torch's caching allocator for one emulated machine.

    Args:
        devices: how many devices the machine has.
        streams: gives the streams of a device that play the part of torch's own.
        capturing: says whether the stream that plays the current one is capturing.
    """

    device_type = "cpu"

    def __init__(
        self,
        devices: int,
        streams: Callable[[int], list[int]],
        capturing: Callable[[], bool],
    ) -> None:
        self._devices = devices
        self._streams = streams
        self._capturing = capturing
        self._functions = _plugin_functions()

    def device_count(self) -> int:
        return self._devices

    def current_device(self) -> int:
        return 0

    def make_pool(self, device: int) -> TorchPool:
        return _emulated_pool.EmulatedMemPool(self._functions, device)

    def make_plain_pool(self, device: int) -> TorchPool:
        return _PlainPool()

    def use_pool(self, pool: TorchPool, device: int) -> AbstractContextManager[None]:
        if isinstance(pool, _PlainPool):
            return placing_into(None)
        return _emulated_pool.use_emulated_pool(cast(_emulated_pool.EmulatedMemPool, pool))

    def prepare_stream(self, device: int) -> None:
        pass  # libraries keep nothing on the cpu

    def drop_pool(self, pool: TorchPool) -> None:
        if not isinstance(pool, _PlainPool):
            cast(_emulated_pool.EmulatedMemPool, pool).retire()

    def snapshot(self) -> Sequence[dict[str, Any]]:
        return _emulated_pool.memory_snapshot()

    def empty_cache(self) -> None:
        _emulated_pool.empty_cache()

    def is_capturing(self) -> bool:
        return self._capturing()

    def current_stream(self, device: int) -> int:
        return self._streams(device)[0]

    def streams(self, device: int) -> list[int]:
        return self._streams(device)

    def plain_segments(self) -> AbstractContextManager[None]:
        return nullcontext()

    def reserved_bytes(self, device: int) -> int:
        return sum(
            segment["total_size"] for segment in self.snapshot() if segment["device"] == device
        )

    def allocated_bytes(self, device: int) -> int:
        return sum(
            segment["allocated_size"] for segment in self.snapshot() if segment["device"] == device
        )

    def device_uuid(self, device: int) -> str | None:
        return None
