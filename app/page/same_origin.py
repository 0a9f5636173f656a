"""Admits requests that a browser makes for the page itself, and those of programs on this machine.

A page on loopback is within reach of every site that its user visits: by a name that is made to point to 127.0.0.1, or
by requests across origins. Independent of the page."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any
from urllib.parse import urlsplit

Scope = MutableMapping[str, Any]
Application = Callable[[Scope, Any, Callable[[Any], Awaitable[None]]], Awaitable[None]]

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class SameOrigin:
    """ASGI middleware: the Host is one of `hosts`, and an Origin, if the request has one, is that host."""

    def __init__(self, app: Application, hosts: frozenset[str] = LOOPBACK) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Any, send: Callable[[Any], Awaitable[None]]) -> None:
        if scope["type"] not in ("http", "websocket") or self._admits(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"text/plain; charset=utf-8")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"This page answers only to its own address.\n"})

    def _admits(self, scope: Scope) -> bool:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin")
        try:
            known = urlsplit(f"//{host}").hostname in self.hosts
            return known and (origin is None or urlsplit(origin).netloc == host)
        except ValueError:
            return False
