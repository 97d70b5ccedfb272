"""Which errors can a controller raise, and what does each leave behind?"""

from __future__ import annotations

from cumem.errors import CumemError
from cumem.serving.states import State


class NotServingError(CumemError):
    """A request was refused: not all memory is awake, or too many wait. Nothing was run.

    Attributes:
        state: the state of the engine.
        retry_after: seconds after which it is worth to ask again: what the last wake took,
            or, where too many wait, the last request.
    """

    def __init__(self, message: str, state: State, retry_after: float) -> None:
        super().__init__(message)
        self.state = state
        self.retry_after = retry_after


class RequestAbortedError(CumemError):
    """A request was ended by ``sleep(mode="abort")``. What it had done is lost."""


class TransitionTimeoutError(CumemError, TimeoutError):
    """A drain took too long: nothing was put to sleep. A wake did: it goes on."""


class TransitionCancelledError(CumemError):
    """A drain was cancelled. Nothing was put to sleep; requests are served."""
