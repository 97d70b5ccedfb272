"""Where is my memory?

One picture for people: what :func:`cumem.stats` counts, per device and tag, and beside
it who else uses the device, what the holes cost, which blocks are the largest and
where they were allocated, and what a sleep will lose.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import Any

import torch

from cumem import _C, _gpu_processes, _keep, _report_text, _runtime, _snapshot, inspection
from cumem._gpu_processes import GpuProcess
from cumem._runtime import Runtime
from cumem._text import size
from cumem.errors import translated
from cumem.options import OnSleep

_LARGEST = 10  # blocks of a tag that are named
_SMALL_BYTES = 1 << 20  # torch's own line between small and large blocks


@dataclass(frozen=True)
class BlockReport:
    """One live block.

    Attributes:
        address: where it starts.
        bytes: its size, rounded up by torch.
        requested_bytes: what was asked for.
        tensors: Python tensors that hold it, as ``float16[128, 64]``.
        stack: where it was allocated, innermost call first; empty unless torch records
            history (``torch.cuda.memory._record_memory_history()``).
    """

    address: int
    bytes: int
    requested_bytes: int
    tensors: tuple[str, ...]
    stack: tuple[str, ...]


@dataclass(frozen=True)
class TagReport:
    """One tag on one device; sizes in bytes.

    ``mapped_bytes + asleep_bytes == segment_bytes == live_bytes + hole_bytes``.

    Attributes:
        on_sleep: the policies of its pools.
        hole_bytes: in its segments, and in no live block.
        largest: its ten largest live blocks, the largest first.
        intruders: small blocks (up to 1 MiB) among large ones that a sleep discards:
            tables and scales beside a cache. What :func:`keep` protects is not here.
    """

    tag: str
    on_sleep: tuple[str, ...]
    segments: int
    segment_bytes: int
    mapped_bytes: int
    asleep_bytes: int
    live_bytes: int
    hole_bytes: int
    backup_bytes: int
    largest: tuple[BlockReport, ...]
    intruders: tuple[BlockReport, ...]


@dataclass(frozen=True)
class DeviceReport:
    """One device; sizes in bytes.

    ``used_bytes == mapped_bytes + torch_bytes + other_bytes``, as of one moment.

    Attributes:
        used_bytes: in use by everybody, as the driver counts it.
        mapped_bytes: of that, cumem's.
        torch_bytes: reserved by torch outside of cumem's pools.
        other_bytes: everything else: this process's CUDA context and libraries, and
            other processes. Torch and the driver are asked one after the other, so what
            other processes do meanwhile ends up here.
        processes: who uses the device, as the driver's management library says; empty
            where that is not installed (``pip install nvidia-ml-py``) or is not told,
            as in most containers.
    """

    device: str
    total_bytes: int
    used_bytes: int
    mapped_bytes: int
    torch_bytes: int
    other_bytes: int
    processes: tuple[GpuProcess, ...]
    tags: tuple[TagReport, ...]


@dataclass(frozen=True)
class MemoryReport:
    """Where memory is, device by device; sizes in bytes.

    Attributes:
        devices: devices that have had a pool, by ordinal.
        host_bytes: host memory held for backups.
        host_used_bytes: of that, in backups now.
        pinned_bytes: of the held, pinned.
    """

    devices: tuple[DeviceReport, ...]
    host_bytes: int
    host_used_bytes: int
    pinned_bytes: int

    def as_dict(self) -> dict[str, Any]:
        """All of it, as plain dicts and lists."""
        return dataclasses.asdict(self)

    def to_json(self) -> str:
        """All of it as JSON, the same text for the same state."""
        return json.dumps(self.as_dict(), indent=2)

    def __str__(self) -> str:
        lines = [line for device in self.devices for line in _report_text.device_lines(device)]
        lines.append(
            f"host: {size(self.host_bytes)} held ({size(self.pinned_bytes)} pinned), "
            f"{size(self.host_used_bytes)} in backups"
        )
        return "\n".join(lines)


def report() -> MemoryReport:
    """Where every byte is, and what a sleep would lose; empty when nothing was allocated yet.

    For people and dashboards; :func:`stats` is the cheaper one. Safe from any thread.

    Raises:
        DriverError: the driver cannot say.
    """
    runtime = _runtime.if_started()
    if runtime is None:
        return MemoryReport((), 0, 0, 0)
    with translated("report()", "Nothing was changed.", runtime.backend.device_type):
        return _collect(runtime)


def _collect(runtime: Runtime) -> MemoryReport:
    snapshot = {segment.address: segment for segment in _snapshot.take(runtime)}
    infos = _snapshot.reconciled(runtime, list(snapshot.values()))
    host = runtime.allocator.host_usage()
    return MemoryReport(
        devices=tuple(
            _device(runtime, device, [info for info in infos if info.device == device], snapshot)
            for device in sorted(runtime.watched)
        ),
        host_bytes=host.held_bytes,
        host_used_bytes=host.used_bytes,
        pinned_bytes=host.held_bytes - host.pageable_bytes,
    )


def _device(
    runtime: Runtime,
    device: int,
    infos: list[_C.SegmentInfo],
    snapshot: dict[int, _snapshot.Segment],
) -> DeviceReport:
    known = runtime.allocator.device_info(device)
    used = known.total_bytes - known.free_bytes
    mapped = sum(info.mapped_bytes for info in infos)
    in_pools = sum(info.bytes for info in infos if info.address in snapshot)
    torchs = max(0, runtime.backend.reserved_bytes(device) - in_pools)
    tags = sorted({info.owner.tag for info in infos})
    return DeviceReport(
        device=runtime.device_name(device),
        total_bytes=known.total_bytes,
        used_bytes=used,
        mapped_bytes=mapped,
        torch_bytes=torchs,
        other_bytes=used - mapped - torchs,
        processes=_gpu_processes.on_device(runtime.backend.device_uuid(device)),
        tags=tuple(
            _tag(tag, [info for info in infos if info.owner.tag == tag], snapshot) for tag in tags
        ),
    )


def _tag(
    tag: str, infos: list[_C.SegmentInfo], snapshot: dict[int, _snapshot.Segment]
) -> TagReport:
    details = [(info, found) for info in infos for found in _details(info, snapshot)]
    live = sum(found.block.bytes for _, found in details)
    segment_bytes = sum(info.bytes for info in infos)
    mapped = sum(info.mapped_bytes for info in infos)
    ordered = sorted(details, key=lambda pair: (-pair[1].block.bytes, pair[1].block.address))
    largest = [found for _, found in ordered[:_LARGEST]]
    intruders = _intruders(ordered)
    holders = inspection.holders([found.block for found in (*largest, *intruders)])
    return TagReport(
        tag=tag,
        on_sleep=tuple(sorted({info.owner.policy for info in infos})),
        segments=len(infos),
        segment_bytes=segment_bytes,
        mapped_bytes=mapped,
        asleep_bytes=segment_bytes - mapped,
        live_bytes=live,
        hole_bytes=segment_bytes - live,
        backup_bytes=sum(info.backup_bytes for info in infos),
        largest=tuple(_block(found, holders) for found in largest),
        intruders=tuple(_block(found, holders) for found in intruders),
    )


def _details(
    info: _C.SegmentInfo, snapshot: dict[int, _snapshot.Segment]
) -> list[_snapshot.Details]:
    """Live blocks of a segment, torch's or cumem's own."""
    segment = snapshot.get(info.address)
    if segment is not None:
        return segment.details()
    return [_snapshot.Details(block, block.bytes, ()) for block in _snapshot.live_in(info, segment)]


def _intruders(
    ordered: list[tuple[_C.SegmentInfo, _snapshot.Details]],
) -> list[_snapshot.Details]:
    """The small blocks that a sleep discards, where the largest one is not small itself.

    Only among those of torch's: a segment of cumem's own is what somebody asked for.
    """
    discarded = [
        found
        for info, found in ordered
        if info.owner.pool and info.owner.policy == OnSleep.DISCARD and not info.asleep
    ]
    if not discarded or discarded[0].block.bytes <= _SMALL_BYTES:
        return []
    small = [found for found in discarded if found.block.bytes <= _SMALL_BYTES]
    kept = _keep.ranges() if small else []
    return [found for found in small if not _meets_any(found.block, kept)]


def _meets_any(block: _snapshot.Block, ranges: list[tuple[int, int]]) -> bool:
    end = block.address + block.bytes
    return any(at < end and block.address < at + length for at, length in ranges)


def _block(found: _snapshot.Details, holders: dict[int, list[torch.Tensor]]) -> BlockReport:
    block = found.block
    tensors = {_described(tensor) for tensor in holders.get(block.address, ())}
    return BlockReport(
        block.address, block.bytes, found.requested, tuple(sorted(tensors)), found.stack
    )


def _described(tensor: torch.Tensor) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        lengths = "[nested]" if tensor.is_nested else str(list(tensor.shape))
        return f"{str(tensor.dtype).removeprefix('torch.')}{lengths}"
