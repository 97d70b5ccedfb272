"""An application that has mounted the router, and who talks to it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from serving_support import Engine, run

import cumem

httpx = pytest.importorskip("httpx", reason="needs httpx, of the test extra")
pytest.importorskip("starlette", reason="needs Starlette, of the serve extra")
pytest.importorskip("prometheus_client", reason="needs prometheus_client, of the serve extra")

from starlette.applications import Starlette  # noqa: E402 - where it is installed
from starlette.routing import Mount  # noqa: E402

TAGS = ["kv_cache", "weights"]


class Client:
    """An application that has mounted the router, and who talks to it."""

    def __init__(self, engine: Engine, **router: Any) -> None:
        self.engine = engine
        app = Starlette(
            routes=[Mount("/engine", cumem.serving.router(engine.controller, **router))]
        )
        transport = httpx.ASGITransport(app)
        self._client = httpx.AsyncClient(transport=transport, base_url="http://test/engine")

    async def get(self, path: str, **options: Any) -> Any:
        return await self._client.get(path, **options)

    async def post(self, path: str, **options: Any) -> Any:
        return await self._client.post(path, **options)


def over_http(
    test: Callable[[Client], Coroutine[Any, Any, None]], *, token: str | None = None, **options: Any
) -> None:
    import cumem.serving  # noqa: F401 - the router is made of it

    run(lambda engine: test(Client(engine, token=token)), **options)
