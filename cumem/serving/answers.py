"""Which status and body does an HTTP client get?"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any

import torch
from starlette.responses import JSONResponse

from cumem.errors import AsleepError, BusyError, CumemError, HostOutOfMemoryError
from cumem.serving.controller import SleepController
from cumem.serving.errors import (
    NotServingError,
    RequestAbortedError,
    TransitionCancelledError,
    TransitionTimeoutError,
)

# The first that fits counts.
_STATUSES: tuple[tuple[type[Exception], int], ...] = (
    (NotServingError, 503),
    (AsleepError, 503),
    (RequestAbortedError, 503),
    (BusyError, 409),
    (TransitionCancelledError, 409),
    (TransitionTimeoutError, 409),
    (torch.OutOfMemoryError, 507),  # ours of the device, and torch's own in a text
    (HostOutOfMemoryError, 507),
    (CumemError, 500),
    (ValueError, 400),
    (TypeError, 400),
)


def status_of(error: Exception) -> int:
    """The HTTP status of an error of ours, or of torch."""
    return next((status for kind, status in _STATUSES if isinstance(error, kind)), 500)


def done(controller: SleepController, report: Any) -> JSONResponse:
    """What a transition did, and what is asleep now."""
    return JSONResponse({"did": str(report), "report": plain(report), **sleeping(controller)})


def sleeping(controller: SleepController) -> dict[str, Any]:
    """``{"is_sleeping": ..., "tags": [...], "state": ...}``"""
    tags = sorted(controller.sleeping_tags)
    return {"is_sleeping": bool(tags), "tags": tags, "state": controller.state.value}


def refused(
    controller: SleepController, error: Exception, status: int | None = None
) -> JSONResponse:
    """An error as an answer; 503 says when to try again, as the error or the last wake does."""
    status = status_of(error) if status is None else status
    body = {"error": str(error), "kind": type(error).__name__, **sleeping(controller)}
    headers = {}
    if status == 503:
        seconds = (
            error.retry_after if isinstance(error, NotServingError) else controller.retry_after
        )
        headers["Retry-After"] = str(max(1, math.ceil(seconds)))
    return JSONResponse(body, status, headers)


def plain(value: Any) -> Any:
    """Dataclasses, sets and enums as JSON has them; sets sorted."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)
        }
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value
