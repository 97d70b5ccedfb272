"""Which requests may reach our own server at all?

Its page has buttons, so a page of another site must not press them: by name (a host
name that resolves to this machine) or by a form or script that posts here.
"""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_address
from urllib.parse import urlsplit

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

LOOPBACK = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    """Can only this machine reach ``host``? An unknown name cannot be trusted to be so."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False


class OnlyFrom:
    """Answers 403 unless Host is one of ours, and Origin, where there is one, is the same."""

    def __init__(self, app: ASGIApp, hosts: Iterable[str]) -> None:
        self._app = app
        self._hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (why := self._refusal(scope)):
            body = {"error": why, "kind": "Forbidden"}
            await JSONResponse(body, 403)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _refusal(self, scope: Scope) -> str | None:
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or _name(f"//{hosts[0]}") not in self._hosts:
            return f"Host {hosts} is not a name of this server; --allow-host adds one"
        for name, value in scope["headers"]:
            if name == b"origin" and value.decode("latin-1") != f"{scope['scheme']}://{hosts[0]}":
                return f"Origin {value.decode('latin-1')!r} is another site"
        return None


def _name(url: str) -> str:
    """The host of an address, without port and brackets; empty where it is none."""
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""
