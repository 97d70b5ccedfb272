"""Where does each buffer of a plan lie?

Lifetimes are in steps, both ends included. Two buffers whose lifetimes meet never
share a byte; that is proven after the placing, and not only meant by it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from cumem.errors import CumemError

ALIGNMENT = 512  # bytes; what torch gives its own blocks


@dataclass(frozen=True)
class Buffer:
    """One buffer of a plan.

    Attributes:
        name: its name.
        dtype: of its elements.
        shape: in elements.
        first: step at which it is first written.
        last: step at which it is last read; the buffer lives there, too.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    first: int
    last: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def lives_at(self, step: int) -> bool:
        return self.first <= step <= self.last

    def meets(self, other: Buffer) -> bool:
        """Is there a step at which both live?"""
        return self.first <= other.last and other.first <= self.last


def aligned(count: int) -> int:
    return -(-count // ALIGNMENT) * ALIGNMENT


def end(buffers: Sequence[Buffer], offsets: Mapping[str, int]) -> int:
    return max((offsets[buffer.name] + aligned(buffer.bytes) for buffer in buffers), default=0)


def placed(buffers: Sequence[Buffer]) -> dict[str, int]:
    """The largest first, each into the smallest gap that it fits between those it meets."""
    offsets: dict[str, int] = {}
    placed: list[Buffer] = []
    for buffer in sorted(buffers, key=lambda item: -item.bytes):  # stable: ties as added
        taken = sorted(
            (offsets[other.name], offsets[other.name] + aligned(other.bytes))
            for other in placed
            if other.meets(buffer)
        )
        offsets[buffer.name] = _best_gap(taken, aligned(buffer.bytes))
        placed.append(buffer)
    return offsets


def _best_gap(taken: Sequence[tuple[int, int]], wanted: int) -> int:
    """Where the smallest gap of at least ``wanted`` bytes begins; after all where there is none."""
    best, at = None, 0
    for start, end in taken:
        room = start - at
        if room >= wanted and (best is None or room < best[0]):
            best = (room, at)
        at = max(at, end)
    return at if best is None else best[1]


def prove(buffers: Sequence[Buffer], offsets: Mapping[str, int]) -> None:
    """Raises CumemError when two buffers that live at once overlap."""
    for index, one in enumerate(buffers):
        for other in buffers[:index]:
            first, second = offsets[one.name], offsets[other.name]
            apart = first + one.bytes <= second or second + other.bytes <= first
            if one.meets(other) and not apart:
                raise CumemError(
                    f"buffers {one.name!r} and {other.name!r} live at once and overlap in the "
                    "plan; nothing was allocated. Please report this"
                )
