"""Which parts of a segment of cumem's own hold something, and who must know when they are lost?

Torch knows it of its segments. Of one of cumem's own everything that was asked for
counts as live, unless its holder says more here.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Protocol


class Holder(Protocol):
    """Knows what is in some segments. Its methods may be called from any thread."""

    def live_ranges(self, segment: int) -> list[tuple[int, int]]:
        """Address and bytes of what a segment holds, in order, without overlap."""
        ...

    def contents_lost(self) -> None:
        """Contents of its segments were discarded. It must not call sleep or wake_up."""
        ...


_lock = threading.Lock()
_holders: dict[int, weakref.ref[Holder]] = {}


def register(segments: Iterable[int], holder: Holder) -> None:
    """Lets ``holder`` speak for segments, by address, as long as it lives."""
    addresses, reference = list(segments), weakref.ref(holder)
    with _lock:
        _holders.update(dict.fromkeys(addresses, reference))
    weakref.finalize(holder, _forget, addresses, reference)


def live_ranges(segment: int) -> list[tuple[int, int]] | None:
    """What the segment at this address holds; None where nobody says."""
    holder = _holder(segment)
    return None if holder is None else holder.live_ranges(segment)


def tell_lost(segments: Iterable[int]) -> None:
    """Tells each holder of these segments once that contents are gone."""
    found = {id(holder): holder for segment in segments if (holder := _holder(segment)) is not None}
    for holder in found.values():
        holder.contents_lost()


def _holder(segment: int) -> Holder | None:
    with _lock:
        found = _holders.get(segment)
    return None if found is None else found()


def _forget(addresses: Iterable[int], holder: weakref.ref[Holder]) -> None:
    with _lock:
        for address in addresses:
            if _holders.get(address) is holder:
                del _holders[address]
