"""What has the user declared as not written since it woke?

Only read under ``Options(clean_check="declared")``. A declaration ends with its
storage, so that what is allocated there later is not taken for it.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Iterable
from typing import TypeVar

from cumem._keep import Storages, forget_dead, storages_of

_T = TypeVar("_T")

_lock = threading.RLock()  # the garbage collector may run inside it
_clean: Storages = {}
_backed_up: set[int] = set()  # of those, storages that slept since they were declared


def mark_clean(obj: _T) -> _T:
    """Declares that contents will not be written until :func:`mark_dirty`; returns ``obj``.

    The next sleep backs them up as they are. Under ``Options(clean_check="declared")``
    later sleeps do not look at such contents: the backup is taken as it is. A wrong
    declaration loses what was written. Under any other setting it does nothing.

    Args:
        obj: a tensor, a module, or any nesting of lists, tuples and dicts of those.

    Raises:
        TypeError: a leaf is neither tensor nor module; nothing is declared.
    """
    declared = storages_of(obj)
    with _lock:
        _clean.update(declared)
        _backed_up.difference_update(declared)  # an older backup may hold older contents
    return obj


def mark_dirty(obj: _T) -> _T:
    """Takes :func:`mark_clean` back: the next sleep copies these contents; returns ``obj``.

    Args and errors are those of :func:`mark_clean`.
    """
    declared = storages_of(obj)
    with _lock:
        for address in declared:
            _clean.pop(address, None)
    return obj


def note_backup(ranges: Iterable[tuple[int, int]]) -> None:
    """Says that a backup holds what is in these ranges now (no overlap).

    They are only looked at where something is declared: there may be very many.
    """
    with _lock:
        forget_dead(_clean)
        if not _clean:
            return
        ordered = sorted(ranges)
        starts = [start for start, _ in ordered]
        for address, (_, size) in _clean.items():
            at = bisect_right(starts, address) - 1
            if at >= 0 and address + size <= sum(ordered[at]):
                _backed_up.add(address)


def forget_lost(address: int, size: int) -> None:
    """Ends declarations of contents that a sleep discarded."""
    with _lock:
        for at in [at for at in _clean if address <= at < address + size]:
            del _clean[at]


def unchanged() -> dict[int, int]:
    """Address and bytes of every storage alive that was backed up since it was declared."""
    with _lock:
        forget_dead(_clean)
        _backed_up.intersection_update(_clean)
        return {address: _clean[address][1] for address in _backed_up}
