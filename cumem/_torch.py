"""How does cumem plug into torch's CUDA caching allocator?

The only module that touches torch's allocator classes.

Note [Pools are immortal by default]: a ``MemPool`` that is torn down at
interpreter exit, after the allocator behind it, ends the process with an error.
So each pool gets one reference that only :meth:`CudaBackend.drop_pool` takes
away, and the allocator object is never let go.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast

import torch

from cumem import _C, options
from cumem._backend import TorchPool

# c10 keeps this many streams per device and priority, for ever (c10/cuda/CUDAStream.cpp).
_STREAMS_PER_PRIORITY = 32
# The default, which torch.cuda.graph captures on, and the high one.
_PRIORITIES = (0, -1)


class CudaBackend:
    """Torch's CUDA caching allocator, with our two C functions behind its pools."""

    device_type = "cuda"

    def __init__(self) -> None:
        plugin = torch.cuda.memory.CUDAPluggableAllocator(_C.__file__, "cumem_malloc", "cumem_free")
        self._allocator = plugin.allocator()
        _immortal(plugin)
        _immortal(self._allocator)
        self._segments = _PlainSegments()

    def device_count(self) -> int:
        return torch.cuda.device_count()

    def current_device(self) -> int:
        return torch.cuda.current_device()

    def make_pool(self, device: int) -> TorchPool:
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool(self._allocator)
        _immortal(pool)
        return cast(TorchPool, pool)

    def make_plain_pool(self, device: int) -> TorchPool:
        with torch.cuda.device(device):
            pool = torch.cuda.MemPool()
        _immortal(pool)
        return cast(TorchPool, pool)

    def use_pool(self, pool: TorchPool, device: int) -> AbstractContextManager[None]:
        return torch.cuda.use_mem_pool(cast(torch.cuda.MemPool, pool), device=device)

    def prepare_stream(self, device: int) -> None:
        # Torch takes the workspace of a stream at the stream's first matrix product.
        # In a scope it would become the pool's, and a product while the pool is
        # asleep would use memory that is not there.
        with torch.cuda.device(device):
            torch.cuda.current_blas_handle()

    def drop_pool(self, pool: TorchPool) -> None:
        _mortal(pool)

    def snapshot(self) -> Sequence[dict[str, Any]]:
        if not torch.cuda.is_initialized():
            return []
        return cast("Sequence[dict[str, Any]]", torch.cuda.memory_snapshot(include_traces=False))

    def empty_cache(self) -> None:
        torch.cuda.empty_cache()

    def is_capturing(self) -> bool:
        return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()

    def current_stream(self, device: int) -> int:
        return int(torch.cuda.current_stream(device).cuda_stream)

    def streams(self, device: int) -> list[int]:
        # Round robin: asking for all of them leaves the turn where it was.
        return [
            torch.cuda.Stream(device=device, priority=priority).cuda_stream
            for priority in _PRIORITIES
            for _ in range(_STREAMS_PER_PRIORITY)
        ]

    def plain_segments(self) -> AbstractContextManager[None]:
        return self._segments.held()

    def reserved_bytes(self, device: int) -> int:
        return torch.cuda.memory_reserved(device)

    def allocated_bytes(self, device: int) -> int:
        return torch.cuda.memory_allocated(device)

    def device_uuid(self, device: int) -> str | None:
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"


def _immortal(thing: object) -> None:
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))


def _mortal(thing: object) -> None:
    ctypes.pythonapi.Py_DecRef(ctypes.py_object(thing))


class _PlainSegments:
    """Expandable segments, off while anybody needs them off.

    With expandable segments torch maps memory itself and never asks a pluggable
    allocator. The setting belongs to the process, so the first scope switches it
    off and the last one puts back what was there.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders = 0
        self._before: str | None = None

    @contextmanager
    def held(self) -> Iterator[None]:
        with self._lock:
            self._holders += 1
            settings = allocator_settings()
            if has_expandable_segments(settings):
                self._before = settings if self._before is None else self._before
                _apply(_without_expandable(settings))
        try:
            yield
        finally:
            with self._lock:
                self._holders -= 1
                if self._holders == 0 and self._before is not None:
                    _apply(self._before)
                    self._before = None


def allocator_settings() -> str:
    """What is in force now, as one string; settings at run time come first."""
    read = getattr(torch._C, "_accelerator_getAllocatorSettings", None)
    if read is not None:
        current = str(read())
    elif torch.cuda.is_initialized():  # torch 2.10 and 2.11 say it only here
        found = torch._C._cuda_memorySnapshot((0, 0, False))["allocator_settings"]
        current = str(found["PYTORCH_CUDA_ALLOC_CONF"])
    else:
        current = ""
    return current or options.allocator_settings_in_environment()


def has_expandable_segments(settings: str) -> bool:
    """Do these settings switch expandable segments on?"""
    return "expandable_segments:true" in settings.replace(" ", "").lower()


def _without_expandable(settings: str) -> str:
    # A setting that is absent from the string is reset, so all others are kept.
    kept = [part for part in _parts(settings) if not part.lower().startswith("expandable_segments")]
    return ",".join([*kept, "expandable_segments:False"])


def _parts(settings: str) -> list[str]:
    """Splits at commas outside brackets: a value may be a list."""
    parts, depth, start = [], 0, 0
    for index, character in enumerate(settings):
        depth += (character == "[") - (character == "]")
        if character == "," and depth == 0:
            parts.append(settings[start:index].strip())
            start = index + 1
    return [part for part in [*parts, settings[start:].strip()] if part]


def _apply(settings: str) -> None:
    torch._C._accelerator_setAllocatorSettings(settings)
