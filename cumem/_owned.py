"""How does cumem take memory that torch did not ask for, and show it as tensors?

A segment of exactly the bytes that are wanted, rounded up to the device's granularity
and not to torch's 20 MiB, with tensors over it that copy nothing. It sleeps and wakes
like every other segment of its tag.

Note [One storage a tensor]: the tensors of a segment share the memory and nothing else.
With one storage for all, a deep copy or a saved file of one tensor would hold the whole
segment.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch

from cumem import _C, _caches, _digest, _registry, _runtime
from cumem._arguments import check_tag, pool_policy
from cumem._devices import DeviceLike, device_index
from cumem._registry import PoolEntry
from cumem._runtime import Runtime
from cumem.errors import AsleepError, translated
from cumem.options import OnSleep

_MOST_BYTES = 1 << 63


class OwnedSegment:
    """One segment of cumem's own.

    It is given back when this object and the last tensor over it are gone, after pending
    work, awake or asleep.

    Attributes:
        tag: its tag.
        on_sleep: what a sleep does with its contents.
        device: where it is.
    """

    def __init__(self, runtime: Runtime, entry: PoolEntry, memory: _C.Memory) -> None:
        self._runtime = runtime
        self._memory = memory
        self._bytes = memory.bytes
        self.tag = entry.tag
        self.on_sleep = entry.on_sleep
        self.device = torch.device(runtime.backend.device_type, entry.device)

    @property
    def address(self) -> int:
        """Where it starts; a multiple of the device's granularity."""
        return self._memory.address

    @property
    def bytes(self) -> int:
        """The bytes that were asked for; what the granularity added is nobody's."""
        return self._bytes

    def tensor(self, dtype: torch.dtype, shape: Sequence[int], offset: int = 0) -> torch.Tensor:
        """A contiguous tensor over the bytes that start at ``offset``; copies nothing.

        Args:
            dtype: any type of torch's.
            shape: lengths in elements.
            offset: in bytes, a multiple of the type's size.

        Raises:
            ValueError: it would not lie in the segment, or not be aligned.
            AsleepError: the segment is asleep. Nothing is made.
        """
        count = math.prod(shape) * dtype.itemsize
        if min(offset, *shape, 0) < 0 or offset + count > self.bytes:
            raise ValueError(
                f"a tensor of {count} bytes at {offset} is not inside a segment of {self.bytes}"
            )
        if offset % dtype.itemsize:
            raise ValueError(f"{dtype} at byte {offset} is not aligned to {dtype.itemsize}")
        if count == 0:
            return torch.empty(tuple(shape), dtype=dtype, device=self.device)
        if not self._runtime.allocator.is_awake(self.address + offset, count):
            raise AsleepError(
                f"a tensor over sleeping memory of tag {self.tag!r} was wanted. Nothing was "
                "made; call wake_up first."
            )
        return _tensor_over(self._memory.view(offset, count), dtype, tuple(shape), self.device)

    def __repr__(self) -> str:
        return f"OwnedSegment(tag={self.tag!r}, device={self.device}, bytes={self.bytes})"


def allocate(
    bytes: int,
    *,
    tag: str,
    on_sleep: OnSleep | str | None = None,
    device: DeviceLike = None,
    chunk_bytes: int = 0,
    capacity: int = 0,
) -> OwnedSegment:
    """A new awake segment of at least ``bytes``, with undefined contents.

    Args:
        bytes: more than 0; rounded up to the device's granularity (2 MiB).
        tag: the name of the memory, any non-empty string.
        on_sleep: as for :func:`cumem.use_memory_pool`.
        device: a device, its index, or None for the current one.
        chunk_bytes: most bytes of one physical allocation; 0: as configured.
        capacity: addresses are reserved for so many bytes, so that it can be resized.

    Raises:
        ValueError: no bytes or beyond any address, an empty tag, an unknown policy, no such
            device.
        TypeError: a wrong type.
        DeviceOutOfMemoryError: no room, also after torch's caches were cleared.
        DriverError: no usable driver, or it refused. Nothing is left by any of these.
    """
    if type(bytes) is not int:
        raise TypeError(f"bytes must be an int, not {type(bytes).__name__}")
    if bytes <= 0:
        raise ValueError(f"a segment has at least one byte, not {bytes}")
    if (most := max(bytes, chunk_bytes, capacity)) >= _MOST_BYTES:
        raise ValueError(f"{most} bytes were wanted: no memory has addresses for so many")
    entry = template(tag, on_sleep, device)
    runtime = _runtime.current()
    with translated(f"allocating for tag {tag!r}", "Nothing was allocated.", kind(runtime)):
        memory = _caches.with_cleared_caches(
            runtime, lambda: _take(runtime, entry, bytes, chunk_bytes, capacity)
        )
    _registry.tag_state(tag)
    return OwnedSegment(runtime, entry, memory)


@contextmanager
def writing(tag: str, device: DeviceLike = None) -> Iterator[None]:
    """Keeps ``tag`` from being put to sleep by others while its memory is being filled.

    A sleep of the tag meanwhile raises :class:`BusyError`, as for an open scope.
    """
    token = _registry.open_scope(template(tag, None, device))
    try:
        yield
    finally:
        _registry.close_scope(token)


def template(
    tag: str, on_sleep: OnSleep | str | None, device: DeviceLike, *, has_file: bool = False
) -> PoolEntry:
    """Tag, device and policy of memory that has no pool of torch's; the device is ready.

    Raises:
        ValueError, TypeError: as :func:`allocate`. DriverError: no usable driver.
    """
    check_tag(tag)
    policy = pool_policy(on_sleep, tag, has_file=has_file)
    runtime = _runtime.current()
    index = device_index(device, runtime)
    _runtime.watch_streams(runtime, index)
    _digest.load_once(runtime, index)
    return PoolEntry(tag, index, policy, graph=False, handle=None, number=0)


def kind(runtime: Runtime) -> str:
    return runtime.backend.device_type


def _take(
    runtime: Runtime, entry: PoolEntry, count: int, chunk_bytes: int, capacity: int
) -> _C.Memory:
    owner = _C.Owner(entry.tag, entry.on_sleep.value)
    stream = runtime.backend.current_stream(entry.device)
    return _C.Memory(runtime.allocator, count, entry.device, stream, owner, chunk_bytes, capacity)


def _tensor_over(
    view: _C.MemoryView, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """See Note [One storage a tensor]. No mode of the caller's should see how it is made."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        whole = (
            torch.as_tensor(cast("Any", view), device=device)
            if device.type == "cuda"
            else torch.frombuffer(view, dtype=torch.uint8)
        )
        strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
        tensor = torch.empty(0, dtype=dtype, device=device)
        return tensor.set_(whole.untyped_storage(), 0, shape, strides)
