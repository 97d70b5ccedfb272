"""Where is the memory now, and do the books agree with the driver?"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from cumem import _C, _registry, _runtime, _snapshot
from cumem._runtime import Runtime
from cumem._text import size
from cumem.errors import CumemError, translated


@dataclass(frozen=True)
class TagStats:
    """One tag, all devices together; sizes in bytes.

    ``mapped_bytes + asleep_bytes == segment_bytes`` and ``live_bytes <= segment_bytes``.
    """

    tag: str
    segments: int
    segment_bytes: int
    mapped_bytes: int
    asleep_bytes: int
    live_bytes: int
    backup_bytes: int
    epoch: int


@dataclass(frozen=True)
class DeviceStats:
    """One device; sizes in bytes.

    Attributes:
        used_bytes: in use by everybody, as the driver counts it.
        mapped_bytes: of that, ours.
        reserved_bytes: what torch counts as reserved, asleep or awake (it cannot know).
    """

    device: str
    total_bytes: int
    used_bytes: int
    mapped_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Stats:
    """A consistent picture of one moment; sizes in bytes.

    Attributes:
        tags: per tag, by name.
        devices: devices that have had a pool, by ordinal.
        host_bytes: host memory held for backups.
        host_used_bytes: of that, in backups now.
        pageable_bytes: of the held, memory that is not pinned, by choice or because the driver
            refused.
        pinned_file_bytes: pages of files that ``load_file(pin_file=True)`` keeps pinned; they
            are the system's, and not in ``host_bytes``.
        reserved_addresses: bytes of address space reserved.
        physical_bytes: device memory taken from the driver and not given back.
        handles_created: physical allocations taken since the start.
        handles_released: of those, given back.
        waiting_frees: frees put off because of a graph capture.
        quarantined_segments: segments that the driver would not take back yet; they are of no
            tag, and tried again by :func:`trim` and by every sleep and wake.
        quarantined_bytes: their bytes.
        refused_calls: calls of destructors that the driver refused.
        unknown_frees: frees of addresses that are not ours.
        failed_mallocs: allocations that the driver refused.
    """

    tags: tuple[TagStats, ...]
    devices: tuple[DeviceStats, ...]
    host_bytes: int
    host_used_bytes: int
    pageable_bytes: int
    pinned_file_bytes: int
    reserved_addresses: int
    physical_bytes: int
    handles_created: int
    handles_released: int
    waiting_frees: int
    quarantined_segments: int
    quarantined_bytes: int
    refused_calls: int
    unknown_frees: int
    failed_mallocs: int

    @property
    def segment_bytes(self) -> int:
        return sum(tag.segment_bytes for tag in self.tags)

    @property
    def mapped_bytes(self) -> int:
        return sum(tag.mapped_bytes for tag in self.tags)

    @property
    def asleep_bytes(self) -> int:
        return sum(tag.asleep_bytes for tag in self.tags)

    @property
    def live_bytes(self) -> int:
        return sum(tag.live_bytes for tag in self.tags)

    def __str__(self) -> str:
        lines = [_device_line(device) for device in self.devices]
        lines += [_tag_line(tag) for tag in self.tags]
        lines.append(f"host: {size(self.host_bytes)} held, {size(self.host_used_bytes)} in backups")
        if self.pinned_file_bytes:
            lines.append(f"pages of files: {size(self.pinned_file_bytes)} pinned")
        return "\n".join(lines)


_EMPTY = Stats((), (), *([0] * 14))


def stats() -> Stats:
    """Where every byte is; empty when nothing was allocated yet.

    Raises:
        DriverError: the driver cannot say.
    """
    runtime = _runtime.ready("stats()")
    if runtime is None:
        return _EMPTY
    with translated("stats()", "Nothing was changed."):
        return _collect(runtime)


def check() -> None:
    """Proves the invariants against the driver; returns when they hold.

    For each tag mapped + asleep = segment bytes and live <= segment bytes; created
    minus released handles = mapped chunks; every chunk is mapped and accessible
    exactly when our books say so.

    Raises:
        CumemError: they do not; the message names the first disagreement.
    """
    runtime = _runtime.ready("check()")
    if runtime is None:
        return
    with translated("check()", "Nothing was changed."):
        try:
            runtime.allocator.verify()
        except _C.StatusError as error:
            if error.fault != "integrity":
                raise
            at = f"{error.call} at {error.address:#x}"
            raise CumemError(
                f"check(): {at}: the books and the driver disagree; please report this"
            ) from error
    for tag in _collect(runtime).tags:
        if tag.mapped_bytes + tag.asleep_bytes != tag.segment_bytes:
            raise CumemError(f"check(): tag {tag.tag!r}: mapped + asleep is not its segment bytes")
        if tag.live_bytes > tag.segment_bytes:
            raise CumemError(f"check(): tag {tag.tag!r}: more live bytes than segment bytes")


def _collect(runtime: Runtime) -> Stats:
    snapshot = _snapshot.take(runtime)
    infos = _snapshot.reconciled(runtime, snapshot)
    ledger, counters = runtime.driver.ledger(), runtime.allocator.counters()
    host = runtime.allocator.host_usage()
    return Stats(
        tags=tuple(_tag_stats(infos, snapshot)),
        devices=tuple(_device_stats(runtime, infos)),
        host_bytes=host.held_bytes,
        host_used_bytes=host.used_bytes,
        pageable_bytes=host.pageable_bytes,
        pinned_file_bytes=sum(info.pinned_file_bytes for info in infos),
        reserved_addresses=ledger["reserved_bytes"],
        physical_bytes=ledger["physical_bytes"],
        handles_created=ledger["handles_created"],
        handles_released=ledger["handles_released"],
        waiting_frees=counters.waiting,
        quarantined_segments=counters.quarantined,
        quarantined_bytes=counters.quarantined_bytes,
        refused_calls=ledger["refused"],
        unknown_frees=counters.unknown,
        failed_mallocs=counters.failed_mallocs,
    )


def _tag_stats(
    infos: list[_C.SegmentInfo], snapshot: list[_snapshot.Segment]
) -> Iterable[TagStats]:
    segments = {segment.address: segment for segment in snapshot}
    for tag in sorted(_registry.known_tags()):
        own = [info for info in infos if info.owner.tag == tag]
        yield TagStats(
            tag=tag,
            segments=len(own),
            segment_bytes=sum(info.bytes for info in own),
            mapped_bytes=sum(info.mapped_bytes for info in own),
            asleep_bytes=sum(info.bytes - info.mapped_bytes for info in own),
            live_bytes=sum(_live_bytes(info, segments.get(info.address)) for info in own),
            backup_bytes=sum(info.backup_bytes for info in own),
            epoch=_registry.tag_state(tag).epoch,
        )


def _live_bytes(info: _C.SegmentInfo, segment: _snapshot.Segment | None) -> int:
    return sum(block.bytes for block in _snapshot.live_in(info, segment))


def _device_stats(runtime: Runtime, infos: list[_C.SegmentInfo]) -> Iterable[DeviceStats]:
    for device in sorted(runtime.watched):
        known = runtime.allocator.device_info(device)
        yield DeviceStats(
            device=runtime.device_name(device),
            total_bytes=known.total_bytes,
            used_bytes=known.total_bytes - known.free_bytes,
            mapped_bytes=sum(info.mapped_bytes for info in infos if info.device == device),
            reserved_bytes=runtime.backend.reserved_bytes(device),
        )


def _device_line(device: DeviceStats) -> str:
    return (
        f"{device.device}: {size(device.used_bytes)} of {size(device.total_bytes)} in use, "
        f"{size(device.mapped_bytes)} mapped by cumem, torch reserves {size(device.reserved_bytes)}"
    )


def _tag_line(tag: TagStats) -> str:
    return (
        f"{tag.tag}: {tag.segments} segment(s), {size(tag.segment_bytes)}: "
        f"{size(tag.mapped_bytes)} mapped, {size(tag.asleep_bytes)} asleep, "
        f"{size(tag.live_bytes)} live, {size(tag.backup_bytes)} backed up"
    )
