"""How does memory go to sleep and wake up?

Arguments are checked before anything is touched; then the plan is made, then the
core carries it out, all or nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable

from cumem import _C, _registry, _runtime, _snapshot
from cumem._plan import Decision, Request, decide
from cumem._runtime import Runtime
from cumem._text import choices, size
from cumem.errors import BusyError, translated
from cumem.reports import SleepReport, WakeReport

_FILLS = {"zero": 0x00, "poison": 0xFF}
_LEFT_BY_SLEEP = (
    "What is asleep has its backup and everything else is untouched (cumem.stats() tells); "
    "repeat the call to go on."
)

# One sleep or wake at a time; re-entered by nobody.
_operation = threading.Lock()


def sleep(
    level: int = 1,
    *,
    tags: Iterable[str] | None = None,
    offload_tags: Iterable[str] | None = None,
) -> SleepReport:
    """Gives device memory back to the driver; every pointer stays valid.

    All or nothing: host memory is taken and every copy is finished and checked
    before the first byte is unmapped. When it returns, other processes can
    allocate ``freed_bytes``. Sleeping what is asleep does nothing.

    Args:
        level: 0 releases nothing; 1 does what each pool's ``on_sleep`` says; 2
            discards offload pools too. What :func:`keep` protects always comes back.
        tags: only these tags; None: all.
        offload_tags: back these up and discard all others, whatever their policy
            (keep pools and kept tensors are still honoured).

    Raises:
        ValueError: an unknown tag or level, or both ``level=2`` and ``offload_tags``.
        TypeError: a wrong type.
        BusyError: a scope of one of these tags is open, or a graph capture is under way.
        HostOutOfMemoryError: no room for the backups.
        DriverError: the driver refused. After a refused unmap every segment is exactly
            awake or asleep with its backup, and the same call continues.
        In every other case nothing was changed.
    """
    operation = _describe("sleep", tags if offload_tags is None else offload_tags)
    request = _request(level, tags, offload_tags)
    runtime = _runtime.if_started()
    if runtime is None or level == 0:
        return SleepReport()
    started = time.perf_counter()
    with _operation, _registry.moving(request.tags) as scopes:
        _refuse_open(operation, scopes)
        _refuse_capture(operation, runtime)
        _snapshot.drop_retired(runtime)
        decisions = decide(runtime, request)
        result = _run_sleep(runtime, operation, decisions)
    return _sleep_report(runtime, decisions, result, time.perf_counter() - started)


def wake_up(tags: Iterable[str] | None = None, *, fill: str | None = None) -> WakeReport:
    """Brings memory back at the same addresses, with the same bytes.

    All or nothing: everything is mapped and restored before any of it counts as
    awake, and no backup is dropped before that. Contents are valid for every
    stream when it returns. Waking what is awake does nothing.

    Args:
        tags: only these tags, in any order; None: everything that sleeps.
        fill: what discarded memory holds: None (undefined), ``"zero"``, or
            ``"poison"`` (0xFF bytes, to make a use of lost contents visible).

    Raises:
        ValueError: an unknown tag or fill. TypeError: a wrong type.
        BusyError: a graph capture is under way.
        DeviceOutOfMemoryError: no room on a device, also after torch's caches were cleared.
        DriverError: the driver refused.
        In every case everything stays asleep with its backup; the call can be repeated.
    """
    operation = _describe("wake_up", tags)
    chosen = _known(tags)
    value = _fill_value(fill)
    runtime = _runtime.if_started()
    if runtime is None:
        return WakeReport()
    started = time.perf_counter()
    with _operation, _registry.moving(chosen):
        _refuse_capture(operation, runtime)
        waking = [
            info
            for info in runtime.allocator.segments()
            if info.asleep and info.owner.tag in chosen
        ]
        result = _run_wake(runtime, operation, waking, value)
    return _wake_report(waking, result, time.perf_counter() - started)


def is_sleeping() -> bool:
    """Is any tag asleep?"""
    return bool(sleeping_tags())


def sleeping_tags() -> frozenset[str]:
    """The tags of which something is asleep."""
    runtime = _runtime.if_started()
    if runtime is None:
        return frozenset()
    return frozenset(info.owner.tag for info in runtime.allocator.segments() if info.asleep)


def epoch(tag: str) -> int:
    """The content generation of a tag: it moves only when contents were discarded.

    Raises:
        ValueError: an unknown tag.
    """
    (known,) = _known([tag])
    return _registry.tag_state(known).epoch


def _request(level: int, tags: Iterable[str] | None, offload_tags: Iterable[str] | None) -> Request:
    if isinstance(level, bool) or not isinstance(level, int):
        raise TypeError(f"level must be an int, not {type(level).__name__}")
    if level not in (0, 1, 2):
        raise ValueError(f"unknown level {level}; choices: 0, 1, 2")
    if offload_tags is not None and level == 2:
        raise ValueError("level=2 discards everything; it cannot be given with offload_tags")
    chosen = _known(tags)
    offload = None if offload_tags is None else _known(offload_tags)
    return Request(level, chosen, offload)


def _known(tags: Iterable[str] | None) -> frozenset[str]:
    """These tags, all of them known; None stands for every known tag."""
    known = _registry.known_tags()
    if tags is None:
        return known
    if isinstance(tags, str):
        raise TypeError(f"tags must be a list of strings, not one string: [{tags!r}]")
    wanted = list(tags)
    for tag in wanted:
        if not isinstance(tag, str):
            raise TypeError(f"a tag must be a string, not {type(tag).__name__}")
        if tag not in known:
            raise ValueError(f"unknown tag {tag!r}; known tags: {choices(known)}")
    return frozenset(wanted)


def _fill_value(fill: str | None) -> int | None:
    if fill is None:
        return None
    if not isinstance(fill, str):
        raise TypeError(f"fill must be a string, not {type(fill).__name__}")
    if fill not in _FILLS:
        raise ValueError(f"unknown fill {fill!r}; choices: {choices(_FILLS)}")
    return _FILLS[fill]


def _describe(name: str, tags: Iterable[str] | None) -> str:
    if tags is None or not isinstance(tags, Collection):
        return f"{name}()"
    return f"{name}({', '.join(repr(tag) for tag in tags)})"


def _refuse_open(operation: str, scopes: list[_registry.OpenScope]) -> None:
    if not scopes:
        return
    scope = scopes[0]
    raise BusyError(
        f"{operation}: thread {scope.thread!r} has a scope of tag {scope.tag!r} open. "
        "Nothing was put to sleep; leave the scope and repeat the call."
    )


def _refuse_capture(operation: str, runtime: Runtime) -> None:
    if runtime.backend.is_capturing():
        raise BusyError(
            f"{operation}: a CUDA graph capture is under way on this stream. "
            "Nothing was changed; end the capture and repeat the call."
        )


def _run_sleep(runtime: Runtime, operation: str, decisions: list[Decision]) -> _C.SleepResult:
    plans = [_C.SegmentPlan(item.info.address, list(item.backup)) for item in decisions]
    try:
        with translated(operation, _LEFT_BY_SLEEP):
            return runtime.allocator.sleep(plans)
    finally:
        # Also after a failure: what did go to sleep is exactly known.
        _book_sleep(runtime, decisions)


def _book_sleep(runtime: Runtime, decisions: list[Decision]) -> None:
    asleep = {info.address for info in runtime.allocator.segments() if info.asleep}
    gone = [item for item in decisions if item.info.address in asleep and not item.info.asleep]
    for tag in {item.info.owner.tag for item in gone if item.discarded_bytes}:
        state = _registry.tag_state(tag)
        state.epoch += 1
        state.discarded = True
    _mark_pools(runtime)


def _mark_pools(runtime: Runtime) -> None:
    asleep = {info.owner.pool for info in runtime.allocator.segments() if info.asleep}
    for entry in _registry.pools():
        entry.asleep = entry.number in asleep


def _sleep_report(
    runtime: Runtime, decisions: list[Decision], result: _C.SleepResult, seconds: float
) -> SleepReport:
    went = set(result.segments)
    gone = [item for item in decisions if item.info.address in went]
    offloaded = sum(item.backup_bytes for item in gone)
    return SleepReport(
        freed_bytes=result.freed_bytes,
        offloaded_bytes=offloaded,
        discarded_bytes=sum(item.discarded_bytes for item in gone),
        copied_bytes=result.copied_bytes,
        skipped_bytes=offloaded - result.copied_bytes,
        host_bytes=runtime.allocator.host_usage().held_bytes,
        pageable_bytes=result.pageable_bytes,
        seconds=seconds,
        tags=frozenset(item.info.owner.tag for item in gone),
        devices=tuple(sorted({item.info.device for item in gone})),
        phases=dict(result.phases),
    )


def _run_wake(
    runtime: Runtime, operation: str, waking: list[_C.SegmentInfo], fill: int | None
) -> _C.WakeResult:
    addresses = [info.address for info in sorted(waking, key=lambda info: info.serial)]
    left = (
        f"{size(sum(info.bytes for info in waking))} were wanted in all. Nothing was woken and no "
        "backup was dropped; free memory and call wake_up again."
    )
    try:
        with translated(operation, left):
            return _wake_or_clear_caches(runtime, addresses, fill)
    finally:
        _mark_pools(runtime)


def _wake_or_clear_caches(
    runtime: Runtime, addresses: list[int], fill: int | None
) -> _C.WakeResult:
    """Wakes; when the device is full, once more without what torch only caches."""
    try:
        return runtime.allocator.wake(addresses, fill)
    except _C.StatusError as error:
        if error.fault != "device_memory":
            raise
    runtime.backend.empty_cache()
    return runtime.allocator.wake(addresses, fill)


def _wake_report(waking: list[_C.SegmentInfo], result: _C.WakeResult, seconds: float) -> WakeReport:
    woken = [info for info in waking if info.address in set(result.segments)]
    tags = frozenset(info.owner.tag for info in woken)
    return WakeReport(
        mapped_bytes=result.mapped_bytes,
        restored_bytes=result.restored_bytes,
        seconds=seconds,
        tags=tags,
        undefined=frozenset(tag for tag in tags if _forget_discarded(tag)),
        devices=tuple(sorted({info.device for info in woken})),
        phases=dict(result.phases),
    )


def _forget_discarded(tag: str) -> bool:
    state = _registry.tag_state(tag)
    discarded, state.discarded = state.discarded, False
    return discarded
