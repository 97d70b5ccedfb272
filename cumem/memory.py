"""Where are tensors to be made, and what can be given back?"""

from __future__ import annotations

import torch

from cumem import _registry, _runtime, _snapshot
from cumem._runtime import Runtime
from cumem._text import choices


def default_device() -> torch.device:
    """Where tensors are to be made: ``cuda``, or ``cpu`` under the emulator.

    Raises:
        DriverError: no usable driver; the message says what to do.
    """
    return torch.device(_runtime.current().backend.device_type)


def trim(tag: str | None = None) -> int:
    """Gives wholly free segments of idle pools back to the driver; returns their bytes.

    Live tensors keep their segments. Where a scope or capture is open on a device,
    its pools follow when it ends.

    Args:
        tag: only this tag; None: all.

    Raises:
        ValueError: an unknown tag; nothing is changed.
    """
    known = _registry.known_tags()
    if tag is not None and tag not in known:
        raise ValueError(f"unknown tag {tag!r}; known tags: {choices(known)}")
    runtime = _runtime.if_started()
    if runtime is None:
        return 0
    before = _segment_bytes(runtime)
    _registry.retire([entry for entry in _registry.pools() if tag in (None, entry.tag)])
    _snapshot.drop_retired(runtime)
    if not _registry.open_scopes():
        runtime.backend.empty_cache()
    return before - _segment_bytes(runtime)


def release_host_memory() -> int:
    """Gives host memory that no backup needs back to the system; returns its bytes."""
    runtime = _runtime.if_started()
    return runtime.allocator.release_host() if runtime is not None else 0


def _segment_bytes(runtime: Runtime) -> int:
    return sum(info.bytes for info in runtime.allocator.segments())
