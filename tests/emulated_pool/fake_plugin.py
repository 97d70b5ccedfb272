"""What do tests of the emulated pool stand on? Memory that remembers what was asked of it."""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable
from typing import Any

import torch

from cumem._emulated_pool import EmulatedMemPool, PluginFunctions
from cumem._emulated_tensors import give

LIBC = ctypes.CDLL(None)
LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
PATTERN = bytes(range(1, 252))


class FakePlugin:
    """malloc and free over anonymous maps that start with a pattern; remembers every call."""

    def __init__(self, capacity: int = 1 << 40) -> None:
        self.capacity = capacity
        self.maps: dict[int, mmap.mmap] = {}
        self.asked: list[int] = []
        self.freed: list[int] = []
        self.functions = PluginFunctions(self.malloc, self.free)

    def malloc(self, size: int, device: int, stream: int) -> int | None:
        self.asked.append(size)
        if sum(map(len, self.maps.values())) + size > self.capacity:
            return None
        memory = mmap.mmap(-1, size)
        memory.write((PATTERN * (size // len(PATTERN) + 1))[:size])
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self.maps[address] = memory
        return address

    def free(self, address: int, size: int, device: int, stream: int) -> None:
        assert len(self.maps.pop(address)) == size
        self.freed.append(size)

    def protect(self, access: int) -> None:
        for address, memory in self.maps.items():
            assert LIBC.mprotect(address, len(memory), access) == 0

    def holds(self, tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        return any(base <= start and end <= base + len(m) for base, m in self.maps.items())


class Owner:
    """Has a block until it dies."""


def take(pool: EmulatedMemPool, *sizes: int) -> list[Owner]:
    owners = [Owner() for _ in sizes]
    for owner, size in zip(owners, sizes, strict=True):
        give(pool.allocate(size), owner)
    return owners


def blocks(pool: EmulatedMemPool) -> list[tuple[int, str]]:
    found = [block for segment in pool.snapshot() for block in segment["blocks"]]
    return [(block["size"], block["state"]) for block in found]


def live(pool: EmulatedMemPool) -> list[int]:
    return [size for size, state in blocks(pool) if state == "active_allocated"]


def ramp(count: int) -> torch.Tensor:
    return torch.arange(count) * 7 + 3


def is_of(info: dict[str, Any], pool: EmulatedMemPool) -> bool:
    return bool(info["segment_pool_id"] == pool.id)


def in_thread(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
