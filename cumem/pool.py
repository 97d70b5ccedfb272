"""How does an allocation get a tag?

A scope checks out a pool of torch's for its (device, tag, policy), tells the
plugin whose segments this thread makes now, and routes the thread's allocations
to the pool.

Note [One scope, one pool]: torch forbids two open scopes of one pool, so pools
are checked out. Idle ones are used again by any thread, but never one that is
asleep: a fresh tensor must not land in a segment without memory.
"""

from __future__ import annotations

import threading
import warnings
from contextlib import ContextDecorator, ExitStack
from dataclasses import dataclass, replace
from types import TracebackType

import torch

from cumem import _C, _digest, _registry, _runtime, _snapshot
from cumem._arguments import check_tag, pool_policy
from cumem._devices import DeviceLike, device_index
from cumem._registry import PoolEntry
from cumem._runtime import Runtime
from cumem.errors import translated
from cumem.options import OnSleep


class Pool:
    """What a scope yields: the pool that its allocations go to.

    Attributes:
        tag: the tag of its segments.
        device: the device it belongs to.
        on_sleep: what a sleep does with its contents.
    """

    def __init__(self, entry: PoolEntry, runtime: Runtime) -> None:
        self._entry = entry
        self._runtime = runtime
        self._before = self._blocks()
        self.tag = entry.tag
        self.on_sleep = entry.on_sleep
        self.device = torch.device(runtime.backend.device_type, entry.device)

    @property
    def id(self) -> tuple[int, int]:
        """Torch's id of the pool, for ``torch.cuda.graph(pool=...)``."""
        if self._entry.handle is None:
            raise RuntimeError(f"the pool of tag {self.tag!r} was given up by trim()")
        return self._entry.handle.id

    @property
    def is_usable(self) -> bool:
        """Can it be used again? Not after :func:`trim` gave it up."""
        return self._entry.handle is not None

    @property
    def segments(self) -> int:
        """How many segments the pool has."""
        return len(self._infos())

    @property
    def segment_bytes(self) -> int:
        """Bytes of all its segments, asleep or awake, live or not."""
        return sum(info.bytes for info in self._infos())

    @property
    def live_bytes(self) -> int:
        """Bytes of its live blocks: what its tensors hold, rounded up by torch."""
        return sum(self._blocks().values())

    @property
    def captured_bytes(self) -> int:
        """Bytes of live blocks that were not there when this scope was entered.

        A block in the place of one that died meanwhile cannot be told from it.
        """
        return sum(size for at, size in self._blocks().items() if at not in self._before)

    def reopen(self) -> _Scope:
        """A scope of this very pool, where :func:`use_memory_pool` may take another one.

        So more graphs share one pool from :func:`graph_pool`. Entering it raises
        BusyError while a scope of it is open, AsleepError while it sleeps, and
        RuntimeError after :func:`trim` gave it up.
        """
        return _Scope(replace(self._wanted(), entry=self._entry))

    def _wanted(self) -> _Wanted:
        return _Wanted(self.tag, self.on_sleep, self._entry.device, graph=self._entry.graph)

    def __repr__(self) -> str:
        return f"Pool(tag={self.tag!r}, device={self.device}, on_sleep={self.on_sleep.value!r})"

    def _infos(self) -> list[_C.SegmentInfo]:
        segments = self._runtime.allocator.segments()
        return [info for info in segments if info.pool == self._entry.number]

    def _blocks(self) -> dict[int, int]:
        """Live blocks, address to bytes."""
        own = {info.address for info in self._infos()}
        return {
            address: size
            for segment in _snapshot.take(self._runtime)
            if segment.address in own
            for address, size in segment.live()
        }


@dataclass(frozen=True)
class _Wanted:
    """What a scope was asked for; the rest is decided when it is entered."""

    tag: str
    on_sleep: OnSleep
    device: DeviceLike
    graph: bool  # a pool for captured graphs: torch routes to it, not the scope
    entry: PoolEntry | None = None  # this one and no other


class _Scope(ContextDecorator):
    """One use of a pool; see :func:`use_memory_pool`."""

    def __init__(self, wanted: _Wanted) -> None:
        self._wanted = wanted
        self._pool: Pool | None = None
        self._stack = ExitStack()
        self._ident = 0
        runtime = _runtime.if_started()
        if runtime is not None:
            device_index(wanted.device, runtime)  # a wrong device is said at once

    def _recreate_cm(self) -> _Scope:
        return _Scope(self._wanted)

    def __enter__(self) -> Pool:
        if self._pool is not None:
            raise RuntimeError("a scope can be entered once; call use_memory_pool again")
        self._ident = threading.get_ident()
        runtime = _runtime.current()
        template = self._template(runtime)
        _runtime.watch_streams(runtime, template.device)
        _digest.load_once(runtime, template.device)
        _snapshot.drop_retired(runtime)
        if not runtime.allocator.capturing(template.device):
            _clear_caches_when_short(runtime, template.device)
            runtime.backend.prepare_stream(template.device)
        with ExitStack() as stack:
            token = _registry.open_scope(template)
            stack.callback(_registry.close_scope, token)
            entry = self._wanted.entry
            if entry is None:
                entry = _check_out(runtime, template)
            else:
                _registry.check_out_again(entry)
            stack.callback(_registry.check_in, entry)
            pool = Pool(entry, runtime)
            number = _C.push_scope(entry.device, _owner(entry))
            stack.callback(_C.pop_scope, number)
            stack.enter_context(runtime.backend.plain_segments())
            if not self._wanted.graph:
                assert entry.handle is not None
                stack.enter_context(runtime.backend.use_pool(entry.handle, entry.device))
            self._stack = stack.pop_all()
        self._pool = pool
        return pool

    def _template(self, runtime: Runtime) -> PoolEntry:
        wanted = self._wanted
        index = device_index(wanted.device, runtime)
        # A pool entered inside a capture belongs to the graph that is captured.
        graph = wanted.graph or runtime.backend.is_capturing()
        return PoolEntry(wanted.tag, index, wanted.on_sleep, graph=graph, handle=None)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        empty = error is None and not self._wanted.graph and self._is_empty()
        self._stack.close()
        if threading.get_ident() != self._ident and error is None:
            raise RuntimeError(
                f"a scope of tag {self._wanted.tag!r} was left on another thread than the one "
                "that entered it; the scope is closed, but what the other thread allocated since "
                "may be in the wrong pool"
            )
        if empty:
            self._warn_empty()

    def _is_empty(self) -> bool:
        if self._pool is None or not _runtime.current_options().warn_empty_scope:
            return False
        return not self._pool._blocks()

    def _warn_empty(self) -> None:
        warnings.warn(
            f"nothing was captured by this scope of tag {self._wanted.tag!r}: its pool is empty. "
            "Tensors made by other threads, on other devices or before the "
            "scope are not in the pool; cumem.covered(module, tag) lists what is outside.",
            UserWarning,
            stacklevel=3,
        )


def use_memory_pool(
    tag: str = "default",
    *,
    on_sleep: OnSleep | str | None = None,
    device: DeviceLike = None,
) -> _Scope:
    """Puts what this thread allocates on ``device`` into a pool of ``tag``.

    Use it as a context manager or decorator; it yields the :class:`Pool`. Nested
    scopes keep their own tags. Allocations of other threads and on other devices
    are not captured. A tag that is asleep may be entered: new memory is awake.

    Args:
        tag: the name of the memory, any non-empty string.
        on_sleep: what a sleep does with the contents: ``"offload"`` (they come
            back), ``"disk"`` (they come back from ``Options.disk_dir``), ``"discard"``
            (they are gone) or ``"keep"`` (they stay). Default: discard for
            ``kv_cache`` and ``workspace``, offload for every other tag.
        device: a device, its index, or None for the current one.

    Raises:
        ValueError: an empty tag, an unknown policy, no such device.
        TypeError: a tag or policy that is not a string.
        DriverError: no usable driver. Nothing is changed by any of these.
    """
    check_tag(tag)
    return _Scope(_Wanted(tag, pool_policy(on_sleep, tag), device, graph=False))


def graph_pool(
    tag: str = "cuda_graph", *, on_sleep: OnSleep | str | None = None, device: DeviceLike = None
) -> _Scope:
    """Makes a pool for the private memory of captured graphs, so that it sleeps too.

    It yields a :class:`Pool`; give its ``id`` to ``torch.cuda.graph(g, pool=pool.id)``
    inside the block. Every byte of its segments counts as live, because a graph
    writes to memory that is free in torch's eyes.

    Args and errors are those of :func:`use_memory_pool`.
    """
    check_tag(tag)
    return _Scope(_Wanted(tag, pool_policy(on_sleep, tag), device, graph=True))


def _check_out(runtime: Runtime, template: PoolEntry) -> PoolEntry:
    """An idle pool with the key of ``template``, or a new one."""
    found = _registry.check_out(template)
    if found is not None:
        return found
    handle = runtime.backend.make_pool(template.device)
    entry = replace(template, handle=handle, in_use=True)
    _registry.add(entry)
    _registry.tag_state(entry.tag)
    return entry


def _owner(entry: PoolEntry) -> _C.Owner:
    owner = _C.Owner(entry.tag, entry.on_sleep.value, pool=entry.number, graph=entry.graph)
    if entry.graph:
        _C.set_graph_owner(owner)
    return owner


def _clear_caches_when_short(runtime: Runtime, device: int) -> None:
    """Gives torch's cached memory back before a scope opens on a device that is nearly full.

    While a scope is open torch does not free its caches when it runs out
    (Note [One scope, one pool] has the reason: a pool in use counts as a capture).
    """
    name = runtime.device_name(device)
    with translated(f"scope on {name}", "Nothing was changed.", runtime.backend.device_type):
        info = runtime.allocator.device_info(device)
    if info.free_bytes * 10 < info.total_bytes:
        _snapshot.empty_cache(runtime)
