"""What has an engine been through, and who is told of it?"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from cumem._text import traced
from cumem.errors import BusyError
from cumem.serving.change import Change, Report
from cumem.serving.errors import TransitionCancelledError, TransitionTimeoutError
from cumem.serving.states import Kind, State, Transition

_log = logging.getLogger("cumem")

# What a caller brings about by its own doing needs no traceback.
_ORDINARY = (
    BusyError,
    TransitionCancelledError,
    TransitionTimeoutError,
    asyncio.CancelledError,
)


class Journal:
    """The past transitions of one engine, oldest first, and who observes them."""

    def __init__(self, length: int) -> None:
        self.entries: deque[Transition] = deque(maxlen=length)
        self.observers: list[Callable[[Transition], object]] = []

    @property
    def wake_seconds(self) -> float:
        """How long the last wake took; 1 where there was none."""
        woken = [item for item in self.entries if item.kind is Kind.WAKE_UP and item.report]
        return woken[-1].seconds if woken else 1.0

    def add(
        self,
        change: Change,
        outcome: Report | BaseException | None,
        state: State,
        asleep: frozenset[str],
    ) -> None:
        """Books a transition that is over; the log gets the traceback of one that failed."""
        error = outcome if isinstance(outcome, BaseException) else None
        transition = Transition(
            kind=change.kind,
            started=change.started,
            drain_seconds=change.drained - change.began,
            seconds=time.perf_counter() - change.drained,
            state=state,
            asleep=asleep,
            report=None if isinstance(outcome, BaseException) else outcome,
            error=type(error).__name__ if error is not None else None,
            message=str(error) if error is not None else "",
        )
        self.entries.append(transition)
        if error is not None and not isinstance(error, _ORDINARY):
            _log.error("%s failed\n%s", change.kind.value, traced(error))
        self._tell(transition)

    def _tell(self, transition: Transition) -> None:
        for observer in list(self.observers):
            try:
                observer(transition)
            except Exception:  # noqa: BLE001 - logged: the memory has moved all the same
                _log.exception("an observer of transitions failed")
