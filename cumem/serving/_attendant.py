"""How are those who wait for a model served, without blocking the event loop?

One move at a time is carried out, in a thread; everything else is decided on the loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from cumem._text import traced
from cumem.errors import DeviceOutOfMemoryError
from cumem.serving._moves import Mover, Recipe, measure
from cumem.serving._schedule import ModelState, Resident, Room, Schedule, Step, Waiter
from cumem.serving.requests import in_thread

_T = TypeVar("_T")

_log = logging.getLogger("cumem")


class Attendant:
    """Gives models to those who wait, as the schedule says.

    Attributes:
        recipes: how each model is made.
        hits: uses that found their model awake.
        moves: switches, wakes and builds that were carried out.
        failures: those that failed.
        seconds: time that all of them took.
    """

    def __init__(self, schedule: Schedule, mover: Mover) -> None:
        self.recipes: dict[str, Recipe] = {}
        self.hits = self.moves = self.failures = 0
        self.seconds = 0.0
        self._schedule = schedule
        self._mover = mover
        self._built: dict[str, Any] = {}
        self._answers: dict[Waiter, asyncio.Future[Any]] = {}
        self._move: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cumem-host")

    async def acquire(self, resident: Resident, priority: int) -> Any:
        """Waits for a model, which stays awake until :meth:`release`."""
        waiter = self._schedule.queue(resident, priority)
        answer = asyncio.get_running_loop().create_future()
        self._answers[waiter] = answer
        self.dispatch()
        self.hits += answer.done() and answer.exception() is None
        try:
            return await answer
        except asyncio.CancelledError:
            if self._answers.pop(waiter, None) is not None:
                self._schedule.waiting.remove(waiter)
            elif not answer.cancelled() and answer.exception() is None:
                resident.users -= 1  # it was given just before
            self.dispatch()  # others may have waited behind it
            raise

    def release(self, resident: Resident) -> None:
        """Ends one use."""
        resident.users -= 1
        self._schedule.touch(resident)
        self.dispatch()

    def dispatch(self) -> None:
        """Serves whom it can, and starts the next move when none is under way."""
        for waiter in self._schedule.servable():
            self._schedule.serve(waiter)
            self._answer(waiter)
        while self._move is None:
            try:
                step = self._schedule.next_step()
            except DeviceOutOfMemoryError as error:
                self._refuse_first(error)
                continue
            if step is None:
                return
            self._start(step)

    async def quiet(self) -> None:
        """Returns when no move is under way."""
        while self._move is not None:
            await asyncio.wait([self._move])

    async def forget(self, resident: Resident) -> None:
        """Drops a model that nobody uses or waits for. pre: no move is under way."""
        name = resident.name
        del self._schedule.models[name], self.recipes[name]
        self._schedule.hints = [hint for hint in self._schedule.hints if hint is not resident]
        self._built.pop(name, None)
        try:
            await self._in_thread(lambda: self._mover.give_up(name))
        finally:  # also where the caller left: there is room for others
            self.dispatch()

    def refuse_all(self, error: Exception) -> None:
        """Ends all waiting with an error."""
        self._schedule.hints.clear()
        for waiter in list(self._schedule.waiting):
            self._schedule.waiting.remove(waiter)
            self._answer(waiter, error)

    def shutdown(self) -> None:
        """Ends the thread. pre: no move is under way."""
        self._thread.shutdown()

    def _start(self, step: Step) -> None:
        is_new = step.model.state is ModelState.NEW
        for model in (step.model, *step.victims):
            model.state = ModelState.MOVING
        carried = self._carry_out(step, self._schedule.room_beside(step) if is_new else None)
        self._move = asyncio.get_running_loop().create_task(carried)

    async def _carry_out(self, step: Step, room: Room | None) -> None:
        """Builds into this room, or exchanges where there is none given."""
        started = time.perf_counter()
        leaving = [victim.name for victim in step.victims]
        name = step.model.name
        error: Exception | None = None
        try:
            if room is None:
                await self._in_thread(lambda: self._mover.exchange(leaving, [name]))
            else:
                recipe = self.recipes[name]
                self._built[name] = await self._in_thread(
                    lambda: self._mover.build(recipe, leaving, room)
                )
        except Exception as raised:  # noqa: BLE001 - told to those who wait
            error = raised
        self.seconds += time.perf_counter() - started
        self.moves += error is None
        self.failures += error is not None
        self._move = None
        self._settle(step, error)
        self.dispatch()

    def _settle(self, step: Step, error: Exception | None) -> None:
        """Books what a move left, well or not, and answers those who wait for it."""
        for model in (step.model, *step.victims):
            self._book(model)
        if step.model in self._schedule.hints:
            self._schedule.hints.remove(step.model)
        if error is not None:
            _log.warning("model %r did not come\n%s", step.model.name, traced(error))
            waiting = [one for one in self._schedule.waiting if one.model is step.model]
            for waiter in waiting:
                self._schedule.waiting.remove(waiter)
                self._answer(waiter, error)
        elif step.model.is_awake:
            for waiter in self._schedule.serve_arrived(step.model):
                self._answer(waiter)

    def _book(self, model: Resident) -> None:
        model.bytes, model.mapped_bytes = measure(model.name)
        if model.name not in self._built:
            model.state = ModelState.NEW
        else:
            awake = model.mapped_bytes == model.bytes
            model.state = ModelState.AWAKE if awake else ModelState.ASLEEP

    def _refuse_first(self, error: Exception) -> None:
        model = self._schedule.first_waiting()
        for waiter in [one for one in self._schedule.waiting if one.model is model]:
            self._schedule.waiting.remove(waiter)
            self._answer(waiter, error)

    def _answer(self, waiter: Waiter, error: Exception | None = None) -> None:
        answer = self._answers.pop(waiter)
        if answer.done():  # cancelled a moment ago; the waiter's own task goes on from there
            waiter.model.users -= error is None
        elif error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(self._built[waiter.model.name])

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await in_thread(self._thread, work)
