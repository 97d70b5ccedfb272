"""What does torch say is live, and what can be given back?"""

from __future__ import annotations

from typing import Any, NamedTuple

from cumem import _C, _parts, _registry
from cumem._runtime import Runtime

Range = tuple[int, int]  # address, bytes

# "active_pending_free": freed by its owner, but work on a stream may still use it.
_LIVE = ("active_allocated", "active_pending_free", "active_awaiting_free")


class Block(NamedTuple):
    """A live piece of a segment: what torch handed to one tensor, rounded up."""

    address: int
    bytes: int


class Details(NamedTuple):
    """What torch tells of a live block beside its place.

    Attributes:
        requested: bytes that were asked for.
        stack: where it was asked for, innermost call first; empty unless torch records history.
    """

    block: Block
    requested: int
    stack: tuple[str, ...]


class Segment:
    """One of torch's segments. Its blocks are looked at only when they are asked for."""

    __slots__ = ("_raw", "address")

    def __init__(self, raw: dict[str, Any]) -> None:
        self._raw = raw
        self.address: int = raw["address"]

    @property
    def pool(self) -> tuple[int, int]:
        """Torch's id of the pool it is in."""
        return tuple(self._raw["segment_pool_id"])

    def live(self) -> list[Block]:
        """Its live blocks in address order."""
        return [Block(*block) for block in self.live_ranges()]

    def live_ranges(self) -> list[Range]:
        """The same without names, for where there are very many."""
        blocks = self._raw["blocks"]
        live = [(block["address"], block["size"]) for block in blocks if block["state"] in _LIVE]
        live.sort()
        return live

    def live_runs(self) -> list[Range]:
        """The same with neighbours joined, in one pass: torch lists blocks in address order."""
        runs: list[Range] = []
        start = end = 0  # of the run that grows
        for block in self._raw["blocks"]:
            if block["state"] not in _LIVE:
                continue
            at = block["address"]
            if at != end:
                if end > start:
                    runs.append((start, end - start))
                start = at
            end = at + block["size"]
        if end > start:
            runs.append((start, end - start))
        return runs

    def details(self) -> list[Details]:
        """Its live blocks with all that torch tells of them."""
        return [_details(block) for block in self._raw["blocks"] if _is_live(block)]


def live_in(info: _C.SegmentInfo, segment: Segment | None) -> list[Block]:
    """Live blocks of one of our segments, of which torch says ``segment``.

    Where torch cannot say, all of it but what the granularity added: it is cumem's own,
    or torch must not be asked.
    """
    if segment is not None:
        return segment.live()
    parts = None if info.owner.pool else _parts.live_ranges(info.address)
    return [Block(*part) for part in parts or ()] if parts is not None else [_asked(info)]


def _asked(info: _C.SegmentInfo) -> Block:
    return Block(info.address, info.asked_bytes)


def _is_live(block: dict[str, Any]) -> bool:
    return block["state"] in _LIVE


def _details(block: dict[str, Any]) -> Details:
    frames = block.get("frames", ())
    stack = tuple(f"{frame['filename']}:{frame['line']} {frame['name']}" for frame in frames)
    return Details(Block(block["address"], block["size"]), block["requested_size"], stack)


def take(runtime: Runtime) -> list[Segment]:
    """All segments torch knows of, ours and others."""
    return [Segment(raw) for raw in runtime.backend.snapshot()]


def reconciled(runtime: Runtime, snapshot: list[Segment]) -> list[_C.SegmentInfo]:
    """Our segments, each with the pool that torch says it is in.

    A capture that allocates from a graph pool does so on a thread whose innermost
    scope may be another; the snapshot knows.
    """
    entries = {entry.handle.id: entry for entry in _registry.pools() if entry.handle is not None}
    infos = runtime.allocator.segments()
    known = {info.address: info.pool for info in infos}
    wrong = []
    for segment in snapshot:
        entry = entries.get(segment.pool)
        if entry is not None and known.get(segment.address, entry.number) != entry.number:
            wrong.append((segment.address, entry))
    for address, entry in wrong:
        right = _C.Owner(entry.tag, entry.on_sleep.value, pool=entry.number, graph=entry.graph)
        runtime.allocator.assign(address, right)
    return runtime.allocator.segments() if wrong else infos


def empty_cache(runtime: Runtime) -> None:
    """Lets torch give back what it only caches, unless that would harm somebody.

    While a scope is open torch would not; during a capture the frees would break it.
    """
    quiet = not _registry.open_scopes() and not runtime.backend.is_capturing()
    if quiet and not any(runtime.allocator.capturing(device) for device in runtime.watched):
        runtime.backend.empty_cache()


def drop_retired(runtime: Runtime) -> None:
    """Lets torch give retired pools up where no scope or capture is open.

    Torch ends the process when a pool goes while one is (an assertion in a
    destructor), so retired pools wait on a list of ours.
    """
    devices = {entry.device for entry in _registry.pools()}
    busy = {device for device in devices if runtime.allocator.capturing(device)}
    with _registry.retired(busy) as entries:
        for entry in entries:
            handle, entry.handle = entry.handle, None
            if handle is not None:
                runtime.backend.drop_pool(handle)
            del handle
