"""The text server's endpoint over an engine of its own, and who asks it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from serving_support import SECONDS

from cumem.serving import ServingOptions, SleepController
from cumem.serving.engine import TextEngine
from cumem.serving.own_text import OwnText

httpx = pytest.importorskip("httpx", reason="needs httpx, of the test extra")
pytest.importorskip("starlette", reason="needs Starlette, of the serve extra")
pytest.importorskip("uvicorn", reason="needs uvicorn, of the serve extra")

from starlette.applications import Starlette  # noqa: E402 - where it is installed
from starlette.routing import Route  # noqa: E402

from cumem.serving.generating import Generate  # noqa: E402

WORDS = "The weights went to sleep."
SMALL = 1 << 20


@contextmanager
def text_engine() -> Iterator[TextEngine]:
    """A small model with room for 64 tokens."""
    torch.set_num_threads(1)
    made = TextEngine(OwnText(SMALL), 64)
    yield made
    vars(made).clear()  # pytest holds the object longer than its memory may live


class Server:
    def __init__(self, engine: TextEngine, **options: Any) -> None:
        self.engine = engine
        self.controller = SleepController(
            modules=[engine.module], options=ServingOptions(most_in_flight=1, **options)
        )
        self._endpoint = Generate(self.controller, engine)
        app = Starlette(routes=[Route("/generate", self._endpoint, methods=["POST"])])
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://test", timeout=SECONDS
        )

    async def generate(self, **body: Any) -> Any:
        return await self._client.post("/generate", json={"prompt": WORDS, **body})

    async def ask(self, body: dict[str, Any], send: Any, *, leaves: bool = False) -> None:
        """As the web server asks the endpoint, whose errors are raised here."""
        messages = [{"type": "http.request", "body": json.dumps(body).encode()}]
        if leaves:
            messages.append({"type": "http.disconnect"})

        async def receive() -> Any:
            if not messages:
                await asyncio.Event().wait()
            return messages.pop(0)

        await self._endpoint({"type": "http", "method": "POST", "headers": []}, receive, send)


def over_http(
    engine: TextEngine, test: Callable[[Server], Coroutine[Any, Any, None]], **options: Any
) -> None:
    async def whole() -> None:
        server = Server(engine, **options)
        async with server.controller:
            await test(server)

    asyncio.run(asyncio.wait_for(whole(), SECONDS))


def lines(answer: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answer.text.splitlines()]
