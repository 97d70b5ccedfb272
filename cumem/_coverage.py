"""Is every byte of a tensor written to, and none of them twice?

Destinations are views of any shape, so neither sizes nor addresses alone can say.
A storage that is written by more than its own whole tensor is marked in a map, one
byte for each unit, where a unit is the largest piece that no view cuts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import torch

Place: TypeAlias = "tuple[object, ...]"


def has_memory(tensor: torch.Tensor) -> bool:
    """Has it elements at an address? Not on the meta device, not sparse, not a wrapper."""
    if tensor.is_meta or not torch._C._has_storage(tensor):
        return False
    try:
        return tensor.untyped_storage().data_ptr() != 0
    except RuntimeError:  # a fake tensor has no address to give
        return False


def storage_key(tensor: torch.Tensor) -> int:
    """The same for tensors that share memory; those without memory have a key of their own."""
    if not torch._C._has_storage(tensor):
        return id(tensor)
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata


def place_of(tensor: torch.Tensor) -> Place:
    """The same for tied weights only."""
    if not torch._C._has_storage(tensor):
        return (id(tensor),)
    strides = tuple(
        stride for stride, size in zip(tensor.stride(), tensor.shape, strict=True) if size > 1
    )
    return (storage_key(tensor), tensor.storage_offset(), tensor.dtype, tensor.shape, strides)


@dataclass(frozen=True)
class Region:
    """The bytes of a view in its storage: runs, repeated along each of ``dims``.

    Attributes:
        start: where the first run starts.
        run: bytes of a run.
        dims: count and distance in bytes, outermost first.
    """

    start: int
    run: int
    dims: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Region:
        """pre: the tensor has elements."""
        size = tensor.element_size()
        start = int(tensor.storage_offset()) * size
        dims: list[tuple[int, int]] = [(size, 1)]  # innermost first
        pairs = zip(tensor.stride(), tensor.shape, strict=True)
        for stride, count in sorted(pair for pair in pairs if pair[1] > 1):
            inner, distance = dims[-1]
            if stride * size == inner * distance:
                dims[-1] = (inner * count, distance)
            else:
                dims.append((count, stride * size))
        return cls(start, dims[0][0], tuple(reversed(dims[1:])))

    @property
    def end(self) -> int:
        return self.start + self.run + sum((count - 1) * step for count, step in self.dims)

    @property
    def is_nested(self) -> bool:
        """Does each dimension step over all that is inside it? Then no byte is in it twice."""
        inside = self.run
        for count, step in reversed(self.dims):
            if step < inside:
                return False
            inside += (count - 1) * step
        return True

    def numbers(self, base: int) -> Iterator[int]:
        yield from (self.start - base, self.run)
        yield from (step for _, step in self.dims)

    def spans(self, base: int, unit: int) -> Iterator[slice]:
        """Its units, counted from ``base``; as few slices as there can be."""
        run, dims = self.run // unit, [(count, step // unit) for count, step in self.dims]
        inner = dims.pop() if dims else (1, 1)
        outer = [range(0, count * step, step) if step else [0] * count for count, step in dims]
        for offsets in itertools.product(*outer):
            yield from _run_slices((self.start - base) // unit + sum(offsets), run, inner)


def _run_slices(at: int, run: int, inner: tuple[int, int]) -> Iterator[slice]:
    count, step = inner
    if step and run < count:
        for start in range(at, at + run):
            yield slice(start, start + (count - 1) * step + 1, step)
    else:
        for number in range(count):
            yield slice(at + number * step, at + number * step + run)


@dataclass
class Coverage:
    """Which views of one storage are written to, each with a label for messages."""

    regions: list[tuple[Region, str]] = field(default_factory=list)

    def add(self, region: Region, label: str) -> None:
        self.regions.append((region, label))

    def clashes(self) -> list[tuple[str, str]]:
        """Labels of pairs that write to the same bytes; a view may clash with itself."""
        return [pair for group in self._groups() for pair in _clashes(group)]

    def missing(self, tensor: torch.Tensor) -> str | None:
        """What of ``tensor`` nothing writes to, as text; empty for all of it, None for nothing."""
        wanted = Region.of(tensor)
        near = [
            region
            for region, _ in self.regions
            if region.start < wanted.end and wanted.start < region.end
        ]
        if not near:
            return ""
        return None if _is_filled(wanted, near) else _unmarked(tensor, wanted, near)

    def _groups(self) -> Iterator[list[tuple[Region, str]]]:
        """Regions that could meet: their ends lie between each other's."""
        group: list[tuple[Region, str]] = []
        end = -1
        for region, label in sorted(self.regions, key=lambda pair: pair[0].start):
            if region.start >= end and group:
                yield group
                group = []
            group.append((region, label))
            end = max(end, region.end)
        if group:
            yield group


def _clashes(group: list[tuple[Region, str]]) -> list[tuple[str, str]]:
    if not _meet([region for region, _ in group]):
        return []
    alone = [(label, label) for region, label in group if _meet([region])]
    return alone + [
        (one[1], other[1])
        for one, other in itertools.combinations(group, 2)
        if _meet([one[0], other[0]])
    ]


def _meet(regions: list[Region]) -> bool:
    """Is some byte in these twice?"""
    if len(regions) == 1 and regions[0].is_nested:
        return False
    base, unit, count = _frame(regions)
    marks = bytearray(count)
    for region in regions:
        for span in region.spans(base, unit):
            units = marks[span]
            if any(units):
                return True
            marks[span] = b"\1" * len(units)
    return False


def _is_filled(wanted: Region, regions: list[Region]) -> bool:
    """The usual case, without a map: the same view, or runs one after the other."""
    if wanted in regions:
        return True
    at = wanted.start
    for region in sorted(regions, key=lambda region: region.start):
        if region.dims or region.start > at:
            return False
        at = max(at, region.end)
    return at >= wanted.end


def _frame(regions: list[Region]) -> tuple[int, int, int]:
    """Where the map of these regions starts, its unit, and how many units it has."""
    base, end = min(region.start for region in regions), max(region.end for region in regions)
    unit = math.gcd(*(number for region in regions for number in region.numbers(base)))
    return base, unit, (end - base) // unit


def _unmarked(tensor: torch.Tensor, wanted: Region, regions: list[Region]) -> str | None:
    base, unit, count = _frame([wanted, *regions])
    marks = bytearray(count)
    for region in regions:
        for span in region.spans(base, unit):
            marks[span] = b"\1" * len(marks[span])
    free, first, last = 0, count, -1
    for span in wanted.spans(base, unit):
        units, step = marks[span], span.step or 1
        free += units.count(0)
        if 0 in units:
            first = min(first, span.start + units.index(0) * step)
            last = max(last, span.start + units.rindex(0) * step)
    return _described(tensor, free * unit, base + first * unit, base + (last + 1) * unit)


def _described(tensor: torch.Tensor, free: int, begin: int, end: int) -> str | None:
    """``free`` bytes of it are not written to, all between two bytes of the storage."""
    size = tensor.element_size()
    if not free:
        return None
    if free == tensor.numel() * size:
        return ""
    first, last = _index_of(tensor, begin // size), _index_of(tensor, end // size - 1)
    return f"{free // size} of {tensor.numel()} elements, from {first} to {last}"


def _index_of(tensor: torch.Tensor, element: int) -> list[int]:
    """Where in ``tensor`` an element of its storage is."""
    rest, index = element - int(tensor.storage_offset()), [0] * tensor.dim()
    for axis in sorted(range(tensor.dim()), key=tensor.stride, reverse=True):
        if tensor.shape[axis] > 1 and tensor.stride(axis):
            index[axis], rest = divmod(rest, tensor.stride(axis))
    return index
