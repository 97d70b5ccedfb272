"""How does a serving process sleep and wake? One engine, also over HTTP, or several models.

The controller needs nothing but torch; :func:`router` needs Starlette and
prometheus_client (``pip install "cumem[serve]"``), which are imported when it is asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cumem.serving.controller import SleepController
from cumem.serving.errors import (
    NotServingError,
    RequestAbortedError,
    TransitionCancelledError,
    TransitionTimeoutError,
)
from cumem.serving.host import HostStatus, ModelHost, ModelStatus
from cumem.serving.requests import Request
from cumem.serving.states import Kind, Mode, ServingOptions, State, Transition

if TYPE_CHECKING:
    from cumem.serving.routing import router

__all__ = [
    "HostStatus",
    "Kind",
    "Mode",
    "ModelHost",
    "ModelStatus",
    "NotServingError",
    "Request",
    "RequestAbortedError",
    "ServingOptions",
    "SleepController",
    "State",
    "Transition",
    "TransitionCancelledError",
    "TransitionTimeoutError",
    "router",
]


def __getattr__(name: str) -> object:
    if name == "router":
        from cumem.serving.routing import router

        return router
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
