"""Is this tensor in a pool, in which, and is its memory there?"""

from __future__ import annotations

import gc
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch

from cumem import _registry, _runtime, _snapshot
from cumem._arguments import check_tag
from cumem._runtime import Runtime
from cumem._text import choices


@dataclass(frozen=True)
class LiveBlock:
    """A live block of a pool.

    Attributes:
        address: where it starts.
        bytes: its size, rounded up by torch.
        tensors: Python tensors that hold it, where there are any.
    """

    address: int
    bytes: int
    tensors: tuple[torch.Tensor, ...]


def is_mapped(tensor: torch.Tensor) -> bool:
    """Can the memory of ``tensor`` be touched? True for memory that is not cumem's.

    Cheap, and safe from any thread.
    """
    address, size = _place(tensor)
    runtime = _runtime.if_started()
    if runtime is None or runtime.allocator.owner_of(address) is None:
        return True
    return runtime.allocator.is_awake(address, size)


def tag_of(tensor: torch.Tensor) -> str | None:
    """The tag of the pool that ``tensor`` lives in; None when it is not in one."""
    address, _ = _place(tensor)
    runtime = _runtime.if_started()
    owner = runtime.allocator.owner_of(address) if runtime is not None else None
    return owner.tag if owner is not None else None


def covered(module: torch.nn.Module, tag: str = "weights") -> list[str]:
    """Names of the module's parameters and buffers that are *not* in a pool of ``tag``.

    An empty list says that the module sleeps whole. Tensors without bytes are
    everywhere and count as covered.

    Raises:
        ValueError: an unknown tag. TypeError: a module or tag that is none.
    """
    _check(module, tag)
    return [name for name, tensor in _named(module) if not _inside(tensor, tag)]


def uncovered(module: torch.nn.Module, tag: str = "weights") -> list[LiveBlock]:
    """Live blocks of ``tag`` that hold neither a parameter nor a buffer of the module.

    These are what a discarding sleep followed by a reload of the module loses:
    plain attributes, tables, scales. Look before you discard.

    Raises:
        ValueError: an unknown tag. TypeError: a module or tag that is none.
    """
    _check(module, tag)
    runtime = _runtime.if_started()
    if runtime is None:
        return []
    used = sorted(_place(tensor)[0] for _, tensor in _named(module))
    blocks = [block for block in _live(runtime, tag) if not _holds_any(block, used)]
    held_by = holders(blocks) if blocks else {}
    return [
        LiveBlock(block.address, block.bytes, tuple(held_by.get(block.address, ())))
        for block in blocks
    ]


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address and bytes of the tensor's storage; zeros where it has none (sparse, meta)."""
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__name__}")
    try:
        with torch._C.DisableTorchFunctionSubclass():  # what a subclass does is its own affair
            storage = tensor.untyped_storage()
            return storage.data_ptr(), storage.nbytes()
    except (NotImplementedError, RuntimeError):
        return 0, 0


def _inside(tensor: torch.Tensor, tag: str) -> bool:
    return _place(tensor)[1] == 0 or tag_of(tensor) == tag


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check(module: torch.nn.Module, tag: str) -> None:
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"expected a module, not {type(module).__name__}")
    check_tag(tag)
    known = _registry.known_tags()
    if tag not in known:
        raise ValueError(f"unknown tag {tag!r}; known tags: {choices(known)}")


def _live(runtime: Runtime, tag: str) -> list[_snapshot.Block]:
    segments = {segment.address: segment for segment in _snapshot.take(runtime)}
    own = [info for info in runtime.allocator.segments() if info.owner.tag == tag]
    blocks = [_snapshot.live_in(info, segments.get(info.address)) for info in own]
    return [block for some in blocks for block in some]


def _holds_any(block: _snapshot.Block, addresses: list[int]) -> bool:
    """Is one of these sorted addresses in the block?"""
    first = bisect_left(addresses, block.address)
    return first < len(addresses) and addresses[first] < block.address + block.bytes


def holders(blocks: Sequence[_snapshot.Block]) -> dict[int, list[torch.Tensor]]:
    """Python tensors by the block that holds their storage."""
    found: dict[int, list[torch.Tensor]] = {}
    ordered = sorted(blocks)
    starts = [block.address for block in ordered]
    for tensor in _tensors_alive():
        address, size = _place(tensor)
        at = bisect_right(starts, address) - 1
        if size and at >= 0 and address < starts[at] + ordered[at].bytes:
            found.setdefault(starts[at], []).append(tensor)
    return found


def _tensors_alive() -> list[torch.Tensor]:
    """Every tensor object there is.

    Note [Other threads' tuples]: the collector knows tuples that another thread is still
    making, and who holds one of them when its maker goes on makes that thread fail with a
    SystemError. So whatever is no tensor is let go before another thread can run: list()
    does all three steps, and there is no step of Python's in between. A class is looked up in
    no set: its metaclass may hash and compare in Python, or not at all.
    """
    things: list[Any] = []
    fill = map(things.extend, map(gc.get_objects, (None,)))
    tensors = compress(things, map(torch.Tensor.__subclasscheck__, map(type, things)))
    empty = map(list.clear, (things,))
    return list(chain(fill, tensors, empty))[1:-1]  # those two give None each
