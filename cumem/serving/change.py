"""What is known of a transition while it is under way?"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from typing import Any

from cumem.reports import SleepPlan, SleepReport, WakeReport
from cumem.serving.errors import TransitionCancelledError, TransitionTimeoutError
from cumem.serving.requests import RequestBook
from cumem.serving.states import Kind

Report = SleepReport | WakeReport


class Change:
    """A transition under way; whoever asks for the same one shares it.

    Attributes:
        kind: which transition.
        key: its arguments; equal for calls that share it.
        work: moves the memory; called in a worker thread.
        plan: what ``work`` would do, for a sleep.
        drain_seconds: most seconds to wait for requests; None: no limit.
        staged: does it wake some tags only?
        committed: it can no longer be cancelled.
    """

    def __init__(
        self,
        kind: Kind,
        key: Hashable,
        work: Callable[[], Report],
        *,
        plan: Callable[[], SleepPlan] | None = None,
        drain_seconds: float | None = None,
        staged: bool = False,
    ) -> None:
        self.kind, self.key, self.work, self.plan = kind, key, work, plan
        self.drain_seconds, self.staged = drain_seconds, staged
        self.committed = kind is Kind.WAKE_UP
        self.started, self.began = time.time(), time.perf_counter()
        self.drained = self.began  # when the requests had ended
        self._cancelled: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._task: asyncio.Task[Report] | None = None

    def start(self, task: asyncio.Task[Report]) -> None:
        self._task = task
        task.add_done_callback(_seen)

    def cancel(self) -> bool:
        """Gives it up where requests are still waited for; False: it is too late."""
        if self.committed:
            return False
        if not self._cancelled.done():
            self._cancelled.set_result(None)
        return True

    async def over(self, timeout: float | None = None) -> bool:
        """Waits for its end, well or not; False: it is not over after ``timeout`` seconds."""
        assert self._task is not None
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        return bool(done)

    async def outcome(self) -> Report:
        """Returns or raises what it did. A caller that is cancelled leaves it alone."""
        await self.over()
        assert self._task is not None
        return self._task.result()

    async def drain(self, book: RequestBook) -> None:
        """Waits until no request is in flight; from then on it cannot be cancelled.

        Raises:
            TransitionCancelledError, TransitionTimeoutError: nothing was changed.
        """
        drained = book.drained()
        await asyncio.wait(
            [drained, self._cancelled],
            timeout=self.drain_seconds,
            return_when=asyncio.FIRST_COMPLETED,
        )
        if self._cancelled.done():
            raise TransitionCancelledError(
                "sleep: it was cancelled while requests were running. Nothing was put to sleep."
            )
        if not drained.done():
            raise TransitionTimeoutError(
                f"sleep: {book.in_flight} request(s) were still running after "
                f"{self.drain_seconds} s. Nothing was put to sleep and requests are served "
                "again; repeat it with a longer timeout, or with mode='abort'."
            )
        self.committed, self.drained = True, time.perf_counter()


def _seen(task: asyncio.Task[Any]) -> None:
    """A failure is in the history also when every caller has left."""
    if not task.cancelled():
        task.exception()
