"""How is a tensor handled in pieces of bounded size?

A box is one slice per dimension, of step 1. A piece is a box whose elements lie one
after the other in row-major order, as they do in a file.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

Box: TypeAlias = "tuple[slice, ...]"


def whole(shape: Sequence[int]) -> Box:
    return tuple(slice(0, length) for length in shape)


def shape_of(box: Box) -> tuple[int, ...]:
    return tuple(part.stop - part.start for part in box)


def pieces(shape: Sequence[int], most: int) -> Iterator[Box]:
    """Pieces of at most ``most`` elements, in row-major order, that make up ``shape``.

    pre: ``most`` is positive.
    """
    count = math.prod(shape)
    if count == 0:
        return
    if count <= most:
        yield whole(shape)
        return
    rest = shape[1:]
    rows = most // math.prod(rest)
    if rows:
        for start in range(0, shape[0], rows):
            yield (slice(start, min(start + rows, shape[0])), *whole(rest))
        return
    for row in range(shape[0]):
        for inner in pieces(rest, most):
            yield (slice(row, row + 1), *inner)


def is_run(box: Box, shape: Sequence[int]) -> bool:
    """Do its elements lie one after the other in row-major order, as a piece's do?"""
    inner = False  # below an axis of which the box has more than one element
    for part, length in zip(box, shape, strict=True):
        count = part.stop - part.start
        if inner and count != length:
            return False
        inner = inner or count > 1
    return True


def first_element(piece: Box, shape: Sequence[int]) -> int:
    """How many elements of ``shape`` come before the piece, in row-major order."""
    at = 0
    for part, length in zip(piece, shape, strict=True):
        at = at * length + part.start
    return at


def common(one: Box, other: Box) -> Box | None:
    """What lies in both; None when nothing does."""
    both = tuple(
        slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(one, other, strict=True)
    )
    return None if any(part.start >= part.stop for part in both) else both


def within(box: Box, outer: Box) -> Box:
    """``box`` counted from where ``outer`` starts."""
    return tuple(
        slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True)
    )
