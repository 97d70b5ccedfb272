"""How does ``python -m cumem serve`` listen, serve and end?"""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from cumem.serving.controller import SleepController
from cumem.serving.engine import TextEngine
from cumem.serving.generating import Generate
from cumem.serving.local import LOOPBACK, OnlyFrom, is_loopback
from cumem.serving.routing import RequireToken, router
from cumem.serving.states import ServingOptions

_PAGE = Path(__file__).parent / "page.html"
_GRACE_SECONDS = 10  # for streams under way, when the server is told to end


@dataclass(frozen=True)
class Listening:
    """Where the server listens, and whom it answers.

    Attributes:
        host: an address or name of this machine.
        port: 0 takes a free one.
        token: what requests must carry; needed where others can reach ``host``.
        allowed_hosts: further names by which clients may call this server.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    token: str | None = None
    allowed_hosts: tuple[str, ...] = field(default=())

    def __post_init__(self) -> None:
        if not is_loopback(self.host) and self.token is None:
            raise ValueError(
                f"others can reach {self.host!r}, and could put this model to sleep: give "
                "--token-file, or listen on 127.0.0.1"
            )

    @property
    def names(self) -> tuple[str, ...]:
        return (*LOOPBACK, self.host, *self.allowed_hosts)

    def open(self) -> socket.socket:
        """Listens; an address in use is an OSError here, before anything is loaded."""
        try:
            return self._bound()
        except OSError as error:
            why = error.strerror or str(error)
            if error.errno == errno.EADDRINUSE:
                why = "the port is in use; give another --port, or --port 0 for a free one"
            raise OSError(f"cannot listen on port {self.port} of {self.host}: {why}") from error

    def _bound(self) -> socket.socket:
        family, kind, protocol, _, address = socket.getaddrinfo(
            self.host, self.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listening = socket.socket(family, kind, protocol)
        try:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(address)
            listening.listen()
        except BaseException:
            listening.close()
            raise
        return listening


def application(engine: TextEngine, options: ServingOptions, listening: Listening) -> Starlette:
    """The whole app: page, text, and the control routes at the root."""
    options = replace(options, most_in_flight=1)  # the engine makes one text at a time
    controller = SleepController(modules=[engine.module], options=options)
    controller.restore(engine.restore)

    @asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        # Requests are worked on in the loop's executor, one at a time: in one thread, because
        # cuBLAS takes a handle and tens of MiB for each, which no sleep gives back.
        thread = ThreadPoolExecutor(1, thread_name_prefix="cumem-text")
        asyncio.get_running_loop().set_default_executor(thread)
        async with controller:
            yield

    generate: ASGIApp = Generate(controller, engine)
    if listening.token is not None:
        generate = RequireToken(generate, listening.token)
    return Starlette(
        routes=[
            Route("/", _page),
            Route("/generate", generate, methods=["POST"]),
            Mount("/", router(controller, token=listening.token)),
        ],
        middleware=[Middleware(OnlyFrom, hosts=listening.names)],
        lifespan=lifespan,
    )


def serve(
    engine: TextEngine,
    options: ServingOptions,
    listening: Listening,
    opened: socket.socket,
    say: Callable[[str], None],
) -> None:
    """Serves until it is interrupted; memory is left as it is, awake or asleep."""
    config = uvicorn.Config(
        application(engine, options, listening),
        log_level="warning",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )
    say(f"listening on {url_of(opened)}; Ctrl-C ends it")
    with suppress(KeyboardInterrupt):  # raised once more after the server has ended
        uvicorn.Server(config).run(sockets=[opened])
    say("ended")


def url_of(opened: socket.socket) -> str:
    host, port = opened.getsockname()[:2]
    shown = f"[{host}]" if ipaddress.ip_address(host).version == 6 else host
    return f"http://{shown}:{port}/"


def _page(_request: Request) -> Response:
    """The page; nothing of another site may be in it, and it in no other's."""
    nonce = secrets.token_urlsafe(16)
    policy = (
        f"default-src 'none'; connect-src 'self'; img-src data:; script-src 'nonce-{nonce}'; "
        f"style-src 'nonce-{nonce}'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    )
    headers = {"Content-Security-Policy": policy, "Cache-Control": "no-store"}
    return HTMLResponse(_PAGE.read_text().replace("{{nonce}}", nonce), headers=headers)
