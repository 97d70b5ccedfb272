"""Where are tensors to be made, and what can be given back?"""

from __future__ import annotations

import torch

from cumem import _registry, _runtime, _snapshot
from cumem._arguments import known_tags
from cumem._runtime import Runtime


def default_device() -> torch.device:
    """Where tensors are to be made: ``cuda``, or ``cpu`` under the emulator.

    Raises:
        DriverError: no usable driver; the message says what to do.
    """
    return torch.device(_runtime.current().backend.device_type)


def trim(tag: str | None = None) -> int:
    """Gives wholly free segments of idle pools back to the driver; returns their bytes.

    Live tensors keep their segments. Where a scope or capture is open on a device,
    its pools follow when it ends. What the driver would not take back when it was freed, of
    any tag, is tried again first.

    Torch's own free memory goes back as well, as by ``torch.cuda.empty_cache()``. Where
    anything does, this waits for all work on its device, on every stream, copies of other
    tags among it: unmapping does not wait by itself, and torch does not say which streams
    or captured graphs still use a block that was freed.

    Args:
        tag: only this tag; None: all.

    Raises:
        ValueError: an unknown tag. TypeError: not a string. Nothing is changed.
    """
    if tag is not None:
        known_tags([tag])
    runtime = _runtime.ready("trim()")
    if runtime is None:
        return 0
    before, refused = _segments(runtime, tag), _refused_bytes(runtime)
    runtime.allocator.catch_up()
    _registry.retire([entry for entry in _registry.pools() if tag in (None, entry.tag)])
    _snapshot.drop_retired(runtime)
    _snapshot.empty_cache(runtime)
    left = _segments(runtime, tag)
    gone = sum(count for serial, count in before.items() if serial not in left)
    return max(0, gone + refused - _refused_bytes(runtime))


def release_host_memory() -> int:
    """Gives host memory back to the system; returns its bytes.

    Backups of what is asleep stay. Those kept for memory that is awake go, so the
    next sleep copies everything.
    """
    runtime = _runtime.ready("release_host_memory()")
    return runtime.allocator.release_host() if runtime is not None else 0


def _refused_bytes(runtime: Runtime) -> int:
    return runtime.allocator.counters().quarantined_bytes


def _segments(runtime: Runtime, tag: str | None) -> dict[int, int]:
    """Bytes by serial: other threads may allocate meanwhile, also at the same addresses."""
    segments = runtime.allocator.segments()
    return {info.serial: info.bytes for info in segments if tag in (None, info.tag)}
