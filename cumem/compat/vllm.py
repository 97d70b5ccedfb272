"""The allocator of vLLM's sleep mode, over cumem.

    from cumem.compat.vllm import CuMemAllocator

Names and meanings are those of ``vllm.device_allocator.cumem``. What differs: sleep and
wake are all or nothing; waking what is awake does nothing; the host memory of backups
is kept for the next sleep, which copies only what has changed, and
:func:`cumem.release_host_memory` gives it back; free memory is not backed up.

To make vLLM itself use it, set ``CUMEM_VLLM=1``: see :mod:`cumem.compat.vllm_plugin`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import ClassVar, Protocol

from cumem import _registry, _runtime
from cumem.compat._graphs import GraphPools, PoolId
from cumem.memory import trim
from cumem.options import OnSleep
from cumem.pool import use_memory_pool
from cumem.reports import SleepReport, WakeReport
from cumem.sleep import sleep, sleeping_tags, wake_up
from cumem.stats import TagStats, stats

__all__ = ["CuMemAllocator", "TagHooks", "TaggedMemory"]

# A selective wake may leave these asleep; whatever else there is must be there when
# any part of the engine runs.
_DEFERRABLE = frozenset({"weights", "kv_cache"})

_log = logging.getLogger("cumem")


@dataclass(frozen=True)
class TaggedMemory:
    """What hooks are told of one tag."""

    tag: str
    is_asleep: bool


class TagHooks(Protocol):
    """Who is told before memory of a tag goes, and after all of it came back."""

    def before_unmap(self, memory: Collection[TaggedMemory], tags: Collection[str]) -> None: ...

    def after_map(self, memory: Collection[TaggedMemory]) -> None: ...


class CuMemAllocator:
    """The one allocator of a process; get it with :meth:`get_instance`.

    It concerns the tags that were used through it, and no other pool of cumem's. Tags
    that it does not know are passed over everywhere.

    Attributes:
        hooks: told of every unmap and map, or None.
    """

    instance: ClassVar[CuMemAllocator | None] = None
    default_tag: ClassVar[str] = "default"
    cudagraph_tag: ClassVar[str] = "cudagraph"

    def __init__(self) -> None:
        self.hooks: TagHooks | None = None
        self._tags: set[str] = set()
        self._graphs = GraphPools()
        self._local = threading.local()

    @classmethod
    def get_instance(cls) -> CuMemAllocator:
        """The allocator of this process, made at the first call."""
        if CuMemAllocator.instance is None:
            CuMemAllocator.instance = CuMemAllocator()
        return CuMemAllocator.instance

    @property
    def current_tag(self) -> str:
        """The tag of the innermost scope that this thread has open here."""
        return getattr(self._local, "tag", self.default_tag)

    @contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What this thread allocates inside belongs to ``tag``; None: the default tag.

        At its end, memory that nothing in the pool uses goes back to the device.

        Raises:
            ValueError: an empty tag. TypeError: not a string. DriverError: no driver.
        """
        chosen = self.default_tag if tag is None else tag
        # What sleep() is told decides; a sleep of cumem's own must lose nothing.
        with use_memory_pool(chosen, on_sleep=OnSleep.OFFLOAD), self._tagged(chosen):
            yield
        trim(chosen)

    def reuse_memory_pool(self, tag: str) -> AbstractContextManager[None]:
        """As :meth:`use_memory_pool`, for a tag that was used before.

        Raises:
            ValueError: it was not.
        """
        if tag not in self._known():
            raise ValueError(f"no memory pool of tag {tag!r}; there are: {sorted(self._known())}")
        return self.use_memory_pool(tag)

    @contextmanager
    def cudagraph_pool(self) -> Iterator[PoolId]:
        """Yields the id of the pool that CUDA graphs are captured into, for ``torch.cuda.graph``.

        One pool for all captures of a device. Its contents always come back, since a
        graph may keep constants there, and every wake brings it.

        Raises:
            BusyError: it is open. AsleepError: it sleeps. Nothing was changed.
        """
        tag = self.cudagraph_tag
        with self._graphs.opened("cudagraph", tag, OnSleep.OFFLOAD) as pool, self._tagged(tag):
            yield pool.id

    use_cudagraph_pool = cudagraph_pool  # what newer versions call it

    def release_cudagraph_pool(self) -> None:
        """Gives the memory of the graphs' pool back, once all its graphs are gone."""
        self._graphs.clear()
        if self.cudagraph_tag in self._known():
            trim(self.cudagraph_tag)

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> SleepReport:
        """Backs these tags up, discards all others, and gives the device memory back.

        Args:
            offload_tags: a tag or several; None: the default tag.

        Raises:
            As :func:`cumem.sleep`; nothing is lost.
        """
        chosen = (self.default_tag,) if offload_tags is None else _listed(offload_tags)
        known = self._known()
        lost = [tag for tag in chosen if self._sleeps_without_backup(tag)]
        if lost:
            _log.warning("sleep: tags %s were discarded before and cannot be backed up", lost)
        kept = known & {*chosen, self.cudagraph_tag}
        return self._to_sleep(known, kept)

    def discard(self, tags: tuple[str, ...] | str) -> SleepReport:
        """Gives the device memory of these tags back without a backup; others stay.

        Raises:
            As :func:`cumem.sleep`.
        """
        chosen = self._known() & set(_listed(tags))
        backed = sorted(tag.tag for tag in _asleep(chosen) if tag.backup_bytes)
        if backed:
            _log.warning("discard: tags %s sleep with backups, which are kept", backed)
        return self._to_sleep(chosen, frozenset())

    def wake_up(self, tags: Iterable[str] | None = None) -> WakeReport:
        """Brings tags back, with their contents where sleep() backed them up.

        All or nothing. Beside those named, every tag comes back that is neither
        ``weights`` nor ``kv_cache``.

        Args:
            tags: these; None: all.

        Raises:
            DeviceOutOfMemoryError, DriverError: everything stays asleep with its
                backups, and the call can be repeated.
        """
        known = self._known()
        named = known if tags is None else known & set(_listed(tags))
        report = wake_up(sorted(named | (known - _DEFERRABLE)))
        if self.hooks is not None:
            self.hooks.after_map(self._memory())
        return report

    def get_current_usage(self) -> int:
        """Bytes of all memory allocated here, asleep or awake."""
        runtime = _runtime.if_started()
        segments = runtime.allocator.segments() if runtime is not None else []
        return sum(info.bytes for info in segments if info.owner.tag in self._tags)

    def release_pools(self) -> None:
        """Gives pools up: their memory goes back when no tensor or graph uses it."""
        self._graphs.clear()
        for tag in sorted(self._known()):
            trim(tag)

    def close(self) -> None:
        """The same as :meth:`release_pools`."""
        self.release_pools()

    def _known(self) -> frozenset[str]:
        return _registry.known_tags() & self._tags

    @contextmanager
    def _tagged(self, tag: str) -> Iterator[None]:
        self._tags.add(tag)
        before, self._local.tag = self.current_tag, tag
        try:
            yield
        finally:
            self._local.tag = before

    def _to_sleep(self, tags: frozenset[str], kept: frozenset[str]) -> SleepReport:
        if not tags:
            return SleepReport()
        if self.hooks is None:
            return sleep(tags=tags, offload_tags=kept)
        self.hooks.before_unmap(self._memory(), tags)
        try:
            return sleep(tags=tags, offload_tags=kept)
        except BaseException:
            self.hooks.after_map(self._memory())  # of what stayed awake
            raise

    def _memory(self) -> list[TaggedMemory]:
        asleep = sleeping_tags()
        return [TaggedMemory(tag, tag in asleep) for tag in sorted(self._known())]

    def _sleeps_without_backup(self, tag: str) -> bool:
        return any(not found.backup_bytes for found in _asleep(self._known() & {tag}))


def _asleep(tags: Collection[str]) -> list[TagStats]:
    return [tag for tag in stats().tags if tag.tag in tags and tag.asleep_bytes]


def _listed(tags: Iterable[str]) -> tuple[str, ...]:
    return (tags,) if isinstance(tags, str) else tuple(tags)
