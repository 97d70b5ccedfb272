"""How does a client get a text?

``POST /generate`` with ``{"prompt": ..., "max_tokens": 64, "stream": false}``. More tokens
than the KV cache has room for are refused; without ``max_tokens`` there are 64 of them, or as
many as it has room for. A stream has
a JSON object a line: pieces of text, then a last line that says how it ended.
"""

from __future__ import annotations

import json
import logging
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from typing import Any

import torch
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from cumem.errors import CumemError
from cumem.serving import answers
from cumem.serving.controller import SleepController
from cumem.serving.engine import TextEngine
from cumem.serving.growing_text import GrowingText
from cumem.serving.requesting import BadRequestError, json_body
from cumem.serving.requests import Request

_TOKENS = 64  # when the client does not say
_NAMES = ("prompt", "max_tokens", "stream")

_log = logging.getLogger("cumem")

Decode = Callable[[Sequence[int]], str]


class Generate:
    """The ASGI endpoint. Request and work are one task, which a sleep can abort.

    Raises:
        ValueError: the controller lets several requests run at once, and the engine makes
            one text at a time.
    """

    def __init__(self, controller: SleepController, engine: TextEngine) -> None:
        if controller.options.most_in_flight != 1:
            raise ValueError("texts are made one at a time: give the controller most_in_flight=1")
        self._controller, self._engine = controller, engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = HttpRequest(scope, receive)
        answer = _Answer(self._controller, scope, receive, send)
        try:
            wanted = _Wanted(self._engine, await json_body(request, _NAMES))
        except ClientDisconnect:
            return
        except ValueError as error:
            await answer.refuse(error)
            return
        try:
            await self._serve(answer, request, wanted)
        except torch.OutOfMemoryError as error:
            _let_go(error)
            await answer.refuse(error)
        except CumemError as error:
            await answer.refuse(error)
        except Exception as error:  # told like any other, and with its traceback to the log
            await answer.refuse(error, status=500)
            raise

    async def _serve(self, answer: _Answer, request: HttpRequest, wanted: _Wanted) -> None:
        async with (
            self._controller.request() as admitted,
            aclosing(self._tokens(admitted, request, wanted)) as tokens,
        ):
            await answer.run(wanted, tokens, self._engine.model.decode)

    async def _tokens(
        self, admitted: Request, request: HttpRequest, wanted: _Wanted
    ) -> AsyncGenerator[int, None]:
        """The tokens of the text, until it ends or nobody listens any more."""
        tokens = self._engine.generate(wanted.tokens, wanted.most)
        while not await request.is_disconnected():
            if (token := await admitted.run(next, tokens, None)) is None:
                return
            yield token


def _let_go(error: torch.OutOfMemoryError) -> None:
    """Frees what the text had made. Call it before anything else can run.

    The traceback holds every frame of the model with its activations, and a frame of our own
    holds the traceback: until the collector came, the next text would find no memory either.
    """
    traceback.clear_frames(error.__traceback__)
    _log.warning("a text found no device memory: %s", error)


class _Wanted:
    """What the client asks for, checked."""

    def __init__(self, engine: TextEngine, body: dict[str, Any]) -> None:
        prompt, most = body.get("prompt"), body.get("max_tokens")
        self.stream = body.get("stream", False)
        if not isinstance(prompt, str) or not prompt:
            raise BadRequestError("prompt must be a text that is not empty")
        if most is not None and (type(most) is not int or most < 1):
            raise BadRequestError("max_tokens must be a whole number, 1 or more")
        if type(self.stream) is not bool:
            raise BadRequestError("stream must be true or false")
        self.tokens = engine.model.encode(prompt)
        engine.check(self.tokens)
        room = engine.most_tokens - len(self.tokens)
        if most is not None and most > room:
            raise BadRequestError(
                f"max_tokens is {most}, and after a prompt of {len(self.tokens)} tokens the KV "
                f"cache of {engine.most_tokens} has room for {room}"
            )
        self.most = min(_TOKENS, room) if most is None else most


class _Answer:
    """The answer to one client, begun when there is something to say."""

    def __init__(
        self, controller: SleepController, scope: Scope, receive: Receive, send: Send
    ) -> None:
        self._controller = controller
        self._scope, self._receive, self._send = scope, receive, send
        self._streaming = False

    async def run(self, wanted: _Wanted, tokens: AsyncIterator[int], decode: Decode) -> None:
        if wanted.stream:
            await self._stream(tokens, GrowingText(decode))
        else:
            text = decode([token async for token in tokens])
            await self._whole(JSONResponse({"text": text}))

    async def _stream(self, tokens: AsyncIterator[int], text: GrowingText) -> None:
        async for token in tokens:
            if piece := text.add(token):
                await self._line({"text": piece})
        if rest := text.rest():
            await self._line({"text": rest})
        await self._line({"done": True}, last=True)

    async def refuse(self, error: Exception, *, status: int | None = None) -> None:
        """As a status, None: the one of the error; in the last line where one has been sent."""
        if self._streaming:
            kind = type(error).__name__
            await self._line({"done": False, "error": str(error), "kind": kind}, last=True)
        else:
            await self._whole(answers.refused(self._controller, error, status))

    async def _whole(self, response: JSONResponse) -> None:
        await response(self._scope, self._receive, self._send)

    async def _line(self, content: dict[str, Any], *, last: bool = False) -> None:
        if not self._streaming:
            self._streaming = True
            headers = [(b"content-type", b"application/x-ndjson"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = json.dumps(content).encode() + b"\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": not last})
