"""When may requests run, and when may memory sleep?

Note [Nothing runs on sleeping memory]: a request is in flight from its admission to the
end of its last work, threads included. Memory sleeps only when no request is in flight,
and a request is admitted only when every tag is awake. Both are decided on one event
loop, without a step in between; requests that wait for a wake are in flight, as many as
may run at once, before anybody can ask for the next sleep, so none waits for ever. One
that waits for its turn is not in flight: no sleep waits for it, and it is woken for, or
refused, like one that came while memory slept.

Note [Undefined contents]: a sleep that discards what its pool would bring back (level=2,
offload_tags) leaves nothing to serve with. A request then wakes the engine only where a
restore hook fills that memory, which is done before any request is admitted. Whoever
calls wake_up() without such a hook has to do it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import cumem
from cumem._text import choices
from cumem.errors import BusyError
from cumem.reports import SleepReport
from cumem.serving.callbacks import TransitionHooks
from cumem.serving.change import Change, Report
from cumem.serving.errors import NotServingError
from cumem.serving.journal import Journal
from cumem.serving.requests import Request, RequestBook, in_thread
from cumem.serving.states import Kind, ServingOptions, State
from cumem.serving.tags import OwnTags

_log = logging.getLogger("cumem")


class Lifecycle:
    """State, requests and transitions of one engine; the controller is its face."""

    def __init__(self, own: OwnTags, options: ServingOptions) -> None:
        self.own, self.options = own, options
        self.book = RequestBook(options.most_in_flight)
        self.hooks = TransitionHooks(self._in_worker)
        self.journal = Journal(options.history)
        self.change: Change | None = None
        self.refused = 0
        self.closed = False
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="cumem-serving")
        self.unfilled = frozenset[str]()  # what a wake brought and no hook could restore yet
        self._staged = False  # what sleeps is to be woken in stages
        self.left = 0.0  # when memory began to go for the last time, by time.perf_counter()
        self._timer: asyncio.TimerHandle | None = None

    @property
    def state(self) -> State:
        """The state now; also where somebody else put memory to sleep or woke it.

        Nothing is kept of it, so that other threads may ask.
        """
        change = self.change
        if change is not None:
            return State.DRAINING if change.kind is Kind.SLEEP else State.WAKING
        if self.own.asleep():
            return State.PARTLY_AWAKE if self._staged else State.ASLEEP
        return State.PARTLY_AWAKE if self.unfilled else State.AWAKE

    # Requests

    def admit(self, request: Request) -> asyncio.Future[None] | None:
        """None: it is in flight. Else done when it is, or is refused; raises NotServingError."""
        state = self.state
        if self.closed:
            raise self.refusal("the engine is shutting down")
        if state is State.AWAKE and self.book.has_room():
            self._disarm()
            self.book.admit(request)
            return None
        if state is not State.AWAKE and (why := self._bar_to_a_wake(state)):
            raise self.refusal(why)
        self._refuse_a_crowd()
        future = self.book.wait(request)
        self._serve_waiting()
        return future

    def _refuse_a_crowd(self) -> None:
        most = self.options.most_waiting
        if most is not None and self.book.waiting >= most:
            self.refused += 1
            message = (
                f"the request was refused: {most} wait already, and no more may. Nothing was run; "
                "try again when some of them have been served."
            )
            raise NotServingError(message, self.state, self.book.last_seconds)

    def _serve_waiting(self) -> None:
        """Where no transition will: others may have put memory to sleep, or woken it."""
        if self.change is not None or not self.book.waiting:
            return
        state = self.state
        if state is State.AWAKE:
            self.book.admit_waiting()
        elif why := self._bar_to_a_wake(state):
            self.book.refuse_waiting(lambda: self.refusal(why))
        else:
            self.begin_wake(self.own.known(), None)

    def _bar_to_a_wake(self, state: State) -> str | None:
        """Why a request may not wake the engine; None: it may. See Note [Undefined contents]."""
        if not self.options.auto_wake or (state is State.PARTLY_AWAKE and self.own.asleep()):
            return f"the engine is {state.value.replace('_', ' ')}"
        lost = self.own.lost() | self.unfilled
        if self.change or self.hooks.restore or not lost:
            return None
        return (
            f"the contents of {choices(lost)} were discarded, and a wake alone would leave them "
            "undefined. Wake these tags, load their contents, then wake the rest; or register "
            "controller.restore(hook), which loads them in every wake"
        )

    def leave(self, request: Request) -> None:
        """The request is over, wherever it was."""
        self.book.leave(request)
        self._serve_waiting()
        self.arm()

    def refusal(self, why: str) -> NotServingError:
        self.refused += 1
        message = (
            f"the request was refused: {why} (asleep: {choices(self.own.asleep())}). "
            "Nothing was run; try again once it is awake."
        )
        return NotServingError(message, self.state, self.journal.wake_seconds)

    # Transitions

    def shared(self, kind: Kind, key: Hashable) -> Change | None:
        """The transition under way, where it is the same; None: there is none.

        Raises:
            BusyError: another one is under way.
        """
        change = self.change
        if change is None or (change.kind, change.key) == (kind, key):
            return change
        other = " with other arguments" if change.kind is kind else ""
        raise BusyError(
            f"{kind.value}: a {change.kind.value}{other} is under way. Nothing was changed; call "
            "again when it is over."
        )

    def begin_sleep(
        self,
        level: int,
        tags: frozenset[str],
        offload: frozenset[str] | None,
        drain_seconds: float | None,
    ) -> Change:
        wanted: dict[str, Any] = {
            "level": level,
            "tags": sorted(tags),
            "offload_tags": None if offload is None else sorted(offload),
        }
        change = Change(
            Kind.SLEEP,
            (level, tags, offload),
            partial(cumem.sleep, **wanted),
            plan=partial(cumem.plan_sleep, **wanted),
            drain_seconds=drain_seconds,
        )
        return self._begin(change)

    def begin_wake(self, tags: frozenset[str], fill: str | None) -> Change:
        def work() -> Report:
            return cumem.wake_up(sorted(tags), fill=fill)

        staged = tags != self.own.known()
        change = Change(Kind.WAKE_UP, (tags, fill), work, staged=staged)
        return self._begin(change)

    def _begin(self, change: Change) -> Change:
        self._disarm()
        self.change = change
        change.start(asyncio.get_running_loop().create_task(self._carry_out(change)))
        return change

    async def _carry_out(self, change: Change) -> Report:
        outcome: Report | BaseException | None = None
        try:
            outcome = report = await self._move(change)
        except BaseException as raised:
            outcome = raised
            raise
        finally:
            self._conclude(change, outcome)
        return report

    async def _move(self, change: Change) -> Report:
        if change.kind is Kind.SLEEP:
            await change.drain(self.book)
            self.left = change.drained
        if change.plan is not None and not (await self._in_worker(change.plan)).tags:
            return SleepReport()  # no hook hears of a sleep that has nothing to do
        lost = self.own.lost() if change.kind is Kind.WAKE_UP else frozenset()
        try:
            await self.hooks.run_before(change.kind)
            try:
                report: Report = await self._in_worker(change.work)
            finally:
                self._note_unfilled(lost)
            if change.kind is Kind.WAKE_UP:
                await self._restore()
        except Exception:
            asleep = self.own.asleep()
            await self.hooks.run_after_failure(Kind.SLEEP if asleep else Kind.WAKE_UP)
            raise
        self._staged = change.staged and bool(self.own.asleep())
        await self.hooks.run_after(change.kind)
        return report

    def _note_unfilled(self, lost: frozenset[str]) -> None:
        """Where a hook is to restore contents, nothing is served before it has."""
        if self.hooks.restore:
            self.unfilled |= lost - self.own.asleep()

    async def _restore(self) -> None:
        awake = self.unfilled - self.own.asleep()
        if awake:
            await self.hooks.run_restore(awake)
            self.unfilled -= awake

    def _conclude(self, change: Change, outcome: Report | BaseException | None) -> None:
        """The state is what the memory is; then whoever waits is served or told."""
        self.change = None
        state = self.state
        error = outcome if isinstance(outcome, BaseException) else None
        self.journal.add(change, outcome, state, self.own.asleep())
        if state is State.AWAKE:
            self.book.admit_waiting()
        elif self.book.waiting:
            self._answer_waiting(change, error)
        self.arm()

    def _answer_waiting(self, change: Change, error: BaseException | None) -> None:
        """They wait for the next wake where that is theirs to begin."""
        fell_asleep = change.kind is Kind.SLEEP and not isinstance(error, asyncio.CancelledError)
        why: str | None = f"the wake failed: {error}" if error else "the engine is partly awake"
        if fell_asleep and not self.closed and self.state is State.ASLEEP:
            why = self._bar_to_a_wake(State.ASLEEP)
        if why is None:
            self.begin_wake(self.own.known(), None)
            return
        self.book.refuse_waiting(lambda: self.refusal(why))

    def _in_worker(self, function: Callable[[], Any]) -> Any:
        return in_thread(self._worker, function)

    # Idle

    def arm(self) -> None:
        """Begins to count idle time, where the engine is awake and has nothing to do."""
        self._disarm()
        seconds = self.options.idle_seconds
        idle = self.change is None and self.book.in_flight == 0 and self.state is State.AWAKE
        if seconds is not None and idle and not self.closed:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._sleep_idly)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _sleep_idly(self) -> None:
        """A failure is in the history, and is tried again after the same time."""
        self._timer = None
        if self.change is None and self.book.in_flight == 0 and not self.closed:
            _log.info("idle for %s s: going to sleep", self.options.idle_seconds)
            level = self.options.idle_level
            self.begin_sleep(level, self.own.named(), None, self.options.drain_seconds)

    async def close(self) -> None:
        """Refuses what comes and what waits; a transition under way ends first."""
        self.closed = True
        self._disarm()
        self.book.refuse_waiting(lambda: self.refusal("the engine is shutting down"))
        while self.change is not None:
            self.change.cancel()
            await self.change.over()
        self._worker.shutdown(wait=False)
