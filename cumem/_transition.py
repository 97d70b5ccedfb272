"""How is a planned sleep or wake carried out, and booked whatever happens?"""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cumem import _C, _declared, _registry, _runtime, _snapshot, hooks
from cumem._plan import Decision, Request, decide
from cumem._runtime import Runtime
from cumem._text import size
from cumem.errors import BusyError, CumemError, translated
from cumem.options import CleanCheck
from cumem.reports import SleepReport, WakeReport

_LEFT_BY_SLEEP = (
    "What is asleep has its backup and everything else is untouched (cumem.stats() tells); "
    "repeat the call to go on."
)

_CHECKS = {
    CleanCheck.DIGEST: _C.CleanCheck.digest,
    CleanCheck.NEVER: _C.CleanCheck.never,
    CleanCheck.DECLARED: _C.CleanCheck.declared,
}

_operation = threading.Lock()
_operating: int | None = None  # the thread that has it


@dataclass(frozen=True)
class Slept:
    """A sleep that was carried out."""

    decisions: list[Decision]
    result: _C.SleepResult

    def report(self, runtime: Runtime, seconds: float) -> SleepReport:
        went = set(self.result.segments)
        ended = [item for item in self.decisions if item.info.address in went]
        # One that goes on from a refused unmap was counted as asleep before.
        gone = [item for item in ended if not item.info.asleep]
        offloaded = sum(item.backup_bytes for item in gone)
        return SleepReport(
            freed_bytes=self.result.freed_bytes,
            offloaded_bytes=offloaded,
            discarded_bytes=sum(item.discarded_bytes for item in gone),
            copied_bytes=self.result.copied_bytes,
            skipped_bytes=offloaded - self.result.copied_bytes,
            host_bytes=runtime.allocator.host_usage().held_bytes,
            pageable_bytes=self.result.pageable_bytes,
            seconds=seconds,
            tags=frozenset(item.info.owner.tag for item in ended),
            devices=tuple(sorted({item.info.device for item in ended})),
            clean_check=self.check,
            phases=dict(self.result.phases),
        )

    @property
    def check(self) -> str:
        """How unchanged contents were found out: ``digest``, ``declared`` or ``never``."""
        chosen = _runtime.current_options().clean_check.value
        return chosen if self.result.digested or chosen == "declared" else "never"


@dataclass(frozen=True)
class Woken:
    """A wake that was carried out."""

    segments: list[_C.SegmentInfo]
    result: _C.WakeResult
    undefined: frozenset[str]

    def report(self, seconds: float) -> WakeReport:
        return WakeReport(
            mapped_bytes=self.result.mapped_bytes,
            restored_bytes=self.result.restored_bytes,
            seconds=seconds,
            tags=frozenset(info.owner.tag for info in self.segments),
            undefined=self.undefined,
            devices=tuple(sorted({info.device for info in self.segments})),
            phases=dict(self.result.phases),
        )


@contextmanager
def exclusive(operation: str, tags: Collection[str]) -> Iterator[list[_registry.OpenScope]]:
    """One sleep or wake at a time; yields the scopes of these tags that are open.

    Raises:
        BusyError: this thread is in one already (a hook calls it).
    """
    global _operating
    if _operating == threading.get_ident():
        raise BusyError(
            f"{operation}: called from inside a hook of another sleep or wake. Nothing was "
            "changed; return from the hook first."
        )
    with _operation, _registry.moving(tags) as scopes:
        _operating = threading.get_ident()
        try:
            yield scopes
        finally:
            _operating = None


def refuse_open(operation: str, scopes: list[_registry.OpenScope]) -> None:
    """Raises BusyError when a scope is open."""
    if not scopes:
        return
    scope = scopes[0]
    raise BusyError(
        f"{operation}: thread {scope.thread!r} has a scope of tag {scope.tag!r} open. "
        "Nothing was put to sleep; leave the scope and repeat the call."
    )


def refuse_capture(operation: str, runtime: Runtime) -> None:
    """Raises BusyError when the current stream is in a graph capture."""
    if runtime.backend.is_capturing():
        raise BusyError(
            f"{operation}: a CUDA graph capture is under way on this stream. "
            "Nothing was changed; end the capture and repeat the call."
        )


def host_bytes_wanted(runtime: Runtime, decisions: list[Decision]) -> int:
    """Host memory that a sleep would still have to take from the system."""
    usage = runtime.allocator.host_usage()
    wanted = sum(item.backup_bytes for item in decisions if not item.info.asleep)
    return max(0, wanted - (usage.held_bytes - usage.used_bytes))


def put_to_sleep(runtime: Runtime, operation: str, request: Request) -> Slept:
    """Plans and carries out; the books are right also when it raises."""
    _snapshot.drop_retired(runtime)
    decisions = decide(runtime, request)
    infos = [item.info for item in decisions]
    unchanged = _declared.unchanged()
    plans = [_C.SegmentPlan(item.info.address, item.backup, unchanged) for item in decisions]
    try:
        if infos:
            hooks.run_before_unmap(infos)
        with translated(operation, _LEFT_BY_SLEEP, runtime.backend.device_type):
            result = runtime.allocator.sleep(plans, _CHECKS[_runtime.current_options().clean_check])
    except BaseException as error:
        # What went to sleep before the failure is exactly known, so book it.
        segments = runtime.allocator.segments()
        _book(runtime, decisions, {info.address for info in segments if info.asleep})
        if isinstance(error, CumemError):
            _tell_who_stayed(segments, infos)
        raise
    _book(runtime, decisions, set(result.segments))
    return Slept(decisions, result)


def wake(runtime: Runtime, operation: str, tags: Collection[str], fill: int | None) -> Woken:
    """Wakes every sleeping segment of these tags, in order of allocation."""
    waking = sorted(_asleep(runtime, tags), key=lambda info: info.serial)
    left = (
        f"{size(sum(info.bytes for info in waking))} were wanted in all. Nothing was woken and no "
        "backup was dropped; free memory and call wake_up again."
    )
    try:
        with translated(operation, left, runtime.backend.device_type):
            result = _wake_or_clear_caches(runtime, [info.address for info in waking], fill)
    finally:
        _mark(runtime)
    addresses = set(result.segments)
    woken = [info for info in waking if info.address in addresses]
    undefined = frozenset(info.owner.tag for info in woken if _forget(info))
    if woken:
        hooks.run_after_map(woken)
    return Woken(woken, result, undefined)


def _asleep(runtime: Runtime, tags: Collection[str]) -> list[_C.SegmentInfo]:
    segments = runtime.allocator.segments()
    return [info for info in segments if info.asleep and info.owner.tag in tags]


def _wake_or_clear_caches(
    runtime: Runtime, addresses: list[int], fill: int | None
) -> _C.WakeResult:
    """Wakes; when the device is full, once more without what torch only caches."""
    try:
        return runtime.allocator.wake(addresses, fill)
    except _C.StatusError as error:
        if error.fault != "device_memory":
            raise
    _snapshot.empty_cache(runtime)
    return runtime.allocator.wake(addresses, fill)


def _tell_who_stayed(segments: list[_C.SegmentInfo], infos: list[_C.SegmentInfo]) -> None:
    """After a failed sleep: who dropped a registration can take it again."""
    wanted = {info.address for info in infos}
    awake = [info for info in segments if info.address in wanted and not info.asleep]
    if awake:
        hooks.run_after_map(awake)


def _book(runtime: Runtime, decisions: list[Decision], asleep: Collection[int]) -> None:
    """Moves the epoch of tags that lost contents, and marks what sleeps."""
    gone = [item for item in decisions if item.info.address in asleep and not item.info.asleep]
    lost = [item for item in gone if item.discarded_bytes]
    for tag in {item.info.owner.tag for item in lost}:
        _registry.tag_state(tag).epoch += 1
    for item in lost:
        _registry.tag_state(item.info.owner.tag).discarded.add(item.info.serial)
    _mark(runtime)


def _mark(runtime: Runtime) -> None:
    _registry.mark_asleep(runtime.allocator.sleeping_pools())


def _forget(info: _C.SegmentInfo) -> bool:
    """Had the segment lost contents? It starts anew."""
    discarded = _registry.tag_state(info.owner.tag).discarded
    known = info.serial in discarded
    discarded.discard(info.serial)
    return known
