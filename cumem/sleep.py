"""How does memory go to sleep and wake up?

Arguments are checked before anything is touched; then the plan is made, then the
core carries it out, all or nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Literal, overload

from cumem import _loading, _operation, _registry, _runtime, _transition, waking
from cumem._arguments import described, fill_value, flag, known_tags, sleep_request
from cumem._plan import decide
from cumem.reports import SleepPlan, SleepReport, WakeReport


def sleep(
    level: int = 1,
    *,
    tags: Iterable[str] | None = None,
    offload_tags: Iterable[str] | None = None,
    verify: bool = False,
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
        verify: read every backup again and compare it with the device's contents
            before anything is unmapped.

    Raises:
        ValueError: an unknown tag or level, or both ``level=2`` and ``offload_tags``.
        TypeError: a wrong type.
        IntegrityError: a backup is not what the device holds (only with ``verify``).
        BusyError: a scope of one of these tags is open, a graph capture is under
            way, or the call comes from inside a hook of another.
        HostOutOfMemoryError: no room for the backups.
        StorageError: no room on disk for what sleeps there, or it refused.
        CheckpointError: a file that memory is to be reloaded from has changed.
        DriverError: the driver refused. After a refused unmap every segment is exactly
            awake or asleep with its backup, and the same call continues.
        CumemError: an ``on_before_unmap`` hook raised; or an ``on_after_unmap`` hook,
            and everything is asleep as it was to be.
        In every other case nothing was changed.
    """
    tags, offload_tags = _listed(tags), _listed(offload_tags)
    request, verify = sleep_request(level, tags, offload_tags), flag("verify", verify)
    operation = described("sleep", tags if offload_tags is None else offload_tags)
    runtime = _runtime.ready(operation)
    if runtime is None or level == 0:
        return SleepReport()
    waking.join_pending()
    started = time.perf_counter()
    with _operation.exclusive(operation, request.tags) as scopes:
        _operation.refuse_open(operation, scopes)
        _operation.refuse_capture(operation, runtime)
        done = _transition.put_to_sleep(runtime, operation, request, verify=verify)
    return done.report(runtime, time.perf_counter() - started)


def plan_sleep(
    level: int = 1,
    *,
    tags: Iterable[str] | None = None,
    offload_tags: Iterable[str] | None = None,
) -> SleepPlan:
    """What :func:`sleep` with these arguments would free and need; touches nothing.

    Like the sleep it looks whether files that memory is to be reloaded from are what they
    were; one that is not is told in ``changed_files``, beside the numbers.

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
        tags=frozenset(item.info.tag for item in decisions),
        devices=tuple(sorted({item.info.device for item in decisions})),
        changed_files=_transition.changed_files(runtime, decisions) if runtime else (),
    )


@overload
def wake_up(
    tags: Iterable[str] | None = None,
    *,
    fill: str | None = None,
    wait: Literal[True] = True,
    verify: bool = False,
) -> WakeReport: ...


@overload
def wake_up(
    tags: Iterable[str] | None = None,
    *,
    fill: str | None = None,
    wait: Literal[False],
    verify: bool = False,
) -> waking.WakeHandle: ...


def wake_up(
    tags: Iterable[str] | None = None,
    *,
    fill: str | None = None,
    wait: bool = True,
    verify: bool = False,
) -> WakeReport | waking.WakeHandle:
    """Brings memory back at the same addresses, with the same bytes.

    All or nothing: everything is mapped and restored before any of it counts as
    awake, and no backup is dropped before that. Contents are valid for every
    stream when it returns. Waking what is awake does nothing.

    Args:
        tags: only these tags, in any order; None: everything that sleeps.
        fill: what discarded memory holds: None (undefined), ``"zero"``, or
            ``"poison"`` (0xFF bytes, to make a use of lost contents visible).
        wait: False returns a :class:`WakeHandle` at once; the wake goes on piece by
            piece, and a failure leaves the rest asleep.
        verify: compare what was restored with what was put to sleep; not with
            ``wait=False``.

    Raises:
        ValueError: an unknown tag or fill, or ``verify`` with ``wait=False``.
        TypeError: a wrong type.
        BusyError: a graph capture is under way, or the call comes from inside a hook.
        DeviceOutOfMemoryError: no room on a device, also after torch's caches were cleared.
        HostOutOfMemoryError: no room for what files pass through, also without the backups
            of what is awake. DriverError: the driver refused.
        IntegrityError: what was restored is not what was put to sleep.
        CheckpointError: a file has changed since it was loaded. StorageError: what slept
            to disk cannot be read.
        In these cases everything stays asleep with its backup; the call can be repeated.
        CumemError: an ``on_after_map`` hook raised; everything is awake.
    """
    tags = _listed(tags)
    chosen, value = known_tags(tags), fill_value(fill)
    wait, verify = flag("wait", wait), flag("verify", verify)
    if verify and not wait:
        raise ValueError("verify=True needs everything at once; it cannot be given with wait=False")
    operation = described("wake_up", tags)
    runtime = _runtime.ready(operation)
    waking.join_pending()
    if not wait:
        return waking.start(operation, chosen, value)
    if runtime is None:
        return WakeReport()
    started = time.perf_counter()
    with _operation.exclusive(operation, chosen):
        _operation.refuse_capture(operation, runtime)
        job = _transition.plan_wake(runtime, operation, chosen, value, verify=verify)
        done = _transition.wake(runtime, job)
    return done.report(time.perf_counter() - started)


def is_sleeping() -> bool:
    """Is any tag asleep?"""
    return bool(sleeping_tags())


def sleeping_tags() -> frozenset[str]:
    """The tags of which something is asleep."""
    runtime = _runtime.if_started()
    if runtime is None:
        return frozenset()
    return frozenset(info.tag for info in _loading.sleeping(runtime))


def epoch(tag: str) -> int:
    """The content generation of a tag: it moves only when contents were discarded.

    Raises:
        ValueError: an unknown tag.
    """
    (known,) = known_tags([tag])
    return _registry.tag_state(known).epoch


def _listed(tags: Iterable[str] | None) -> Iterable[str] | None:
    """An iterator would be used up by the first look at it."""
    if tags is None or isinstance(tags, str) or not isinstance(tags, Iterable):
        return tags  # all, or refused later
    return list(tags)
