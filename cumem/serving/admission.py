"""How does a request get in and out?"""

from __future__ import annotations

import asyncio
from types import TracebackType

from cumem.serving.lifecycle import Lifecycle
from cumem.serving.requests import Request


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
            await self._life.admit(request)
        except asyncio.CancelledError as error:
            # An abort may come between its admission and the next step of its task.
            raised = await request.absorb(error)
            if raised is error or raised is None:
                raise
            raise raised from error
        self._request = request
        return request

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
