"""Admits requests that a browser makes for the page itself, and those of programs that name the page's address.

A page on loopback is within reach of every site that its user visits: by a name that is made to point to 127.0.0.1, or
by requests across origins. Independent of the page."""

from __future__ import annotations

from urllib.parse import urlsplit

from outrider.app.page.guard.asgi import Application, Receive, Scope, Send, headers, refuse

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})


class SameOrigin:
    """ASGI middleware: the Host is one of `hosts`; an Origin, if the request has one, is that host; and no other site
    embeds the page or its files."""

    def __init__(self, app: Application, hosts: frozenset[str] = LOOPBACK) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or self._admits(scope):
            await self.app(scope, receive, send)
        else:
            await refuse(scope, send, 403, "This page answers only to its own address.")

    def _admits(self, scope: Scope) -> bool:
        given = headers(scope)
        host, origin = given.get(b"host", ""), given.get(b"origin")
        link = scope.get("method") == "GET" and given.get(b"sec-fetch-dest") == "document"
        if given.get(b"sec-fetch-site") in ("cross-site", "same-site") and not link:
            return False
        try:
            named = urlsplit(f"//{host}")
            known = named.hostname in self.hosts and (named.port is None or named.port > 0)  # `port` refuses other text
            return known and (origin is None or urlsplit(origin).netloc == host)
        except ValueError:
            return False
