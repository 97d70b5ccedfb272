"""The file that loads are measured with, and the proof that it was loaded right.

Every 4 bytes depend on their position and on the tensor.
"""

from __future__ import annotations

import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from settings import MIB

_ROW = 4096
_TENSOR_BYTES = 64 * MIB
_STEP = 4 * MIB  # of one read, as a load makes them
_THREADS = min(16, max(2, os.cpu_count() or 2) - 1)  # as many as a load has


def write_model(path: Path, target_bytes: int) -> int:
    """Writes a safetensors file of bf16 matrices; returns the bytes of its tensors."""
    count = max(1, round(target_bytes / _TENSOR_BYTES))
    size = min(_TENSOR_BYTES, max(2 * _ROW, target_bytes // (2 * _ROW) * 2 * _ROW))
    header = {
        f"layers.{index}": {
            "dtype": "BF16",
            "shape": [size // (2 * _ROW), _ROW],
            "data_offsets": [index * size, (index + 1) * size],
        }
        for index in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    words = _pattern(size // 4, torch.device("cpu"))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for index in range(count):
            file.write(memoryview((words + index).numpy()).cast("B"))
    return count * size


def same_as_written(tensors: Mapping[str, torch.Tensor]) -> bool:
    """Does each tensor hold what :func:`write_model` wrote?"""
    words: torch.Tensor | None = None
    for name, tensor in tensors.items():
        found = tensor.reshape(-1).view(torch.int32)
        if words is None:
            words = _pattern(found.numel(), found.device)
        if not torch.equal(found, words + int(name.removeprefix("layers."))):
            return False
    return words is not None


def read_all(path: str, *, direct: bool = False) -> None:
    """Reads a file once, with several threads and without keeping anything.

    Args:
        path: the file.
        direct: past the page cache; OSError where the file system has no such way.
    """
    size = os.path.getsize(path)
    descriptor = os.open(path, os.O_RDONLY | (os.O_DIRECT if direct else 0))
    buffers = [mmap.mmap(-1, _STEP) for _ in range(_THREADS)]  # direct: must begin at a page

    def read(first: int) -> None:
        for at in range(first * _STEP, size, _THREADS * _STEP):
            wanted = min(_STEP, size - at)
            done = os.preadv(descriptor, [buffers[first]], at)
            while done < wanted:
                rest = memoryview(buffers[first])[done:]
                done += os.preadv(descriptor, [rest], at + done)

    try:
        with ThreadPoolExecutor(_THREADS) as threads:
            list(threads.map(read, range(_THREADS)))
    finally:
        os.close(descriptor)


def evict(path: str) -> None:
    """Lets the system forget the file's pages; ends the process where it does not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        if any(_is_cached(descriptor, at) for at in range(0, os.path.getsize(path), 64 * MIB)):
            raise SystemExit(f"{path} stays in memory: give --cold a --folder on a disk")
    finally:
        os.close(descriptor)


def _is_cached(descriptor: int, at: int) -> bool:
    try:
        return os.preadv(descriptor, [bytearray(1)], at, os.RWF_NOWAIT) > 0
    except BlockingIOError:
        return False
    except OSError:  # a file system in memory does not answer
        return True


def _pattern(count: int, device: torch.device) -> torch.Tensor:
    index = torch.arange(count, dtype=torch.int32, device=device)
    return (index * 1640531527) ^ (index >> 7)
