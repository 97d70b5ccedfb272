"""What do tests of tags work with? A tensor of known bytes in each of three tags."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import torch
from support import MIB, holds_pattern, make, raw

import cumem

TAGS = ("weights", "kv_cache", "draft")
ORDERS = list(itertools.permutations(TAGS))
SEEDS = {tag: seed for seed, tag in enumerate(TAGS)}


def build(*, on_sleep: str | None = "offload", size: int = 3 * MIB) -> dict[str, torch.Tensor]:
    """A tensor with contents of its own in each tag."""
    tensors = {}
    for tag in TAGS:
        with cumem.use_memory_pool(tag, on_sleep=on_sleep):
            tensors[tag] = make(size, SEEDS[tag])
    return tensors


def intact(tensors: dict[str, torch.Tensor], tags: Iterable[str] = TAGS) -> bool:
    return all(holds_pattern(tensors[tag], SEEDS[tag]) for tag in tags)


def is_filled(tensor: torch.Tensor, value: int) -> bool:
    return bool((raw(tensor) == value).all())
