"""Which blocks of a paged cache does each sequence have, and which are free?

Numbers only; the memory is somebody else's. Not safe from several threads.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable

from cumem.errors import BusyError, CumemError

_NAMED = 5  # sequences in a message


class NoBlocksError(CumemError):
    """The cache has not enough free blocks. Nothing was allocated."""


class BlockTables:
    """Blocks 0 to ``blocks - 1``; low ones are handed out first, so that high ones can go.

    Attributes:
        blocks: how many there are, used and free.
        generation: moves when every sequence was forgotten.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.generation = 0
        self._claims: list[int] = []  # of each resize under way: those from here on may go
        self._tables: dict[Hashable, list[int]] = {}
        self._runs: list[tuple[int, int]] | None = []  # None: to be made again
        self._free: list[int] = []  # a heap
        self._rebuild()

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        return tuple(self._tables)

    @property
    def least_blocks(self) -> int:
        """One past the last block in use; at least 1."""
        return 1 + max(self._used(), default=0)

    def allocate(self, sequence: Hashable, count: int) -> tuple[int, ...]:
        """Lets a sequence, known or new, have at least ``count`` blocks; returns all of them.

        Raises:
            NoBlocksError: there are not enough. Nothing was allocated.
        """
        table = self._tables.get(sequence, [])
        missing = max(0, count - len(table))
        if missing > len(self._free):
            raise NoBlocksError(
                f"allocate({sequence!r}): {missing} more block(s) needed, {len(self._free)} of "
                f"{self.blocks} free. Nothing was allocated; free a sequence, or resize the cache."
            )
        if missing:
            self._runs = None
        grown = [*table, *(heapq.heappop(self._free) for _ in range(missing))]
        self._tables[sequence] = grown
        return tuple(grown)

    def free(self, sequence: Hashable) -> int:
        """Takes all blocks of a sequence back; returns how many.

        Raises:
            ValueError: an unknown sequence.
        """
        table = self.table(sequence)
        del self._tables[sequence]
        self._runs = None
        for block in table:
            heapq.heappush(self._free, block)
        return len(table)

    def table(self, sequence: Hashable) -> tuple[int, ...]:
        """The blocks of a sequence, in the order of its tokens.

        Raises:
            ValueError: an unknown sequence.
        """
        if sequence not in self._tables:
            raise ValueError(
                f"unknown sequence {sequence!r}: it was never allocated, was freed, or was "
                f"forgotten when the cache was reset (generation {self.generation})"
            )
        return tuple(self._tables[sequence])

    def reset(self) -> None:
        """Forgets every sequence."""
        self._tables.clear()
        self._runs = []
        self.generation += 1
        self._rebuild()

    def runs(self) -> list[tuple[int, int]]:
        """First and count of each run of neighbours in use."""
        if self._runs is None:
            self._runs = _runs(self._used())
        return self._runs

    def claim(self, blocks: int) -> None:
        """Hands out none from ``blocks`` on, until :meth:`unclaim`; of several claims all count.

        Raises:
            BusyError: some of those are in use. Nothing was changed.
        """
        holders = [name for name, table in self._tables.items() if max(table) >= blocks]
        if holders:
            names = ", ".join(repr(name) for name in holders[:_NAMED])
            more = f" and {len(holders) - _NAMED} more" if len(holders) > _NAMED else ""
            raise BusyError(
                f"resize to {blocks} blocks: blocks that would go are in use by {names}{more}. "
                f"Nothing was changed; free them, or resize to {self.least_blocks} or more."
            )
        self._claims.append(blocks)
        self._rebuild()

    def unclaim(self, blocks: int) -> None:
        """Ends one claim."""
        self._claims.remove(blocks)
        self._rebuild()

    def settle(self, blocks: int) -> None:
        """There are ``blocks`` now. pre: none from there on is in use."""
        self.blocks = blocks
        self._rebuild()

    def _used(self) -> Iterable[int]:
        return (block for table in self._tables.values() for block in table)

    def _rebuild(self) -> None:
        used = set(self._used())
        limit = min([self.blocks, *self._claims])
        self._free = [block for block in range(limit) if block not in used]


def _runs(blocks: Iterable[int]) -> list[tuple[int, int]]:
    runs: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if runs and sum(runs[-1]) == block:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((block, 1))
    return runs
