"""How are bytes and lists of choices written for people?"""

from __future__ import annotations

import traceback
from collections.abc import Iterable, Sequence

_MOST_NAMES = 20
_UNITS = ("KiB", "MiB", "GiB", "TiB")


def size(count: int) -> str:
    """``2147483648`` as ``2.0 GiB``; below one KiB in whole bytes."""
    if abs(count) < 1024:
        return f"{count} B"
    power = min(len(_UNITS), (abs(count).bit_length() - 1) // 10)
    return f"{count / 1024**power:.1f} {_UNITS[power - 1]}"


def amount(count: int | None) -> str:
    """As :func:`size`, where the count may not be known."""
    return "not told" if count is None else size(count)


def choices(names: Iterable[str]) -> str:
    """Sorted, quoted and separated by commas; ``none`` when there are none."""
    return ", ".join(repr(name) for name in sorted(names)) or "none"


def some(names: Sequence[str]) -> str:
    """The names, separated by commas; of very many the first, and how many more."""
    rest = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {rest} more" if rest > 0 else "")


def raised(error: BaseException) -> str:
    """An exception as one clause: ``ZeroDivisionError: division by zero``."""
    kind, text = type(error).__name__, str(error)
    return f"{kind}: {text}" if text else kind


def traced(error: BaseException) -> str:
    """An exception with its causes and tracebacks, for the log.

    As text: a log record that has the exception would hold its frames, and device memory
    that they refer to.
    """
    return "".join(traceback.format_exception(type(error), error, error.__traceback__)).rstrip()


def table(rows: Sequence[Sequence[str]], *, markdown: bool = False) -> str:
    """Rows of equal length under their first one; the first column to the left, others right."""
    if markdown:
        rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [_aligned(row, widths) for row in rows]
    if not markdown:
        return "\n".join("  ".join(line).rstrip() for line in lines)
    rule = ["-" * width if at == 0 else "-" * (width - 1) + ":" for at, width in enumerate(widths)]
    return "\n".join(f"| {' | '.join(line)} |" for line in (lines[0], rule, *lines[1:]))


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    first, *others = row
    numbers = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
    return [first.ljust(widths[0]), *numbers]
