"""What the kernel says of the arena's pages, and what a sleep still needs."""

from __future__ import annotations

import pytest
from support import MIB, make

import cumem
from cumem import _host_memory, _runtime

SMAPS = """\
7f0000000000-7f0000400000 rw-p 00000000 00:00 0
Size:               4096 kB
AnonHugePages:      2048 kB
VmFlags: rd wr mr mw me dc ac hg
7f0000800000-7f0000a00000 rw-p 00000000 00:00 0    [heap]
Size:               2048 kB
AnonHugePages:      2048 kB
""".splitlines()


class _Arena:
    """Stands in for a runtime whose arena is known."""

    def __init__(self, pieces: list[tuple[int, int]]) -> None:
        self.allocator = self
        self._pieces = pieces

    def host_pieces(self) -> list[tuple[int, int]]:
        return self._pieces


@pytest.mark.parametrize(
    ("pieces", "huge"),
    [
        ([(0x7F0000000000, 0x400000)], 2 * MIB),
        ([(0x7F0000200000, 0x100000)], 2 * MIB),  # the kernel joins neighbours
        ([(0x7F0000000000, 0x200000), (0x7F0000200000, 0x200000)], 2 * MIB),
        ([(0x7F0000400000, 0x400000)], 0),  # touches both and is in neither
        ([], 0),
    ],
)
def test_huge_pages_are_counted_where_the_arena_is(
    pieces: list[tuple[int, int]], huge: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_host_memory, "_lines", lambda: SMAPS)
    assert _host_memory.huge_bytes(_Arena(pieces)) == huge  # type: ignore[arg-type]


def test_the_kernel_counts_no_more_huge_pages_than_there_is_arena() -> None:
    with cumem.use_memory_pool("weights"):
        tensor = make(8 * MIB, 1)
    cumem.sleep()
    runtime = _runtime.current()
    held = sum(size for _, size in runtime.allocator.host_pieces())
    assert held == cumem.stats().host_bytes >= 8 * MIB
    assert 0 <= _host_memory.huge_bytes(runtime) <= held
    cumem.wake_up()
    del tensor


def test_a_kept_backup_is_not_wanted_again() -> None:
    with cumem.use_memory_pool("weights"):
        first = make(4 * MIB, 1)
    assert cumem.plan_sleep().host_bytes >= 4 * MIB
    cumem.sleep()
    cumem.wake_up()
    assert cumem.plan_sleep().host_bytes == 0
    with cumem.use_memory_pool("more"):
        second = make(16 * MIB, 2)
    wanted = cumem.plan_sleep().host_bytes
    held = cumem.stats().host_bytes
    cumem.sleep()
    assert 0 < wanted <= cumem.stats().host_bytes - held + 4096
    assert wanted >= 16 * MIB - 4096
    cumem.wake_up()
    del first, second
