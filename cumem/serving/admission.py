"""How does a request get in and out?"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from cumem.serving.lifecycle import Lifecycle
from cumem.serving.requests import Request
from cumem.serving.states import Kind, State


class Admission:
    """One use of :meth:`SleepController.request`."""

    def __init__(self, life: Lifecycle) -> None:
        self._life = life
        self._request: Request | None = None

    async def __aenter__(self) -> Request:
        task = asyncio.current_task()
        assert task is not None
        request = Request(task)
        try:
            await self._admitted(request)
        except asyncio.CancelledError as error:
            # An abort may come between its admission and the next step of its task.
            raised = await request.absorb(error)
            if raised is error or raised is None:
                raise
            raise raised from error
        self._request = request
        return request

    async def _admitted(self, request: Request) -> None:
        """Returns when the request is in flight; raises NotServingError."""
        future, since = self._life.admit(request), time.perf_counter()
        if future is None:
            return
        try:
            await self._settled(future, since)
        except asyncio.CancelledError:
            self._life.leave(request)
            raise
        finally:
            if future.done():
                future.exception()  # seen, also where the request was cancelled
        if not future.done():
            self._life.leave(request)
            seconds = self._life.options.request_seconds
            raise self._life.refusal(f"it was not awake within {seconds} s")
        future.result()

    async def _settled(self, future: asyncio.Future[None], since: float) -> None:
        """Waits until it is done, or the engine has been away for too long."""
        while not future.done():
            left = self._patience(since)
            if left is not None and left <= 0:
                return
            await asyncio.wait([future], timeout=left)

    def _patience(self, since: float) -> float | None:
        """Seconds it may still wait for a wake.

        Its turn does not count, nor a drain that found it waiting: one that is given up after
        as long would otherwise have cost everybody who waits.
        """
        life, change = self._life, self._life.change
        seconds = life.options.request_seconds
        was_there = change is not None and change.kind is Kind.SLEEP and since < change.began
        if seconds is None or was_there or life.state is State.AWAKE:
            return seconds
        return seconds - (time.perf_counter() - max(since, life.left))

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._request is not None
        try:
            raised = await self._request.absorb(error)
        finally:
            self._life.leave(self._request)
        if raised is not None and raised is not error:
            raise raised from error
