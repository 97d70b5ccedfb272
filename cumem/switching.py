"""How do two models change places on a device that has room for one?"""

from __future__ import annotations

import time
from collections.abc import Iterable

from cumem import _caches, _operation, _runtime, _transition, waking
from cumem._arguments import described, fill_value, sleep_request
from cumem._outcome import Slept, Woken
from cumem._phases import marked
from cumem._runtime import Runtime
from cumem.errors import translated
from cumem.reports import SwitchReport

_LEFT = (
    "Every segment is exactly awake or asleep and nothing is lost (cumem.stats() tells); "
    "repeat the call to go on, or switch back."
)


def switch(
    *, sleep_tags: Iterable[str], wake_tags: Iterable[str], fill: str | None = None
) -> SwitchReport:
    """Puts some tags to sleep and wakes others, in one operation.

    It needs device memory for little more than one of both: segments are released
    and created one by one, and copies run in both directions at once. All host memory
    is taken before the first unmap; each segment is unmapped only after its own copy
    was finished and checked.

    Args:
        sleep_tags: what goes to sleep, each pool by its own policy.
        wake_tags: what wakes; no tag may be in both.
        fill: what discarded memory holds after the wake, as for :func:`wake_up`.

    Raises:
        ValueError: an unknown tag or fill, or a tag in both lists. TypeError: a wrong type.
        BusyError: a scope of one of these tags is open, a capture is under way, or
            the call comes from inside a hook.
        HostOutOfMemoryError: no room for the backups; nothing was changed.
        DeviceOutOfMemoryError, DriverError: every segment is exactly awake or asleep,
            nothing is lost, and the same or the opposite switch goes on.
        CumemError: a hook raised.
    """
    leaving, arriving = _listed(sleep_tags), _listed(wake_tags)
    request = sleep_request(1, leaving, None)
    woken = sleep_request(1, arriving, None).tags
    value = fill_value(fill)
    if both := request.tags & woken:
        raise ValueError(f"tags that are to sleep and to wake: {', '.join(sorted(both))}")
    operation = described("switch", [*leaving, *arriving])
    runtime = _runtime.ready(operation)
    if runtime is None:
        return SwitchReport()
    waking.join_pending()
    started = time.perf_counter()
    with _operation.exclusive(operation, request.tags | woken) as scopes:
        _operation.refuse_open(operation, scopes)
        _operation.refuse_capture(operation, runtime)
        leave = _transition.plan_sleep(runtime, request)
        arrive = _transition.plan_wake(runtime, operation, woken, value)
        slept, awoken = _carry_out(runtime, leave, arrive)
    seconds = time.perf_counter() - started
    return SwitchReport(slept.report(runtime, seconds), awoken.report(seconds), seconds)


def _listed(tags: Iterable[str]) -> list[str]:
    if isinstance(tags, str):
        raise TypeError(f"tags must be a list of strings, not one string: [{tags!r}]")
    return list(tags)


def _carry_out(
    runtime: Runtime, leave: _transition.SleepJob, arrive: _transition.WakeJob
) -> tuple[Slept, Woken]:
    """Does both; the books are right also when it raises."""
    leaving = [item.info for item in leave.decisions]
    arriving = [info.address for info in arrive.segments]
    try:
        _transition.tell_who_goes(_transition.still_whole(leave.decisions), leave.phases)
        with translated(arrive.operation, _LEFT, runtime.backend.device_type), marked("switch"):
            _caches.clear_caches_when_short(runtime, arrive.segments, leaving)
            results = runtime.allocator.exchange(
                leave.plans, _transition.check(), arriving, arrive.fill
            )
    except BaseException:
        _transition.book_failed_switch(runtime, leave, arrive)
        raise
    return _transition.book_switch(runtime, leave, arrive, results)
