"""Which contents survive every level of sleep?

Storages are known by a weak reference of torch's own, so that keeping contents
never keeps memory alive.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree

_T = TypeVar("_T")

Storages = dict[int, tuple[StorageWeakRef, int]]  # address -> (reference, bytes)

_lock = threading.RLock()
_kept: Storages = {}


def keep(obj: _T) -> _T:
    """Makes contents survive every level of sleep; returns ``obj``.

    What is kept comes back bit for bit also from a pool that is discarded. Tensors
    outside of pools need no keeping and are passed over.

    Args:
        obj: a tensor, a module (its parameters and buffers), or any nesting of
            lists, tuples, dicts and the like of those.

    Raises:
        TypeError: a leaf is neither tensor nor module; nothing is kept.
    """
    kept = storages_of(obj)
    with _lock:
        _kept.update(kept)
    return obj


def is_kept(tensor: torch.Tensor) -> bool:
    """Is the storage of ``tensor`` one that :func:`keep` was given?"""
    with _lock:
        forget_dead(_kept)
        return tensor.untyped_storage().data_ptr() in _kept


def storages_of(obj: Any) -> Storages:
    """Every storage in ``obj`` that has bytes.

    Raises:
        TypeError: a leaf is neither tensor nor module.
    """
    storages = [tensor.untyped_storage() for tensor in _tensors(obj)]
    return {
        storage.data_ptr(): (StorageWeakRef(storage), storage.nbytes())
        for storage in storages
        if storage.nbytes() > 0
    }


def forget_dead(storages: Storages) -> None:
    """Drops what has died: its address may belong to somebody else now."""
    for address in [at for at, (storage, _) in storages.items() if storage.expired()]:
        del storages[address]


def ranges() -> list[tuple[int, int]]:
    """Address and bytes of every kept storage that is alive."""
    with _lock:
        forget_dead(_kept)
        return [(address, size) for address, (_, size) in _kept.items()]


def _tensors(obj: Any) -> Iterator[torch.Tensor]:
    for leaf in _pytree.tree_leaves(obj):
        if isinstance(leaf, torch.nn.Module):
            yield from leaf.parameters()
            yield from leaf.buffers()
        elif isinstance(leaf, torch.Tensor):
            yield leaf
        else:
            raise TypeError(f"cannot keep a {type(leaf).__name__}: give tensors or modules")
