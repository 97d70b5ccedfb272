"""How does memory go to sleep and wake up?

Arguments are checked before anything is touched; then the plan is made, then the
core carries it out, all or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable

from cumem import _registry, _runtime, _transition
from cumem._arguments import described, fill_value, known_tags, sleep_request
from cumem._plan import decide
from cumem.reports import SleepPlan, SleepReport, WakeReport


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
        BusyError: a scope of one of these tags is open, a graph capture is under
            way, or the call comes from inside a hook of another.
        HostOutOfMemoryError: no room for the backups.
        DriverError: the driver refused. After a refused unmap every segment is exactly
            awake or asleep with its backup, and the same call continues.
        CumemError: an ``on_before_unmap`` hook raised.
        In every other case nothing was changed.
    """
    tags, offload_tags = _listed(tags), _listed(offload_tags)
    request = sleep_request(level, tags, offload_tags)
    operation = described("sleep", tags if offload_tags is None else offload_tags)
    runtime = _runtime.if_started()
    if runtime is None or level == 0:
        return SleepReport()
    started = time.perf_counter()
    with _transition.exclusive(operation, request.tags) as scopes:
        _transition.refuse_open(operation, scopes)
        _transition.refuse_capture(operation, runtime)
        done = _transition.put_to_sleep(runtime, operation, request)
    return done.report(runtime, time.perf_counter() - started)


def plan_sleep(
    level: int = 1,
    *,
    tags: Iterable[str] | None = None,
    offload_tags: Iterable[str] | None = None,
) -> SleepPlan:
    """What :func:`sleep` with these arguments would free and need; touches nothing.

    Raises:
        ValueError: an unknown tag or level, or both ``level=2`` and ``offload_tags``.
        TypeError: a wrong type.
    """
    request = sleep_request(level, _listed(tags), _listed(offload_tags))
    runtime = _runtime.if_started()
    decisions = decide(runtime, request) if runtime is not None and level > 0 else []
    return SleepPlan(
        freed_bytes=sum(item.info.mapped_bytes for item in decisions),
        offloaded_bytes=sum(item.backup_bytes for item in decisions),
        discarded_bytes=sum(item.discarded_bytes for item in decisions),
        host_bytes=_transition.host_bytes_wanted(runtime, decisions) if runtime else 0,
        tags=frozenset(item.info.owner.tag for item in decisions),
        devices=tuple(sorted({item.info.device for item in decisions})),
    )


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
        BusyError: a graph capture is under way, or the call comes from inside a hook.
        DeviceOutOfMemoryError: no room on a device, also after torch's caches were cleared.
        DriverError: the driver refused.
        In these cases everything stays asleep with its backup; the call can be repeated.
        CumemError: an ``on_after_map`` hook raised; everything is awake.
    """
    tags = _listed(tags)
    chosen, value = known_tags(tags), fill_value(fill)
    operation = described("wake_up", tags)
    runtime = _runtime.if_started()
    if runtime is None:
        return WakeReport()
    started = time.perf_counter()
    with _transition.exclusive(operation, chosen):
        _transition.refuse_capture(operation, runtime)
        done = _transition.wake(runtime, operation, chosen, value)
    return done.report(time.perf_counter() - started)


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
    (known,) = known_tags([tag])
    return _registry.tag_state(known).epoch


def _listed(tags: Iterable[str] | None) -> Iterable[str] | None:
    """An iterator would be used up by the first look at it."""
    return tags if tags is None or isinstance(tags, str) else list(tags)
