"""Which requests run, which wait for a wake or their turn, and when has the last one ended?

Everything here belongs to one event loop; only :attr:`Request.aborted` is read by
other threads.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor
from functools import partial
from typing import Any, TypeVar

from cumem._text import raised
from cumem.serving.errors import RequestAbortedError

_T = TypeVar("_T")

_A_FUTURES_OWN = (StopIteration, CancelledError)

ABORTED = "the request was ended, because the engine goes to sleep with mode='abort'"


class Request:
    """One request, from its admission to its end."""

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self._aborted = threading.Event()
        self._cancels = 0

    @property
    def aborted(self) -> bool:
        """Is it to end as soon as it can? Safe from any thread; long work should ask."""
        return self._aborted.is_set()

    async def run(self, function: Callable[..., _T], *arguments: Any) -> _T:
        """Runs blocking work in a thread; returns or raises what it does.

        A request that is cancelled meanwhile ends when the work has ended, not before:
        nothing of it is left that could touch memory. The work may look at
        :attr:`aborted` to end early.

        Raises:
            RequestAbortedError: the request is aborted; nothing was run.
        """
        if self.aborted:
            raise RequestAbortedError(ABORTED)
        return await in_thread(None, partial(function, *arguments))

    def abort(self) -> None:
        """Cancels the task; the admission turns that into :class:`RequestAbortedError`."""
        if not self.aborted:
            self._aborted.set()
            self._cancels += 1
            self.task.cancel()

    async def absorb(self, error: BaseException | None) -> BaseException | None:
        """Takes our own cancellation back, also one that has not reached the task yet.

        Returns what is to be raised in the place of ``error``; None: nothing.
        """
        if not self._cancels or asyncio.current_task() is not self.task:
            return error
        cancelled = isinstance(error, asyncio.CancelledError)
        if not cancelled:
            cancelled = await _absorb_pending()
        self._cancels = 0
        uncancel = getattr(self.task, "uncancel", None)  # Python 3.11
        if uncancel is not None and uncancel() > 0 and cancelled:  # somebody else's, too
            return error if isinstance(error, asyncio.CancelledError) else asyncio.CancelledError()
        return RequestAbortedError(ABORTED) if isinstance(error, asyncio.CancelledError) else error


def contained(function: Callable[[], _T]) -> Callable[[], _T]:
    """The same function, whose errors are all such that a future can carry them.

    A future takes a StopIteration for its own, a CancelledError for one of its task, and a
    SystemExit or KeyboardInterrupt for the end of the event loop.
    """

    def call() -> _T:
        try:
            return function()
        except BaseException as error:
            if isinstance(error, Exception) and not isinstance(error, _A_FUTURES_OWN):
                raise
            raise RuntimeError(f"the function raised {raised(error)}") from error

    return call


async def in_thread(executor: Executor | None, function: Callable[[], _T]) -> _T:
    """Runs ``function`` in a thread, and ends when it has ended, also when cancelled."""
    work = asyncio.get_running_loop().run_in_executor(executor, contained(function))
    try:
        await asyncio.wait([work])
    except asyncio.CancelledError:
        await _ended(work)
        raise
    return work.result()


async def _ended(work: asyncio.Future[Any]) -> None:
    """Waits for the end of ``work``, however often this task is cancelled meanwhile."""
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            continue
    if not work.cancelled():
        work.exception()  # seen: who would have got it is cancelled


async def _absorb_pending() -> bool:
    """A cancellation arrives at the next step of its task: this is one. Was there any?"""
    try:
        await asyncio.sleep(0)
    except asyncio.CancelledError:
        return True
    return False


class RequestBook:
    """The requests in flight, those that wait, and who waits for none to be left.

    Args:
        most: so many are in flight at once; None: no limit.

    Attributes:
        last_seconds: how long the last request that has ended was in flight; 1 before that.
    """

    def __init__(self, most: int | None = None) -> None:
        self.last_seconds = 1.0
        self._most = most
        self._in_flight: dict[Request, float] = {}  # with the time of its admission
        self._waiting: dict[Request, asyncio.Future[None]] = {}
        self._drains: set[asyncio.Future[None]] = set()

    @property
    def in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def runs_here(self) -> bool:
        """Is the current task a request in flight?"""
        task = asyncio.current_task()
        return any(request.task is task for request in self._in_flight)

    def has_room(self) -> bool:
        """May another request run now, as far as their number goes?"""
        return self._most is None or len(self._in_flight) < self._most

    def admit(self, request: Request) -> None:
        self._in_flight[request] = time.monotonic()

    def wait(self, request: Request) -> asyncio.Future[None]:
        """Puts a request into the queue; the future ends when it is admitted or refused."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[request] = future
        return future

    def leave(self, request: Request) -> None:
        """The request is over, wherever it was."""
        if (admitted := self._in_flight.pop(request, None)) is not None:
            self.last_seconds = time.monotonic() - admitted
        self._waiting.pop(request, None)
        if not self._in_flight:
            self._tell_drains()

    def admit_waiting(self) -> None:
        """Those who wait are in flight, the first first, before anything else can happen."""
        while self._waiting and self.has_room():
            request = next(iter(self._waiting))
            future = self._waiting.pop(request)
            if not future.done():
                self.admit(request)
                future.set_result(None)

    def refuse_waiting(self, refusal: Callable[[], BaseException]) -> None:
        """All that wait are told; each gets an error of its own."""
        waiting, self._waiting = self._waiting, {}
        for future in waiting.values():
            if not future.done():
                future.set_exception(refusal())

    def abort_all(self) -> None:
        for request in list(self._in_flight):
            request.abort()

    def drained(self) -> asyncio.Future[None]:
        """Done when no request is in flight."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._in_flight:
            self._drains.add(future)
            future.add_done_callback(self._drains.discard)
        else:
            future.set_result(None)
        return future

    def _tell_drains(self) -> None:
        for future in list(self._drains):
            if not future.done():
                future.set_result(None)
