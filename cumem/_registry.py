"""Which tags, pools and open scopes does this process have?

One lock guards it all; it is held for moments and never while the core or torch
works. A sleep or wake marks the tags it works on instead, and a scope of such a
tag waits at its entry until the mark is gone.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from cumem._backend import TorchPool
from cumem.errors import AsleepError, BusyError
from cumem.options import OnSleep

# Re-entrant: the garbage collector may end a scope's generator inside it.
_lock = threading.RLock()
_settled = threading.Condition(_lock)
_numbers = itertools.count(1)


@dataclass(eq=False)
class PoolEntry:
    """One pool of torch's, with the key that it serves."""

    tag: str
    device: int
    on_sleep: OnSleep
    graph: bool
    handle: TorchPool | None  # None once it is dropped
    number: int = field(default_factory=lambda: next(_numbers))
    asleep: bool = False  # some segment of it is
    in_use: bool = False  # an open scope has it

    @property
    def key(self) -> tuple[str, int, OnSleep, bool]:
        return (self.tag, self.device, self.on_sleep, self.graph)


@dataclass
class TagState:
    """What is known of one tag."""

    epoch: int = 0
    discarded: set[int] = field(default_factory=set)  # serials of segments that lost contents


@dataclass(frozen=True)
class OpenScope:
    """A scope some thread has open now."""

    tag: str
    device: int
    thread: str
    ident: int


@dataclass
class State:
    """Everything that belongs to one runtime."""

    tags: dict[str, TagState] = field(default_factory=dict)
    pools: list[PoolEntry] = field(default_factory=list)
    retired: list[PoolEntry] = field(default_factory=list)
    scopes: dict[int, OpenScope] = field(default_factory=dict)
    moving: set[str] = field(default_factory=set)  # tags a sleep or wake works on
    waiting: list[tuple[int, str]] = field(default_factory=list)  # thread, tag of a scope
    mover: int = 0  # the thread that does
    dropping: list[tuple[int, int]] = field(default_factory=list)  # thread, device
    anything_asleep: bool = False


_state = State()


def replace(state: State) -> State:
    """Puts another state in place (with another runtime); returns the one that was."""
    global _state
    with _lock:
        previous, _state = _state, state
    return previous


def known_tags() -> frozenset[str]:
    with _lock:
        return frozenset(_state.tags)


def tag_state(tag: str) -> TagState:
    """The state of ``tag``, which becomes a known tag."""
    with _lock:
        return _state.tags.setdefault(tag, TagState())


def open_scopes(tags: Collection[str] | None = None) -> list[OpenScope]:
    with _lock:
        return [scope for scope in _state.scopes.values() if tags is None or scope.tag in tags]


def pools() -> list[PoolEntry]:
    """All pools that torch still has, retired ones too."""
    with _lock:
        return [*_state.pools, *_state.retired]


def check_out(entry: PoolEntry) -> PoolEntry | None:
    """An idle, awake pool with the key of ``entry``; waits for a move of its tag."""
    with _settled:
        _wait_for_move(entry.tag)
        for idle in _state.pools:
            if idle.key == entry.key and not (idle.in_use or idle.asleep or idle.graph):
                idle.in_use = True
                return idle
    return None


def check_out_again(entry: PoolEntry) -> None:
    """Takes this one into use; waits for a move of its tag.

    Raises:
        BusyError: a scope of it is open. AsleepError: it sleeps.
        RuntimeError: it was given up.
    """
    with _settled:
        _wait_for_move(entry.tag)
        if entry.handle is None or entry not in _state.pools:
            raise RuntimeError(f"the pool of tag {entry.tag!r} was given up by trim()")
        if entry.in_use:
            raise BusyError(
                f"this pool of tag {entry.tag!r} has an open scope. Nothing was opened."
            )
        if entry.asleep:
            raise AsleepError(f"this pool of tag {entry.tag!r} is asleep. Nothing was opened.")
        entry.in_use = True


def add(entry: PoolEntry) -> None:
    with _lock:
        _state.pools.append(entry)


def check_in(entry: PoolEntry) -> None:
    with _lock:
        entry.in_use = False


def open_scope(entry: PoolEntry) -> int:
    """Books a scope of the current thread; waits for a move of its tag and for a drop."""
    thread = threading.current_thread()
    with _settled:
        _wait_for_move(entry.tag, entry.device)
        token = next(_numbers)
        _state.scopes[token] = OpenScope(
            entry.tag, entry.device, thread.name, threading.get_ident()
        )
    return token


def _wait_for_move(tag: str, device: int = -1) -> None:
    if tag in _state.moving and _state.mover == threading.get_ident():
        raise BusyError(
            f"a hook of a sleep or wake of tag {tag!r} tried to open a scope of that tag. "
            "Nothing was opened; return from the hook first."
        )
    place, waiting = (threading.get_ident(), tag), _state.waiting  # the state may be replaced
    waiting.append(place)
    try:
        _settled.wait_for(lambda: tag not in _state.moving and not _dropped_elsewhere(device))
    finally:
        waiting.remove(place)
        _settled.notify_all()


def _awaited_elsewhere(tags: Collection[str]) -> bool:
    """Does another thread's scope of these tags wait for the end of a move that is over?"""
    here = threading.get_ident()
    return any(tag in tags and thread != here for thread, tag in _state.waiting)


def _dropped_elsewhere(device: int) -> bool:
    """Does another thread drop a pool of the device? (A drop may collect garbage on its own.)"""
    here = threading.get_ident()
    return any(at == device and thread != here for thread, at in _state.dropping)


def close_scope(token: int) -> None:
    with _lock:
        _state.scopes.pop(token, None)


@contextmanager
def moving(tags: Collection[str]) -> Iterator[list[OpenScope]]:
    """Marks tags as being put to sleep or woken; yields the scopes of them that are open.

    No scope of these tags opens until the block ends. Those that waited for the end of the
    move before come first, so that no loop of moves keeps them out.
    """
    with _settled:
        marked = set(tags) - _state.moving
        _settled.wait_for(lambda: not _awaited_elsewhere(marked))
        _state.moving |= marked
        _state.mover = threading.get_ident()
        scopes = open_scopes(tags)
    try:
        yield scopes
    finally:
        with _settled:
            _state.moving -= marked
            _state.mover = 0
            _settled.notify_all()


def is_moving(tag: str) -> bool:
    """Does a sleep or wake work on this tag?"""
    with _lock:
        return tag in _state.moving


def move_here() -> None:
    """Says that this thread carries out the move under way."""
    with _lock:
        _state.mover = threading.get_ident()


def move_elsewhere() -> None:
    """Says that another thread will; until it says so, the move is no one's."""
    with _lock:
        _state.mover = 0


def mark_asleep(numbers: Collection[int]) -> None:
    """Says which pools have sleeping segments, by number."""
    with _lock:
        for entry in [*_state.pools, *_state.retired]:
            entry.asleep = entry.number in numbers
        _state.anything_asleep = bool(numbers)


def anything_asleep() -> bool:
    """Is any segment asleep? One read, for checks that must cost nothing."""
    return _state.anything_asleep


def retire(chosen: Collection[PoolEntry]) -> None:
    """Takes pools out of use; torch gives them up in the next block of :func:`retired`."""
    with _lock:
        for entry in chosen:
            if entry in _state.pools and not entry.in_use:
                _state.pools.remove(entry)
                _state.retired.append(entry)


@contextmanager
def retired(busy_devices: Collection[int]) -> Iterator[list[PoolEntry]]:
    """Yields retired pools on devices where no scope is open, to be dropped by the caller.

    No scope opens on these devices until the block ends.
    """
    with _settled:
        ready = _take_retired(busy_devices)
        marks = [(threading.get_ident(), device) for device in {entry.device for entry in ready}]
        _state.dropping += marks
    try:
        yield ready
    finally:
        with _settled:
            for mark in marks:
                _state.dropping.remove(mark)
            _settled.notify_all()


def _take_retired(busy_devices: Collection[int]) -> list[PoolEntry]:
    with _lock:
        open_devices = {scope.device for scope in _state.scopes.values()} | set(busy_devices)
        ready = [
            entry
            for entry in _state.retired
            if entry.device not in open_devices
            and entry.handle is not None
            and entry.handle.use_count() == 1
        ]
        _state.retired = [entry for entry in _state.retired if entry not in ready]
        return ready
