"""How are bytes and lists of choices written for people?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

_MOST_NAMES = 20
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """``2147483648`` as ``2.0 GiB``; below one KiB in whole bytes."""
    if abs(count) < 1024:
        return f"{count} B"
    power = min(len(_UNITS), (abs(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def choices(names: Iterable[str]) -> str:
    """Sorted, quoted and separated by commas; ``none`` when there are none."""
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def some(names: Sequence[str]) -> str:
    """The names, separated by commas; of very many the first, and how many more."""
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")
