"""How does torch's memory pool behave over a pluggable allocator, on a machine without a GPU?

`EmulatedMemPool` models `torch.cuda.MemPool`: which segments it asks the allocator for, how it cuts
them into blocks and uses those again, and when it gives segments back. `use_emulated_pool` models
`torch.cuda.use_mem_pool`, for cpu tensors (`_emulated_tensors` says which).

Note [Garbage collection inside the pool]
Making a Python object may start the garbage collector. It ends tensors of ours, and runs the
finalizers of other people's objects, which may make tensors. A death only joins `deaths`, and its
block is free from the next call into a pool on. The lock is re-entrant; a call from inside another
one of the same thread keeps away from what the outer one works on: an allocation gets a segment of
its own, and nothing is given back. The plugin's malloc and free are called under the lock, so it is
above theirs.
"""

from __future__ import annotations

import itertools
import os
import threading
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from cumem._emulated_tensors import Death, deaths, placing_into

_MIB = 1 << 20
_BLOCK_ROUNDING = 512
_SMALL_BLOCK_LIMIT = _MIB


class PluginFunctions(NamedTuple):
    """The two functions that torch calls of a pluggable allocator. They never call Python."""

    # (bytes, device, stream) -> address; 0 or None when out of memory
    malloc: Callable[[int, int, int], int | None]
    free: Callable[[int, int, int, int], None]  # (address, bytes, device, stream)


@dataclass(slots=True, eq=False)
class Block:
    """A piece of a segment: live from `allocate` until its death is noticed, then free."""

    segment: _Segment
    address: int
    size: int
    requested: int = 0  # bytes asked for; 0 in a free block
    death: Death | None = None

    def info(self) -> dict[str, Any]:
        return {
            "address": self.address,
            "size": self.size,
            "requested_size": self.requested,
            "state": "active_allocated" if self.requested else "inactive",
        }


class _Segment:
    """What one call of malloc returned, cut into blocks in order of address."""

    def __init__(self, pool: EmulatedMemPool, address: int, size: int, *, small: bool) -> None:
        self.pool, self.address, self.size, self.small = pool, address, size, small
        self.blocks = [Block(self, address, size)]

    def info(self) -> dict[str, Any]:
        blocks = [block.info() for block in list(self.blocks)]
        live_bytes = sum(block["size"] for block in blocks if block["state"] != "inactive")
        return {
            "device": self.pool.device,
            "address": self.address,
            "total_size": self.size,
            "allocated_size": live_bytes,
            "active_size": live_bytes,
            "stream": 0,
            "segment_type": "small" if self.small else "large",
            "segment_pool_id": self.pool.id,
            "blocks": blocks,
        }


class _Shared:
    """What all pools have in common; see Note [Garbage collection inside the pool]."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.changing = False
        # Strong references: the watch on live blocks must last, whoever forgets the pool.
        self.pools: list[EmulatedMemPool] = []
        self.open_scopes: Counter[int] = Counter()

    @contextmanager
    def change(self) -> Iterator[bool]:
        """Hold the lock, and notice deaths; yields False to a call from inside another one."""
        with self.lock:
            if self.changing:
                yield False
                return
            self.changing = True
            try:
                while deaths:
                    block = deaths.popleft().block
                    block.segment.pool._take_back(block)
                yield True
            finally:
                self.changing = False

    def release_retired(self) -> None:
        for pool in [pool for pool in self.pools if pool._gone]:
            pool._release_free_segments()

    def leave_to_parent(self) -> None:
        """In a forked child: stop using the memory, which is shared, and the lock, perhaps held."""
        for pool in self.pools:
            pool._gone = "cannot be used in a forked process; use the 'spawn' start method"
        self.lock, self.changing, self.pools = threading.RLock(), False, []


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.leave_to_parent)
_pool_numbers = itertools.count(1)


class EmulatedMemPool:
    """Models `torch.cuda.MemPool` over a pluggable allocator.

    Segments go back when the pool is retired, or at the first `empty_cache()` after that which
    finds them wholly free; never before. A retired pool cannot be used; its live blocks can. Safe
    to use from several threads.
    """

    def __init__(self, functions: PluginFunctions, device: int) -> None:
        self.id: tuple[int, int] = (0, next(_pool_numbers))
        self.device = device
        self._functions = functions
        self._segments: dict[int, _Segment] = {}
        # Small ones under True. In order, so that the first that is large enough fits best.
        self._free: dict[bool, list[tuple[int, int, Block]]] = {True: [], False: []}
        self._open = False
        self._gone = ""  # why the pool cannot be used any more
        _shared.pools.append(self)

    def allocate(self, size: int) -> Block:
        """Return a live block of `size` > 0 bytes, with arbitrary contents; a `Death` ends it.

        Where malloc has no memory, segments of retired pools are given back and it is asked again,
        unless a scope is open on the device; then comes `torch.OutOfMemoryError`. As in torch.
        """
        if size <= 0:
            raise ValueError(f"a block has at least one byte, not {size}")
        rounded = -(-size // _BLOCK_ROUNDING) * _BLOCK_ROUNDING
        with _shared.change() as exclusive:
            self._check_usable()
            block = self._take_free(rounded) if exclusive else None
            if block is None:
                block = self._add_segment(rounded, may_release=exclusive).blocks[0]
            block.requested = size
            if exclusive:
                self._split(block, rounded)
        return block

    def snapshot(self, include_traces: bool = True) -> list[dict[str, Any]]:  # noqa: FBT001, FBT002
        """Return the pool's segments and their blocks, in torch's form; there are no traces."""
        self._check_usable()
        with _shared.change():
            return self._describe()

    def use_count(self) -> int:
        """Return 1 for the pool object, and 1 more while a scope of it is open."""
        self._check_usable()
        return 1 + self._open

    def retire(self) -> None:
        """Do what deleting a `MemPool` does: give back its wholly free segments.

        While a scope is open on the device it changes nothing and raises a RuntimeError.
        """
        with _shared.change() as exclusive:
            self._check_usable()
            if _shared.open_scopes[self.device]:
                # torch fails an assertion in a destructor, which ends the process.
                raise RuntimeError(f"pool {self.id}: a scope is open on device {self.device}")
            self._gone = "was retired"
            if exclusive:
                self._release_free_segments()

    def _check_usable(self) -> None:
        if self._gone:
            raise RuntimeError(f"pool {self.id} of emulated device {self.device} {self._gone}")

    def _take_free(self, size: int) -> Block | None:
        free = self._free[size <= _SMALL_BLOCK_LIMIT]
        index = bisect_left(free, (size, 0))
        return free.pop(index)[2] if index < len(free) else None

    def _add_segment(self, block_size: int, *, may_release: bool) -> _Segment:
        size = _segment_size(block_size)
        address = self._functions.malloc(size, self.device, 0)
        if not address and may_release and not _shared.open_scopes[self.device]:
            _shared.release_retired()
            address = self._functions.malloc(size, self.device, 0)
        if not address:
            raise torch.OutOfMemoryError(
                f"emulated device {self.device} is out of memory: {block_size} bytes were asked "
                f"for, and malloc did not give the segment of {size // _MIB} MiB that they need"
            )
        segment = _Segment(self, address, size, small=block_size <= _SMALL_BLOCK_LIMIT)
        self._segments[address] = segment
        return segment

    def _split(self, block: Block, size: int) -> None:
        """Leave `size` bytes to the block and make a free one of the rest, if torch would."""
        segment, rest = block.segment, block.size - size
        if rest >= _BLOCK_ROUNDING and (segment.small or rest > _SMALL_BLOCK_LIMIT):
            block.size = size
            right = Block(segment, block.address + size, rest)
            insort(segment.blocks, right, key=lambda item: item.address)
            self._list(right)

    def _take_back(self, block: Block) -> None:
        """Make a live block free, and one with its free neighbours."""
        blocks = block.segment.blocks
        block.requested, block.death = 0, None
        index = bisect_left(blocks, block.address, key=lambda item: item.address)
        for neighbour in blocks[max(index - 1, 0) : index + 2]:
            if neighbour is not block and not neighbour.requested:
                self._unlist(neighbour)
                blocks.remove(neighbour)
                block.address = min(block.address, neighbour.address)
                block.size += neighbour.size
        self._list(block)

    def _list(self, block: Block) -> None:
        insort(self._free[block.segment.small], (block.size, block.address, block))

    def _unlist(self, block: Block) -> None:
        free = self._free[block.segment.small]
        del free[bisect_left(free, (block.size, block.address))]

    def _release_free_segments(self) -> None:
        for segment in list(self._segments.values()):
            first = segment.blocks[0]
            if first.size == segment.size and not first.requested:
                self._unlist(first)
                del self._segments[segment.address]
                self._functions.free(segment.address, segment.size, self.device, 0)
        if not self._segments:
            _shared.pools.remove(self)

    def _describe(self) -> list[dict[str, Any]]:
        return [self._segments[address].info() for address in sorted(self._segments)]


@contextmanager
def use_emulated_pool(pool: EmulatedMemPool) -> Iterator[None]:
    """Send this thread's fresh cpu tensors to `pool`; the innermost scope wins.

    Scopes may be left in any order, and on another thread. A pool with an open scope is refused
    with a RuntimeError.
    """
    with _shared.change():
        pool._check_usable()
        if pool._open:
            raise RuntimeError(f"beginAllocateToPool: already recording to pool {pool.id}")
        pool._open = True
        _shared.open_scopes[pool.device] += 1
    try:
        with placing_into(pool):
            yield
    finally:
        with _shared.change():
            pool._open = False
            _shared.open_scopes[pool.device] -= 1


def empty_cache() -> None:
    """Give back the wholly free segments of retired pools; other pools keep theirs, as in torch."""
    with _shared.change() as exclusive:
        if exclusive:
            _shared.release_retired()


def memory_snapshot() -> list[dict[str, Any]]:
    """Return the segments of all pools, also of retired ones, in torch's form."""
    with _shared.change():
        return [info for pool in list(_shared.pools) for info in pool._describe()]


def _segment_size(block_size: int) -> int:
    if block_size <= _SMALL_BLOCK_LIMIT:
        return 2 * _MIB
    if block_size < 10 * _MIB:
        return 20 * _MIB
    return -(-block_size // (2 * _MIB)) * 2 * _MIB
