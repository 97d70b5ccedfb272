"""What pages is the host memory for backups made of?"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from cumem._runtime import Runtime

_MAPPINGS = Path("/proc/self/smaps")


def huge_bytes(runtime: Runtime) -> int:
    """Bytes of the arena that lie on huge pages, as the kernel counts them now.

    The kernel walks all pages of the process for it, milliseconds for each GiB: not for
    a hot path. 0 where it does not say.
    """
    pieces = runtime.allocator.host_pieces()
    return sum(
        huge
        for begin, end, huge in _mappings(_lines())
        if any(start < end and begin < start + size for start, size in pieces)
    )


def _lines() -> list[str]:
    try:
        return _MAPPINGS.read_text().splitlines()
    except OSError:
        return []


def _mappings(lines: Iterable[str]) -> Iterator[tuple[int, int, int]]:
    """First address, end, and bytes on huge pages, of each mapping."""
    begin = end = 0
    for line in lines:
        first, _, rest = line.partition(" ")
        if first == "AnonHugePages:":
            yield begin, end, int(rest.split()[0]) * 1024
        elif not first.endswith(":"):
            begin, end = (int(address, 16) for address in first.split("-"))
