"""Is this tensor in a pool, in which, and is its memory there?"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cumem import _registry, _runtime, _snapshot
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
    runtime = _runtime.if_started()
    address = _address(tensor)
    if runtime is None or runtime.allocator.owner_of(address) is None:
        return True
    return runtime.allocator.is_awake(address, tensor.untyped_storage().nbytes())


def tag_of(tensor: torch.Tensor) -> str | None:
    """The tag of the pool that ``tensor`` lives in; None when it is not in one."""
    runtime = _runtime.if_started()
    owner = runtime.allocator.owner_of(_address(tensor)) if runtime is not None else None
    return owner.tag if owner is not None else None


def covered(module: torch.nn.Module, tag: str = "weights") -> list[str]:
    """Names of the module's parameters and buffers that are *not* in a pool of ``tag``.

    An empty list says that the module sleeps whole. Tensors without bytes are
    everywhere and count as covered.

    Raises:
        ValueError: an unknown tag.
    """
    _check_known(tag)
    return [name for name, tensor in _named(module) if not _inside(tensor, tag)]


def uncovered(module: torch.nn.Module, tag: str = "weights") -> list[LiveBlock]:
    """Live blocks of ``tag`` that hold neither a parameter nor a buffer of the module.

    These are what a discarding sleep followed by a reload of the module loses:
    plain attributes, tables, scales. Look before you discard.

    Raises:
        ValueError: an unknown tag.
    """
    _check_known(tag)
    runtime = _runtime.if_started()
    if runtime is None:
        return []
    used = {_address(tensor) for _, tensor in _named(module)}
    blocks = [block for block in _live(runtime, tag) if not _holds_any(block, used)]
    holders = _holders(blocks) if blocks else {}
    return [
        LiveBlock(block.address, block.bytes, tuple(holders.get(block.address, ())))
        for block in blocks
    ]


def _address(tensor: torch.Tensor) -> int:
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected a tensor, not {type(tensor).__name__}")
    return tensor.untyped_storage().data_ptr()


def _inside(tensor: torch.Tensor, tag: str) -> bool:
    return tensor.untyped_storage().nbytes() == 0 or tag_of(tensor) == tag


def _named(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _check_known(tag: str) -> None:
    known = _registry.known_tags()
    if tag not in known:
        raise ValueError(f"unknown tag {tag!r}; known tags: {choices(known)}")


def _live(runtime: Runtime, tag: str) -> list[_snapshot.Block]:
    own = {info.address for info in runtime.allocator.segments() if info.owner.tag == tag}
    segments = [segment for segment in _snapshot.take(runtime) if segment.address in own]
    return [block for segment in segments for block in segment.live]


def _holds_any(block: _snapshot.Block, addresses: set[int]) -> bool:
    return any(block.address <= at < block.address + block.bytes for at in addresses)


def _holders(blocks: list[_snapshot.Block]) -> dict[int, list[torch.Tensor]]:
    """Python tensors by the block that holds their storage."""
    found: dict[int, list[torch.Tensor]] = {}
    starts = {block.address for block in blocks}
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        try:
            address = thing.untyped_storage().data_ptr()
        except (RuntimeError, NotImplementedError):  # fake, meta and sparse tensors have none
            continue
        if address in starts:
            found.setdefault(address, []).append(thing)
    return found
