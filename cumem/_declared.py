"""What has the user declared as not written since it woke?

Only read under ``Options(clean_check="declared")``.
"""

from __future__ import annotations

import threading
from typing import TypeVar

from cumem._keep import storages_of

_T = TypeVar("_T")

_lock = threading.Lock()
_clean: dict[int, int] = {}  # storage address -> bytes


def mark_clean(obj: _T) -> _T:
    """Declares that contents will not be written until :func:`mark_dirty`; returns ``obj``.

    Under ``Options(clean_check="declared")`` a sleep does not look at such contents:
    where a backup of an earlier cycle holds them, it is taken as it is. A wrong
    declaration loses what was written. Under any other setting it does nothing.

    Args:
        obj: a tensor, a module, or any nesting of lists, tuples and dicts of those.

    Raises:
        TypeError: a leaf is neither tensor nor module; nothing is declared.
    """
    ranges = dict(storages_of(obj))
    with _lock:
        _clean.update(ranges)
    return obj


def mark_dirty(obj: _T) -> _T:
    """Takes :func:`mark_clean` back: the next sleep copies these contents; returns ``obj``.

    Args and errors are those of :func:`mark_clean`.
    """
    ranges = dict(storages_of(obj))
    with _lock:
        for address in ranges:
            _clean.pop(address, None)
    return obj


def unchanged() -> list[tuple[int, int]]:
    """Address and bytes of what is declared clean, in address order."""
    with _lock:
        return sorted(_clean.items())
