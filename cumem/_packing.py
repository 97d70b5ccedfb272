"""Which units share a segment, and which lie well already?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cumem import _C
from cumem._runtime import Runtime
from cumem._units import Unit
from cumem.options import MIB

ALIGNMENT = 512  # bytes, as torch aligns its blocks

# A segment is rounded up to 2 MiB, which is less than a hundredth of this much.
SEGMENT_BYTES = 256 * MIB

_GRANULE = 2 * MIB


@dataclass(eq=False)
class Batch:
    """Units that go to one segment of ``device``, one after the other."""

    device: int
    units: list[Unit] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    bytes: int = 0

    def add(self, unit: Unit) -> None:
        offset = -(-self.bytes // ALIGNMENT) * ALIGNMENT
        self.units.append(unit)
        self.offsets.append(offset)
        self.bytes = offset + unit.bytes


def packed(units: Iterable[Unit], devices: Sequence[int]) -> list[Batch]:
    """Batches of at least :data:`SEGMENT_BYTES`, the last of each device excepted.

    Units keep their order, so that old memory becomes free in one piece after another.
    """
    batches: list[Batch] = []
    open_batches: dict[int, Batch] = {}
    for unit, device in zip(units, devices, strict=True):
        current = open_batches.get(device)
        if current is None or current.bytes >= SEGMENT_BYTES:
            current = open_batches[device] = Batch(device)
            batches.append(current)
        current.add(unit)
    return batches


class Places:
    """Which segment, if any, is at an address now?"""

    def __init__(self, runtime: Runtime) -> None:
        self._infos = sorted(runtime.allocator.segments(), key=lambda info: info.address)
        self._starts = [info.address for info in self._infos]
        self._default = runtime.backend.current_device()

    def segment(self, address: int) -> _C.SegmentInfo | None:
        at = bisect_right(self._starts, address) - 1
        info = self._infos[at] if at >= 0 else None
        return info if info and address < info.address + info.bytes else None

    def device(self, unit: Unit) -> int:
        """The ordinal of its device; torch does not tell it of emulated memory."""
        index, info = unit.tensors[0].device.index, self.segment(unit.address)
        if index is not None:
            return index
        return info.device if info else self._default

    def unpacked(self, units: Sequence[Unit], tag: str, policy: str) -> list[Unit]:
        """Units that do not lie in well-filled segments of this tag and policy already."""
        filled: dict[int, int] = {}
        segments = [self.segment(unit.address) for unit in units]
        for unit, info in zip(units, segments, strict=True):
            if info is not None and _is_own(info, tag, policy):
                filled[info.address] = filled.get(info.address, 0) + unit.bytes
        good = self._well_filled(filled)
        rest = [
            (unit, info)
            for unit, info in zip(units, segments, strict=True)
            if info is None or info.address not in good
        ]
        alone = self._alone(rest, filled)
        return [unit for unit, info in rest if info is None or info.address not in alone]

    def _alone(
        self, rest: Sequence[tuple[Unit, _C.SegmentInfo | None]], filled: dict[int, int]
    ) -> set[int]:
        """Segments that a move would exchange for another of their size: nothing else of the
        device would share it.
        """
        places: dict[int, dict[int, int]] = {}  # of each device: segments and their bytes
        for unit, info in rest:
            segment = (0, 0) if info is None else (info.address, info.bytes)
            places.setdefault(self.device(unit), {}).update([segment])
        single = [place for found in places.values() if len(found) == 1 for place in found.items()]
        return {at for at, bytes in single if at in filled and bytes <= filled[at] + _GRANULE}

    def _well_filled(self, filled: dict[int, int]) -> set[int]:
        """Segments of which less than a hundredth is unused, and one more on each device of
        which no more than the granularity is: the last that an earlier call took.
        """
        good: set[int] = set()
        last: dict[int, int] = {}
        for info in self._infos:
            bytes = filled.get(info.address, 0)
            if bytes and info.bytes * 100 <= bytes * 101:
                good.add(info.address)
            elif bytes and info.bytes <= bytes + _GRANULE:
                last[info.device] = info.address
        return good | set(last.values())


def _is_own(info: _C.SegmentInfo, tag: str, policy: str) -> bool:
    """Taken for this tag, and not by torch?"""
    owner = info.owner
    return (owner.tag, owner.policy, owner.pool, owner.graph) == (tag, policy, 0, False)
