"""How is an engine controlled over HTTP?

An ASGI app for ``app.mount``: nothing listens unless an application mounts it. No route
changes memory by GET, and every answer says what was done.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable

try:
    from prometheus_client import CONTENT_TYPE_LATEST
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route
    from starlette.types import ASGIApp, Receive, Scope, Send

    from cumem.serving.metrics import Metrics
except ImportError as error:
    raise ImportError(
        f"cumem.serving.router needs Starlette and prometheus_client ({error}): "
        'pip install "cumem[serve]"'
    ) from error

import cumem
from cumem._arguments import instance
from cumem.serving import answers
from cumem.serving.controller import SleepController
from cumem.serving.requesting import Query, json_body, refuse_body, tags_in

Handler = Callable[[Request], Awaitable[Response]]


def router(controller: SleepController, *, token: str | None = None) -> Starlette:
    """Makes an ASGI app that controls an engine; mount it in a Starlette or FastAPI app.

    ``POST /sleep``, ``POST /wake_up``, ``GET /is_sleeping``, ``GET /memory``,
    ``GET /metrics``, ``GET /transitions``, and for clients of SGLang
    ``POST /release_memory_occupation`` and ``POST /resume_memory_occupation``.

    Args:
        controller: the engine; the app must run on the controller's event loop.
        token: when given, every route needs ``Authorization: Bearer <token>``.

    Raises:
        ValueError: an empty token. TypeError: not a string, or not a controller.
    """
    instance("controller", controller, SleepController, "a SleepController")
    if token is not None:
        instance("token", token, str, "a string or None")
    if token is not None and not token.strip():
        raise ValueError("an empty token protects nothing; give one, or None")
    guards = [] if token is None else [Middleware(RequireToken, token=token)]
    return Starlette(routes=_Routes(controller).all(), middleware=guards)


class RequireToken:
    """Answers 401 unless a request carries the token; compared in constant time."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._expected = f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._carries_token(scope):
            body = {"error": "this needs 'Authorization: Bearer <token>'", "kind": "Unauthorized"}
            answer = JSONResponse(body, 401, {"WWW-Authenticate": "Bearer"})
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _carries_token(self, scope: Scope) -> bool:
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


class _Routes:
    """The handlers of one controller."""

    def __init__(self, controller: SleepController) -> None:
        self._controller = controller
        self._metrics = Metrics(controller)

    def all(self) -> list[Route]:
        posts: dict[str, Handler] = {
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/release_memory_occupation": self._release,
            "/resume_memory_occupation": self._resume,
        }
        return [
            *(
                Route(path, self._answered(handler), methods=["POST"])
                for path, handler in posts.items()
            ),
            Route("/is_sleeping", self._is_sleeping),
            Route("/transitions", self._transitions),
            Route("/memory", self._memory),
            Route("/metrics", self._read_metrics),
        ]

    def _answered(self, handler: Handler) -> Handler:
        """Errors of ours become answers; any other is the application's to handle."""

        async def answered(request: Request) -> Response:
            try:
                return await handler(request)
            except (cumem.CumemError, ValueError, TypeError) as error:
                return answers.refused(self._controller, error)

        return answered

    async def _sleep(self, request: Request) -> Response:
        query = Query(request, ("level", "mode", "tags", "offload_tags", "timeout"))
        await refuse_body(request)
        report = await self._controller.sleep(
            query.whole("level", 1),
            tags=query.tags(),
            offload_tags=query.tags("offload_tags"),
            mode=query.text("mode", "wait"),
            timeout=query.seconds("timeout"),
        )
        return answers.done(self._controller, report)

    async def _wake_up(self, request: Request) -> Response:
        query = Query(request, ("tags", "timeout"))
        await refuse_body(request)
        timeout = query.seconds("timeout")
        report = await self._controller.wake_up(query.tags(), timeout=timeout)
        return answers.done(self._controller, report)

    async def _release(self, request: Request) -> Response:
        tags = tags_in(await json_body(request, ("tags",)))
        return answers.done(self._controller, await self._controller.sleep(tags=tags))

    async def _resume(self, request: Request) -> Response:
        tags = tags_in(await json_body(request, ("tags",)))
        return answers.done(self._controller, await self._controller.wake_up(tags))

    async def _is_sleeping(self, _request: Request) -> Response:
        return JSONResponse(answers.sleeping(self._controller))

    async def _transitions(self, _request: Request) -> Response:
        return JSONResponse({"transitions": answers.plain(self._controller.history)})

    # These ask the driver; functions that are no coroutines run in a thread.

    def _memory(self, _request: Request) -> Response:
        requests = {name: getattr(self._controller, name) for name in _REQUESTS}
        stats = answers.plain(cumem.stats())
        sleeping = answers.sleeping(self._controller)
        return JSONResponse({**stats, "requests": requests, "sleeping": sleeping})

    def _read_metrics(self, _request: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)


_REQUESTS = ("in_flight", "waiting", "refused")
