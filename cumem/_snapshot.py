"""What does torch say is live, and what can be given back?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from cumem import _C, _registry
from cumem._runtime import Runtime

# "active_pending_free": freed by its owner, but work on a stream may still use it.
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")


@dataclass(frozen=True)
class Block:
    """A live piece of a segment: what torch handed to one tensor, rounded up."""

    address: int
    bytes: int


@dataclass(frozen=True)
class Segment:
    """One of torch's segments, with its live blocks in address order."""

    address: int
    bytes: int
    pool: tuple[int, int]
    live: tuple[Block, ...]


def take(runtime: Runtime) -> list[Segment]:
    """All segments torch knows of, ours and others."""
    return [_segment(raw) for raw in runtime.backend.snapshot()]


def _segment(raw: dict[str, Any]) -> Segment:
    live = [
        Block(block["address"], block["size"]) for block in raw["blocks"] if block["state"] in _LIVE
    ]
    live.sort(key=lambda block: block.address)
    return Segment(raw["address"], raw["total_size"], tuple(raw["segment_pool_id"]), tuple(live))


def reconcile(runtime: Runtime, snapshot: list[Segment]) -> None:
    """Gives each segment to the pool that torch says it is in.

    A capture that allocates from a graph pool does so on a thread whose innermost
    scope may be another; the snapshot knows.
    """
    entries = {entry.handle.id: entry for entry in _registry.pools() if entry.handle is not None}
    owners = {info.address: info.owner for info in runtime.allocator.segments()}
    for segment in snapshot:
        entry = entries.get(segment.pool)
        owner = owners.get(segment.address)
        if entry is None or owner is None or owner.pool == entry.number:
            continue
        right = _C.Owner(entry.tag, entry.on_sleep.value, pool=entry.number, graph=entry.graph)
        runtime.allocator.assign(segment.address, right)


def drop_retired(runtime: Runtime) -> None:
    """Lets torch give retired pools up where no scope or capture is open.

    Torch ends the process when a pool goes while one is (an assertion in a
    destructor), so retired pools wait on a list of ours.
    """
    devices = {entry.device for entry in _registry.pools()}
    busy = {device for device in devices if runtime.allocator.capturing(device)}
    for entry in _registry.take_retired(busy):
        handle, entry.handle = entry.handle, None
        if handle is not None:
            runtime.backend.drop_pool(handle)
        del handle
