"""How does a serving process put its engine to sleep and wake it, safely?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import cast

import torch

import cumem
from cumem._arguments import all_of, fill_value, instance, sleep_request
from cumem.errors import BusyError
from cumem.reports import SleepReport, WakeReport
from cumem.serving._closing import ClosedAtExit
from cumem.serving.admission import Admission
from cumem.serving.callbacks import Hook, Registration, RestoreHook, register
from cumem.serving.errors import TransitionTimeoutError
from cumem.serving.lifecycle import Lifecycle
from cumem.serving.states import (
    Kind,
    Mode,
    ServingOptions,
    State,
    Transition,
    check_seconds,
    kind_of,
)
from cumem.serving.tags import OwnTags


class SleepController(ClosedAtExit):
    """The life cycle of one engine in one process; it belongs to one event loop.

    ``async with controller.request():`` around each request; :meth:`sleep` and
    :meth:`wake_up` from whoever decides. One transition at a time: an identical call
    shares the one under way, another one raises :class:`BusyError`. Memory moves in a
    worker thread. After any failure the state is what the memory is, whoever waits is
    told, and the call can be repeated.

    Args:
        tags: the tags of this engine; None: every tag of the process.
        modules: modules to guard: their call raises ``AsleepError`` while they sleep.
        options: how it works.

    Raises:
        ValueError: an empty tag, or one that has had no pool in a process that has some.
            Before the first pool any tag is accepted, because an engine may be built later;
            every sleep and wake then raises this for a tag that has had none.
        TypeError: a wrong type. No module is guarded.
    """

    def __init__(
        self,
        *,
        tags: Iterable[str] | None = None,
        modules: Iterable[torch.nn.Module] = (),
        options: ServingOptions | None = None,
    ) -> None:
        own = OwnTags(tags)
        guarded = all_of("modules", modules, torch.nn.Module, "torch modules")
        if options is not None:
            instance("options", options, ServingOptions, "ServingOptions or None")
        self._life = Lifecycle(own, options or ServingOptions())
        self._guards = [cumem.guard(module) for module in guarded]

    async def __aenter__(self) -> SleepController:
        self.start()
        return await super().__aenter__()

    def start(self) -> None:
        """Begins to count idle time on this event loop; without it, the first request does."""
        self._life.arm()

    async def close(self) -> None:
        """Refuses new requests, waits for a transition under way, and takes the guards away.

        Memory stays as it is, asleep or awake.
        """
        await self._life.close()
        for guard in self._guards:
            guard.remove()

    # What is

    @property
    def options(self) -> ServingOptions:
        return self._life.options

    @property
    def state(self) -> State:
        """The state now; also where somebody else put memory to sleep or woke it."""
        return self._life.state

    @property
    def tags(self) -> frozenset[str]:
        """The engine's tags that have had a pool."""
        return self._life.own.known()

    @property
    def sleeping_tags(self) -> frozenset[str]:
        """The engine's tags of which something is asleep."""
        return self._life.own.asleep()

    @property
    def in_flight(self) -> int:
        """Requests that run."""
        return self._life.book.in_flight

    @property
    def waiting(self) -> int:
        """Requests that wait for a wake, or for their turn."""
        return self._life.book.waiting

    @property
    def refused(self) -> int:
        """Requests that were refused so far."""
        return self._life.refused

    @property
    def history(self) -> tuple[Transition, ...]:
        """The last transitions, oldest first."""
        return tuple(self._life.journal.entries)

    @property
    def retry_after(self) -> float:
        """Seconds that the last wake took; 1 where there was none."""
        return self._life.journal.wake_seconds

    # Requests

    def request(self) -> Admission:
        """Admits a request for an ``async with`` block, which yields a :class:`Request`.

        Raises:
            NotServingError: not all memory is awake, and this request cannot wait for it
                (no ``auto_wake``, a staged wake, too long a wait, a wake that failed, or
                the controller is closed), or too many wait. The message says which.
            RequestAbortedError: at the end of the block, when a sleep aborted it.
        """
        return Admission(self._life)

    # Transitions

    async def sleep(
        self,
        level: int = 1,
        *,
        tags: Iterable[str] | None = None,
        offload_tags: Iterable[str] | None = None,
        mode: Mode | str = Mode.WAIT,
        timeout: float | None = None,
    ) -> SleepReport:
        """Lets requests end, then puts memory to sleep as :func:`cumem.sleep` does.

        New requests are refused, or wait for a wake, from the call on. A call with
        ``mode="abort"`` also ends the requests that an identical call is waiting for.

        Args:
            level, tags, offload_tags: as for :func:`cumem.sleep`, of the engine's tags.
            mode: ``"wait"`` lets requests in flight end, ``"abort"`` cancels them.
            timeout: most seconds to wait for them; None: as ``options.drain_seconds`` says.
                A call that shares the sleep of an earlier one waits as long as that one.

        Raises:
            ValueError, TypeError: wrong arguments. Nothing was changed.
            BusyError: another transition is under way, or a scope or capture is open, or
                a request in flight asks (it would wait for itself).
            TransitionTimeoutError: requests did not end in time.
            TransitionCancelledError: :meth:`cancel` or :meth:`wake_up` came in between.
            CumemError: a hook raised, or as :func:`cumem.sleep`.
            In all these cases nothing sleeps that did not before, but where
            :func:`cumem.sleep` says otherwise, and requests are served again.
        """
        mode = Mode.of(mode)
        check_seconds("timeout", timeout)
        offload = None if offload_tags is None else self._life.own.chosen(offload_tags)
        chosen = self._life.own.chosen(tags)
        sleep_request(level, chosen, offload)
        self._refuse_now("sleep")
        change = self._life.shared(Kind.SLEEP, (level, chosen, offload))
        if change is None:
            seconds = self._life.options.drain_seconds if timeout is None else timeout
            change = self._life.begin_sleep(level, chosen, offload, seconds)
        if mode is Mode.ABORT and not change.committed:
            self._life.book.abort_all()
        return cast(SleepReport, await change.outcome())

    async def wake_up(
        self,
        tags: Iterable[str] | None = None,
        *,
        fill: str | None = None,
        timeout: float | None = None,
    ) -> WakeReport:
        """Brings memory back as :func:`cumem.wake_up` does; then requests are served.

        With ``tags`` only these: requests are refused until every tag is up. A wake of
        everything that comes while a sleep still waits for requests cancels that sleep.

        Args:
            tags: some of the engine's tags; None: all of them.
            fill: as for :func:`cumem.wake_up`.
            timeout: most seconds that this call waits; the wake itself goes on.

        Raises:
            ValueError, TypeError: wrong arguments. Nothing was changed.
            BusyError: another transition is under way, or a capture.
            TransitionTimeoutError: it took longer; the same call joins it again.
            CumemError: a hook raised, or as :func:`cumem.wake_up`; what is asleep stays
                so with its backup, and the call can be repeated.
        """
        check_seconds("timeout", timeout)
        chosen = self._life.own.chosen(tags)
        fill_value(fill)
        self._refuse_now("wake_up")
        await self._give_up_drain(chosen)
        change = self._life.shared(Kind.WAKE_UP, (chosen, fill))
        if change is None:
            if not (self._life.own.asleep() | self._life.unfilled) & chosen:
                return WakeReport()
            change = self._life.begin_wake(chosen, fill)
        if not await change.over(timeout):
            raise TransitionTimeoutError(
                f"wake_up: not awake after {timeout} s. The wake goes on; call again to join it."
            )
        return cast(WakeReport, await change.outcome())

    async def _give_up_drain(self, chosen: frozenset[str]) -> None:
        while (change := self._life.change) is not None:
            if chosen != self._life.own.known() or not change.cancel():
                return
            await change.over()

    def cancel(self) -> bool:
        """Gives up a sleep that still waits for requests; False: there is none."""
        change = self._life.change
        return change is not None and change.cancel()

    def before(self, transition: Kind | str, hook: Hook) -> Registration:
        """Calls ``hook()`` before memory sleeps (no request runs then) or wakes.

        A plain function runs in the worker thread, a coroutine function on the loop. If
        it raises, the transition is given up, and the ``after`` hooks of the state that
        the memory is in are called, so that what was dropped can be taken again.
        """
        return register(self._life.hooks.before[kind_of(transition)], hook)

    def after(self, transition: Kind | str, hook: Hook) -> Registration:
        """Calls ``hook()`` after memory slept, or woke and before requests are served.

        Also when a transition failed, for the state that the memory is in. If it raises,
        the others are still called, and the call raises :class:`CumemError`.
        """
        return register(self._life.hooks.after[kind_of(transition)], hook)

    def restore(self, hook: RestoreHook) -> Registration:
        """Calls ``hook(tags)`` in a wake that brings back memory without its contents.

        ``tags`` are those whose pools would have kept contents and that a sleep discarded
        (``level=2``, ``offload_tags``); the hook loads them again, in place. It runs once
        they are awake and before ``after`` hooks and requests, in the worker thread or,
        a coroutine function, on the loop. If it raises, so does the wake: nothing is served
        (``PARTLY_AWAKE``), and the next wake calls it again. Without such a hook no request
        wakes an engine that has lost contents (``auto_wake``).
        """
        return register(self._life.hooks.restore, hook)

    def observe(self, observer: Callable[[Transition], object]) -> Registration:
        """Calls ``observer(transition)`` on the event loop after each transition."""
        return register(self._life.journal.observers, observer)

    def _refuse_now(self, what: str) -> None:
        """Raises BusyError where the call would wait for itself, or nobody is there to do it."""
        if self._life.closed:
            raise BusyError(f"{what}: the controller is closed. Nothing was changed.")
        if self._life.book.runs_here():
            raise BusyError(
                f"{what}: called from inside a request, which it would wait for. Nothing was "
                "changed; call it when the request is over."
            )
