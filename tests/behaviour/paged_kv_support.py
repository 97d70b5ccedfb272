"""What do tests of the paged cache work with? A small cache whose blocks have known bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import DriverUnderTest, fill_pattern, raw

import cumem
from cumem import _owned

LAYERS = 3
BLOCK = 64 << 10  # bytes of one block of one layer


@pytest.fixture(autouse=True)
def warm(driver: DriverUnderTest) -> None:
    """What a device takes once, for streams and kernels, is there before anything is counted."""
    _owned.allocate(1, tag="warm")


def make_cache(blocks: int = 64, **options: Any) -> cumem.PagedKVCache:
    shape: dict[str, Any] = {"layers": LAYERS, "block_size": 16, "kv_heads": 8, "head_dim": 128}
    return cumem.PagedKVCache(blocks=blocks, dtype=torch.bfloat16, **{**shape, **options})


def fill_blocks(cache: cumem.PagedKVCache, blocks: tuple[int, ...], seed: int = 0) -> None:
    for at, layer in enumerate(cache.layers):
        for block in blocks:
            fill_pattern(layer[block], seed + 1000 * at + block)


def blocks_hold(cache: cumem.PagedKVCache, blocks: tuple[int, ...], seed: int = 0) -> bool:
    expected = torch.empty(BLOCK, dtype=torch.uint8)
    for at, layer in enumerate(cache.layers):
        for block in blocks:
            fill_pattern(expected, seed + 1000 * at + block)
            if not torch.equal(raw(layer[block]).cpu(), expected):
                return False
    return True
