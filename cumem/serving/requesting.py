"""What does an HTTP request ask for? Said before anything is done.

Names that nobody knows are refused: a mistyped ``tags`` would put everything to sleep.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

from starlette.requests import Request

from cumem._text import choices

_MOST_BYTES = 64 << 10  # of a body; a list of tags is far smaller


class BadRequestError(ValueError):
    """The request cannot be understood. Nothing was changed."""


class Query:
    """The query of a request, of known names only."""

    def __init__(self, request: Request, names: Collection[str]) -> None:
        self._query = request.query_params
        for name in self._query:
            if name not in names:
                raise BadRequestError(f"unknown parameter {name!r}; choices: {choices(names)}")

    def tags(self, name: str = "tags") -> list[str] | None:
        """``tags=a&tags=b``; None where there are none."""
        return self._query.getlist(name) or None

    def text(self, name: str, default: str) -> str:
        return self._one(name) or default

    def whole(self, name: str, default: int) -> int:
        text = self._one(name)
        try:
            return default if text is None else int(text)
        except ValueError:
            raise BadRequestError(f"{name} must be a whole number, not {text!r}") from None

    def seconds(self, name: str) -> float | None:
        text = self._one(name)
        try:
            return None if text is None else float(text)
        except ValueError:
            raise BadRequestError(f"{name} must be a number of seconds, not {text!r}") from None

    def _one(self, name: str) -> str | None:
        values = self._query.getlist(name)
        if len(values) > 1:
            raise BadRequestError(f"{name} was given {len(values)} times")
        return values[0] if values else None


async def refuse_body(request: Request) -> None:
    """For routes that read the query only: what is asked for elsewhere must not be passed over."""
    if (await _bounded_body(request)).strip():
        raise BadRequestError("a body is not read here; put parameters into the query (?tags=…)")


async def json_body(request: Request, names: Collection[str]) -> dict[str, Any]:
    """The JSON object in the body, of known names only; an empty body is an empty object."""
    body = await _bounded_body(request)
    if not body.strip():
        return {}
    try:
        found = json.loads(body)
    except (ValueError, RecursionError) as error:  # the latter: brackets in brackets
        raise BadRequestError(f"the body is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise BadRequestError("the body must be a JSON object")
    for name in found:
        if name not in names:
            raise BadRequestError(f"unknown name {name!r}; choices: {choices(names)}")
    return found


def tags_in(body: dict[str, Any]) -> list[str] | None:
    """``{"tags": ["a", "b"]}``; None where there are none."""
    tags = body.get("tags")
    if tags is None:
        return None
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in tags):
        raise BadRequestError("tags must be a list of strings")
    return tags


async def _bounded_body(request: Request) -> bytes:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MOST_BYTES:
            raise BadRequestError(f"the body is larger than {_MOST_BYTES} bytes")
    return bytes(body)
