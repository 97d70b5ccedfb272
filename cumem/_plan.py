"""What happens to each segment at a sleep?

Policies and arguments are decided here, per segment, before anything is touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

from cumem import _C, _declared, _keep, _parts, _snapshot
from cumem._runtime import Runtime, current_options
from cumem._snapshot import Range
from cumem.options import CleanCheck, OnSleep

_DIGEST_ALIGNMENT = 16

# Policies with contents that come back, and from where.
_STORES = {
    OnSleep.OFFLOAD: _C.Store.host,
    OnSleep.DISK: _C.Store.disk,
    OnSleep.RELOAD: _C.Store.source,
}


class Decision(NamedTuple):
    """One segment that goes to sleep.

    Attributes:
        backup: ranges that come back, in address order, without overlap.
        backup_bytes: their bytes.
        live_bytes: bytes of its live blocks.
        store: where what comes back is meanwhile.
        unchanged: ranges that are declared as not written since they were backed up.
    """

    info: _C.SegmentInfo
    backup: list[Range]
    backup_bytes: int
    live_bytes: int
    unchanged: list[Range]
    store: _C.Store = _C.Store.host

    @property
    def discarded_bytes(self) -> int:
        return max(0, self.live_bytes - self.backup_bytes)


@dataclass(frozen=True)
class Request:
    """What the user asked for, validated."""

    level: int
    tags: frozenset[str]
    offload_tags: frozenset[str] | None

    def policy(self, tag: str, own: OnSleep) -> OnSleep:
        """What becomes of a segment of this tag, whose pool says ``own``."""
        if own is OnSleep.KEEP or self.level == 0:
            return OnSleep.KEEP
        if self.offload_tags is not None:
            back = own if own in _STORES else OnSleep.OFFLOAD
            return back if tag in self.offload_tags else OnSleep.DISCARD
        return OnSleep.DISCARD if self.level == 2 else own


def decide(runtime: Runtime, request: Request) -> list[Decision]:
    """The segments that ``request`` puts to sleep; empty when there is nothing to do."""
    snapshot = _snapshot.take(runtime)
    return decide_on(_snapshot.reconciled(runtime, snapshot), snapshot, request)


def decide_on(
    infos: list[_C.SegmentInfo], snapshot: list[_snapshot.Segment], request: Request
) -> list[Decision]:
    """The same for what torch and the core have said."""
    segments = {segment.address: segment for segment in snapshot}
    kept = _keep.ranges()
    declared = current_options().clean_check is CleanCheck.DECLARED
    clean = _declared.unchanged() if declared else {}
    fate_of = cache(partial(_fate, request))  # the same for all segments of a tag and policy
    decisions = []
    for info in infos:
        if info.asleep and info.handles == 0:
            continue
        fate = fate_of(info.tag, info.policy)
        if fate is None:
            continue
        segment = None if info.graph else segments.get(info.address)
        coming_back = _coming_back(info, segment, fate, kept)
        unchanged = _unchanged(info, segment, clean) if clean else []
        decisions.append(Decision(info, *coming_back, unchanged, fate.store))
    return decisions


class _Fate(NamedTuple):
    """What becomes of the contents of a segment that goes to sleep, but for what is kept."""

    comes_back: bool
    store: _C.Store


def _fate(request: Request, tag: str, own: str) -> _Fate | None:
    """The same for all segments of ``tag`` whose pool says ``own``; None: they stay awake."""
    if tag not in request.tags:
        return None
    policy = request.policy(tag, OnSleep(own))
    if policy is OnSleep.KEEP:
        return None
    if policy is OnSleep.DISK:
        require_disk_dir()
    return _Fate(policy in _STORES, _STORES.get(policy, _C.Store.host))


def _coming_back(
    info: _C.SegmentInfo, segment: _snapshot.Segment | None, fate: _Fate, kept: list[Range]
) -> tuple[list[Range], int, int]:
    """The ranges that come back, their bytes, and the bytes of all that is live."""
    if fate.comes_back or not kept:  # the blocks one by one say nothing more
        live = _live_runs(info, segment)
        count = _total(live)
        return (live, count, count) if fate.comes_back else ([], 0, count)
    blocks = _live_ranges(info, segment)
    backup = merged(_meeting(blocks, kept) if info.pool else _parts_of(blocks, kept))
    return backup, _total(backup), _total(blocks)


def plans(decisions: list[Decision]) -> list[_C.SegmentPlan]:
    """What the core is told of these decisions."""
    return [
        _C.SegmentPlan(item.info.address, item.backup, item.unchanged, item.store)
        for item in decisions
    ]


def require_disk_dir() -> None:
    """Raises ValueError when the options name no folder for what sleeps to disk."""
    if current_options().disk_dir is None:
        raise ValueError(
            "on_sleep='disk' needs a folder: cumem.configure(cumem.Options(disk_dir=...))"
        )


def _live_ranges(info: _C.SegmentInfo, segment: _snapshot.Segment | None) -> list[Range]:
    """As :func:`_snapshot.live_in`, without names: there may be very many."""
    if segment is not None:
        return segment.live_ranges()
    held = _parts.live_ranges(info.address)
    return [(info.address, info.asked_bytes)] if held is None else held


def _live_runs(info: _C.SegmentInfo, segment: _snapshot.Segment | None) -> list[Range]:
    """The same with neighbours joined."""
    return merged(_live_ranges(info, None)) if segment is None else segment.live_runs()


def _unchanged(
    info: _C.SegmentInfo, segment: _snapshot.Segment | None, clean: dict[int, int]
) -> list[Range]:
    """What is declared clean, block by block: what torch rounded up is nobody's."""
    if segment is not None:
        return merged(block for block in segment.live_ranges() if block[0] in clean)
    end = info.address + info.bytes
    return merged((at, size) for at, size in clean.items() if info.address <= at < end)


def _total(ranges: list[Range]) -> int:
    return sum(size for _, size in ranges)


def _meeting(blocks: list[Range], kept: list[Range]) -> list[Range]:
    """The blocks that hold something kept, whole: what torch rounded up comes along."""
    if not kept:
        return []
    return [
        (at, size)
        for at, size in blocks
        if any(start < at + size and at < start + length for start, length in kept)
    ]


def _parts_of(blocks: list[Range], kept: list[Range]) -> list[Range]:
    """What is kept of the blocks of a segment of cumem's own, which hold many tensors each.

    Widened to where digests can start.
    """
    parts = []
    for at, size in blocks:
        for start, length in kept:
            first = max(at, start // _DIGEST_ALIGNMENT * _DIGEST_ALIGNMENT)
            last = min(at + size, start + length)
            if first < last:
                parts.append((first, last - first))
    return parts


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Sorts ranges and joins those that touch or overlap."""
    result: list[Range] = []
    start = end = 0  # of the range that grows
    for at, size in sorted(ranges):
        if at > end:
            if end > start:
                result.append((start, end - start))
            start = end = at
        end = max(end, at + size)
    if end > start:
        result.append((start, end - start))
    return result
