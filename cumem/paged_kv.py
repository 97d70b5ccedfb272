"""How does a cache of keys and values sleep, and give memory back between bursts?

Memory is cut into blocks of a fixed number of tokens; a sequence has a list of blocks.
Each layer is one segment, so that a layer is one contiguous tensor with the blocks
first, and the cache can grow and shrink at its end where it is.

Note [Locks]: a sleep holds its own lock when it asks which blocks are in use, so the
cache's lock is below it: a resize takes the other one first.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable, Sequence

import torch

from cumem import _owned, _parts, _registry, _resizing
from cumem._arguments import instance, positive
from cumem._block_tables import BlockTables
from cumem._devices import DeviceLike
from cumem._text import size
from cumem.errors import AsleepError, BusyError
from cumem.inspection import is_mapped
from cumem.options import MIB, OnSleep

_GRANULE = 2 * MIB
_CHUNKS_PER_LAYER = 64  # of a cache that can be resized, at its largest
_DIGEST_ALIGNMENT = 16


class PagedKVCache:
    """Keys and values of all layers in blocks, with a block table by sequence.

    A discarding sleep resets it: every sequence is forgotten, :attr:`generation` moves
    and the tag's epoch with it. With ``on_sleep="offload"`` only the blocks in use are
    backed up, and they come back. Addresses never change. Safe from several threads.

    Args:
        layers: how many.
        blocks: how many blocks each layer has at first.
        block_size: tokens in a block.
        kv_heads: heads of keys and values.
        head_dim: elements of one head.
        dtype: of the elements.
        max_blocks: what :meth:`resize` may grow to; addresses are reserved for it.
            None: ``blocks``.
        tag: the name of the memory.
        on_sleep: ``"discard"`` (default of ``kv_cache``), ``"offload"`` or ``"keep"``.
        device: a device, its index, or None for the current one.
        chunk_bytes: a resize gives memory back in pieces of this size, a multiple of
            2 MiB. None: a 64th of a layer at its largest.

    Raises:
        ValueError: a number that is not positive or too large, ``max_blocks`` below ``blocks``,
            an empty tag, an unknown policy, no such device. TypeError: a wrong type.
        DeviceOutOfMemoryError: no room. DriverError: the driver refused.
        AsleepError: another thread put the tag to sleep meanwhile.
        Nothing was allocated.
    """

    def __init__(
        self,
        *,
        layers: int,
        blocks: int,
        block_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        max_blocks: int | None = None,
        tag: str = "kv_cache",
        on_sleep: OnSleep | str | None = None,
        device: DeviceLike = None,
        chunk_bytes: int | None = None,
    ) -> None:
        largest = blocks if max_blocks is None else max_blocks
        _check_counts(
            layers=layers,
            blocks=blocks,
            block_size=block_size,
            kv_heads=kv_heads,
            head_dim=head_dim,
            max_blocks=largest,
        )
        if largest < blocks:
            raise ValueError(f"max_blocks must be at least blocks ({blocks}), not {largest}")
        instance("dtype", dtype, torch.dtype, "a torch.dtype")
        self._block_shape = (2, block_size, kv_heads, head_dim)
        self._dtype = dtype
        self.block_size = block_size
        self.max_blocks = largest
        self.block_bytes = math.prod(self._block_shape) * dtype.itemsize
        self._lock = threading.RLock()
        self._segments = [
            _owned.allocate(
                blocks * self.block_bytes,
                tag=tag,
                on_sleep=on_sleep,
                device=device,
                chunk_bytes=self._chunk_bytes(chunk_bytes),
                capacity=largest * self.block_bytes,
            )
            for _ in range(layers)
        ]
        self._tables = BlockTables(blocks)  # host memory for each: first the device has room
        self.tag = self._segments[0].tag
        self.on_sleep = self._segments[0].on_sleep
        self.device = self._segments[0].device
        self._layers = self._tensors()
        _parts.register((part.address for part in self._segments), self)

    def _chunk_bytes(self, wanted: int | None) -> int:
        if wanted is None:
            share = self.max_blocks * self.block_bytes // _CHUNKS_PER_LAYER
            return max(_GRANULE, share // _GRANULE * _GRANULE)
        if positive("chunk_bytes", wanted) % _GRANULE:
            raise ValueError(f"chunk_bytes must be a multiple of 2 MiB, not {wanted}")
        return wanted

    # Tensors

    @property
    def layers(self) -> tuple[torch.Tensor, ...]:
        """One tensor a layer: ``[blocks, 2, block_size, kv_heads, head_dim]``, contiguous.

        Keys are ``[:, 0]``, values ``[:, 1]``. A resize makes new tensors at the same
        addresses; those from before it must not be used past what is there.
        """
        with self._lock:
            return self._layers

    def _tensors(self) -> tuple[torch.Tensor, ...]:
        shape = (self._tables.blocks, *self._block_shape)
        return tuple(part.tensor(self._dtype, shape) for part in self._segments)

    # Sequences

    @property
    def blocks(self) -> int:
        """Blocks of each layer, used and free."""
        return self._tables.blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence has."""
        return self._tables.free_blocks

    @property
    def sequences(self) -> tuple[Hashable, ...]:
        """The sequences that have blocks, oldest first."""
        with self._lock:
            return self._tables.sequences

    @property
    def generation(self) -> int:
        """Moves when every sequence was forgotten; a block table from before is stale."""
        return self._tables.generation

    def allocate(self, sequence: Hashable, tokens: int) -> tuple[int, ...]:
        """Makes room for ``tokens`` tokens of a sequence in all; returns its blocks in order.

        A sequence that is not known begins; one that has enough is left alone. All or
        nothing. New blocks hold what was there before.

        Raises:
            NoBlocksError: not enough free blocks. AsleepError: the cache, or part of it, is
                asleep. BusyError: a sleep or wake of its tag is under way.
            ValueError, TypeError: not a positive number. Nothing was allocated.
        """
        _check_counts(tokens=tokens)
        with self._lock:
            # A sleep has asked what is in use: a block from now on would not be in its backup.
            if _registry.is_moving(self.tag):
                raise BusyError(
                    f"allocate({sequence!r}): a sleep or wake of tag {self.tag!r} is under way. "
                    "Nothing was allocated; call again when it is over."
                )
            if not all(is_mapped(layer) for layer in self._layers):
                raise AsleepError(
                    f"allocate({sequence!r}): the cache (tag {self.tag!r}) is asleep. Nothing was "
                    "allocated; call wake_up first."
                )
            return self._tables.allocate(sequence, -(-tokens // self.block_size))

    def free(self, sequence: Hashable) -> int:
        """Gives a sequence's blocks back to the cache; returns how many.

        Raises:
            ValueError: an unknown sequence (also one from before a reset).
        """
        with self._lock:
            return self._tables.free(sequence)

    def blocks_of(self, sequence: Hashable) -> tuple[int, ...]:
        """The blocks of a sequence, in the order of its tokens.

        Raises:
            ValueError: an unknown sequence (also one from before a reset).
        """
        with self._lock:
            return self._tables.table(sequence)

    def block_table(self, sequences: Sequence[Hashable]) -> torch.Tensor:
        """Block tables for a kernel: int32 ``[sequences, longest]``, -1 where there is none.

        A copy on the cache's device, true until a sequence changes or
        :attr:`generation` moves.

        Raises:
            ValueError: an unknown sequence, or none at all.
        """
        with self._lock:
            tables = [self._tables.table(sequence) for sequence in sequences]
        if not tables:
            raise ValueError("a block table needs at least one sequence")
        width = max(len(table) for table in tables)
        rows = [[*table, *[-1] * (width - len(table))] for table in tables]
        return torch.tensor(rows, dtype=torch.int32, device=self.device)

    def reset(self) -> None:
        """Forgets every sequence; all blocks are free."""
        with self._lock:
            self._tables.reset()

    # Size

    def resize(self, blocks: int) -> None:
        """Makes the cache larger or smaller where it is; contents of used blocks stay.

        Memory comes and goes in whole chunks, in all layers; growth is all or nothing.

        Args:
            blocks: 1 to :attr:`max_blocks`; not below :attr:`least_blocks`.

        Raises:
            ValueError: a number out of range. TypeError: not a number.
            BusyError: blocks that were to go are in use (free those sequences first), a
                capture is under way, or the call comes from inside a hook.
            AsleepError: the cache is asleep.
            DeviceOutOfMemoryError: no room. Nothing was changed by these.
            DriverError: the driver refused; a cache that was to shrink has, and the same
                call gives the rest of its memory back.
        """
        _check_counts(blocks=blocks)
        if blocks > self.max_blocks:
            raise ValueError(f"resize to {blocks} blocks: at most {self.max_blocks} are reserved")
        with self._lock:
            self._tables.claim(blocks)
        try:
            _resizing.resize(self._segments, blocks * self.block_bytes, self._settle)
        finally:
            with self._lock:
                self._tables.unclaim(blocks)

    @property
    def least_blocks(self) -> int:
        """What :meth:`resize` can go down to now: past the last block in use."""
        with self._lock:
            return self._tables.least_blocks

    def _settle(self) -> None:
        """Books the size that the segments have, whatever became of the resize."""
        with self._lock:
            blocks = self._segments[0].bytes // self.block_bytes
            changed = blocks != self._tables.blocks
            self._tables.settle(blocks)
            if changed:
                self._layers = self._tensors()

    # What a sleep asks (see _parts)

    def live_ranges(self, segment: int) -> list[tuple[int, int]]:
        """The blocks in use of one layer; for the sleep."""
        with self._lock:
            runs = self._tables.runs()
        return [self._range(segment, first, count) for first, count in runs]

    def _range(self, segment: int, first: int, count: int) -> tuple[int, int]:
        start, end = first * self.block_bytes, (first + count) * self.block_bytes
        start -= start % _DIGEST_ALIGNMENT
        return segment + start, end - start

    def contents_lost(self) -> None:
        """Forgets every sequence, because a sleep discarded them; for the sleep."""
        self.reset()

    def __repr__(self) -> str:
        total = size(len(self._segments) * self.blocks * self.block_bytes)
        return (
            f"PagedKVCache(tag={self.tag!r}, layers={len(self._segments)}, blocks={self.blocks} "
            f"of {self.max_blocks}, {self.free_blocks} free, {total})"
        )


def _check_counts(**counts: object) -> None:
    for name, count in counts.items():
        positive(name, count)
