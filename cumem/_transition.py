"""How is a planned sleep or wake carried out, and booked whatever happens?"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from cumem import _C, _caches, _declared, _loading, _parts, _registry, _runtime, _snapshot, hooks
from cumem._outcome import Slept, Woken
from cumem._phases import Phases, marked
from cumem._plan import Decision, Request, decide_on, plans
from cumem._runtime import Runtime
from cumem._text import choices, size
from cumem.errors import CumemError, translated
from cumem.options import CleanCheck

_LEFT_BY_SLEEP = (
    "What is asleep has its backup and everything else is untouched (cumem.stats() tells); "
    "repeat the call to go on."
)

_CHECKS = {
    CleanCheck.DIGEST: _C.CleanCheck.digest,
    CleanCheck.NEVER: _C.CleanCheck.never,
    CleanCheck.DECLARED: _C.CleanCheck.declared,
}

_LEFT_BY_WAKE = (
    "{wanted} were wanted in all, for {tags}. Nothing was woken and no backup was dropped; "
    "free memory and call wake_up again."
)
_LEFT_BY_PIECES = "What is awake stays so, the rest is asleep with its backup; call wake_up again."


@dataclass(frozen=True)
class SleepJob:
    """A sleep that is planned."""

    decisions: list[Decision]
    plans: list[_C.SegmentPlan]  # the same as the core is told of it
    phases: Phases


@dataclass(frozen=True)
class WakeJob:
    """A wake that is planned."""

    operation: str
    segments: list[_C.SegmentInfo]  # in the order in which they are to come
    fill: int | None
    verify: bool
    phases: Phases


def check() -> _C.CleanCheck:
    """How the core is to find out what has not changed."""
    return _CHECKS[_runtime.current_options().clean_check]


def host_bytes_wanted(runtime: Runtime, decisions: list[Decision]) -> int:
    """Host memory that a sleep would still have to take from the system.

    Backups that these segments kept since they woke are used again, or given up first.
    """
    wanted, kept = host_backups(decisions)
    return max(0, wanted - kept - runtime.allocator.host_usage().idle_bytes)


def host_backups(decisions: list[Decision]) -> tuple[int, int]:
    """Bytes of backups that go to host memory, and of those kept there since an earlier sleep.

    Kept ones are used again, or make room for new ones.
    """
    ours = [item for item in decisions if item.store == _C.Store.host and not item.info.asleep]
    return sum(item.backup_bytes for item in ours), sum(item.info.backup_bytes for item in ours)


def changed_files(runtime: Runtime, decisions: list[Decision]) -> tuple[str, ...]:
    """Files that these segments were to be left to, and that are not what they were."""
    left = [item.info.address for item in decisions if item.store == _C.Store.source]
    return tuple(sorted(runtime.allocator.changed_sources(left)))


def put_to_sleep(
    runtime: Runtime, operation: str, request: Request, *, verify: bool = False
) -> Slept:
    """Plans and carries out; the books are right also when it raises."""
    job = plan_sleep(runtime, request)
    whole = still_whole(job.decisions)
    try:
        tell_who_goes(whole, job.phases)
        with translated(operation, _LEFT_BY_SLEEP, runtime.backend.device_type), marked("sleep"):
            result = runtime.allocator.sleep(job.plans, check(), verify)
    except BaseException as error:
        segments = _book_failure(runtime, job.decisions)
        if isinstance(error, CumemError):
            _tell_who_stayed(segments, whole)
        raise
    with job.phases.of("book"):
        ended = _of(job.decisions, set(result.segments))
        _book(runtime, ended)
        _tell_who_went(ended)
    return Slept(ended, result, job.phases)


def plan_sleep(runtime: Runtime, request: Request) -> SleepJob:
    """What a sleep is to do, after torch has given back what it can."""
    phases = Phases()
    with phases.of("snapshot"):
        _snapshot.drop_retired(runtime)
        snapshot = _snapshot.take(runtime)
    with phases.of("decide"):
        decisions = decide_on(_snapshot.reconciled(runtime, snapshot), snapshot, request)
        told = plans(decisions)
        snapshot.clear()  # of many blocks it takes a while, which belongs to this phase
    return SleepJob(decisions, told, phases)


def still_whole(decisions: list[Decision]) -> list[_C.SegmentInfo]:
    """What hooks are to hear of: not of a segment that an earlier sleep unmapped in part."""
    return [item.info for item in decisions if not item.info.asleep]


def tell_who_goes(whole: list[_C.SegmentInfo], phases: Phases) -> None:
    """The last moment at which this memory is mapped."""
    if whole:
        with phases.of("hooks"):
            hooks.run_before_unmap(whole)


def _of(decisions: list[Decision], segments: Collection[int]) -> list[Decision]:
    """Those of the segments at these addresses."""
    return [item for item in decisions if item.info.address in segments]


def _book_failure(runtime: Runtime, decisions: list[Decision]) -> list[_C.SegmentInfo]:
    """What went to sleep before a failure is exactly known, so it is booked."""
    segments = runtime.allocator.segments()
    _book(runtime, _of(decisions, {info.address for info in segments if info.asleep}))
    return segments


def plan_wake(
    runtime: Runtime,
    operation: str,
    tags: Collection[str],
    fill: int | None,
    order: Sequence[torch.Tensor] = (),
    *,
    verify: bool = False,
) -> WakeJob:
    """The sleeping segments of these tags: those of ``order`` first, then by allocation."""
    phases = Phases()
    with phases.of("decide"):
        asleep = sorted(_asleep(runtime, tags), key=lambda info: info.serial)
        segments = _ordered(asleep, order) if order else asleep
    return WakeJob(operation, segments, fill, verify, phases)


def _ordered(segments: list[_C.SegmentInfo], order: Sequence[torch.Tensor]) -> list[_C.SegmentInfo]:
    """Those that these tensors are in come first, in the tensors' order."""
    starts = sorted(info.address for info in segments)
    rank: dict[int, int] = {}
    for tensor in order:
        at = bisect_right(starts, tensor.untyped_storage().data_ptr()) - 1
        if at >= 0:
            rank.setdefault(starts[at], len(rank))
    return sorted(segments, key=lambda info: rank.get(info.address, len(rank)))


def wake(runtime: Runtime, job: WakeJob, progress: _C.WakeProgress | None = None) -> Woken:
    """Wakes the segments of ``job``; piece by piece when there is a ``progress``."""
    wanted = size(sum(info.bytes for info in job.segments))
    tags = choices({info.tag for info in job.segments})
    whole = _LEFT_BY_WAKE.format(wanted=wanted, tags=tags)
    left = _LEFT_BY_PIECES if progress is not None else whole
    try:
        with translated(job.operation, left, runtime.backend.device_type), marked("wake"):
            result = _wake_or_clear_caches(runtime, job, progress)
    except CumemError:
        _book_pieces(runtime, job)
        raise
    finally:
        with job.phases.of("book"):
            _mark(runtime)
    return _book_wake(job, set(result.segments), result)


def _book_wake(job: WakeJob, awake: Collection[int], result: _C.WakeResult) -> Woken:
    """Forgets what was lost of segments that are awake, and tells who wants to know."""
    with job.phases.of("book"):
        woken, undefined = _welcome(job, awake)
    return Woken(woken, result, undefined, job.phases)


def _welcome(job: WakeJob, awake: Collection[int]) -> tuple[list[_C.SegmentInfo], frozenset[str]]:
    woken = [info for info in job.segments if info.address in awake]
    undefined = frozenset(info.tag for info in woken if _forget(info))
    if woken:
        hooks.run_after_map(woken)
    return woken, undefined


def _book_pieces(runtime: Runtime, job: WakeJob) -> None:
    """Books what a wake brought before it failed."""
    segments = runtime.allocator.segments()
    _welcome(job, {info.address for info in segments if not info.asleep})


def book_switch(
    runtime: Runtime,
    leaving: SleepJob,
    arriving: WakeJob,
    results: tuple[_C.SleepResult, _C.WakeResult],
) -> tuple[Slept, Woken]:
    """Books a switch that was carried out."""
    slept, woken = results
    with leaving.phases.of("book"):
        ended = _of(leaving.decisions, set(slept.segments))
        _book(runtime, ended)
    try:
        _tell_who_went(ended)
    finally:
        awoken = _book_wake(arriving, set(woken.segments), woken)
    return Slept(ended, slept, leaving.phases), awoken


def book_failed_switch(runtime: Runtime, leaving: SleepJob, arriving: WakeJob) -> None:
    """Books what a switch did before it failed; its hooks hear of what is awake."""
    segments = _book_failure(runtime, leaving.decisions)
    for info in segments:
        if not info.asleep:
            _forget(info)
    wanted = [item.info for item in leaving.decisions] + arriving.segments
    _tell_who_stayed(segments, wanted)


def _asleep(runtime: Runtime, tags: Collection[str]) -> list[_C.SegmentInfo]:
    return [info for info in _loading.sleeping(runtime) if info.tag in tags]


def _wake_or_clear_caches(
    runtime: Runtime, job: WakeJob, progress: _C.WakeProgress | None
) -> _C.WakeResult:
    """Wakes; when the device is full, once more without what only saves time."""
    addresses = [info.address for info in job.segments]

    def whole() -> _C.WakeResult:
        return runtime.allocator.wake(addresses, job.fill, job.verify, None)

    if progress is not None:  # it cannot start again: others wait for its pieces
        _caches.clear_caches_when_short(runtime, job.segments)
        return runtime.allocator.wake(addresses, job.fill, job.verify, progress)
    return _caches.with_cleared_caches(runtime, whole)


def _tell_who_went(ended: list[Decision]) -> None:
    hooks.run_after_unmap([item.info for item in ended])


def _tell_who_stayed(segments: list[_C.SegmentInfo], infos: list[_C.SegmentInfo]) -> None:
    """After a failed sleep: who dropped a registration can take it again."""
    wanted = {info.address for info in infos}
    awake = [info for info in segments if info.address in wanted and not info.asleep]
    if awake:
        hooks.run_after_map(awake)


def _book(runtime: Runtime, asleep: list[Decision]) -> None:
    """Moves the epoch of tags that lost contents, and marks what sleeps."""
    gone = [item for item in asleep if not item.info.asleep]
    lost = [item for item in gone if item.discarded_bytes]
    for tag in {item.info.tag for item in lost}:
        _registry.tag_state(tag).epoch += 1
    for item in lost:
        _registry.tag_state(item.info.tag).discarded.add(item.info.serial)
        _declared.forget_lost(item.info.address, item.info.bytes)
    _parts.tell_lost(item.info.address for item in lost)
    _declared.note_backup(piece for item in gone for piece in item.backup)
    _mark(runtime)


def _mark(runtime: Runtime) -> None:
    _registry.mark_asleep(runtime.allocator.sleeping_pools())


def _forget(info: _C.SegmentInfo) -> bool:
    """Had the segment lost contents? It starts anew."""
    discarded = _registry.tag_state(info.tag).discarded
    known = info.serial in discarded
    discarded.discard(info.serial)
    return known
