"""Asks for a password, by HTTP's Basic scheme, which browsers and programs know. Independent of the page.

The password crosses the network as it is: outside loopback, put the page behind something that speaks TLS."""

from __future__ import annotations

import binascii
import secrets
import time
from base64 import b64decode
from collections import OrderedDict
from collections.abc import Callable

from outrider.app.page.guard.asgi import Application, Receive, Scope, Send, headers, refuse

_OPEN = "/gradio_api/startup-events"  # Gradio asks it once when it opens the page; it tells nothing
_TRIES, _PERIOD, _ADDRESSES = 10, 60.0, 1000


class Password:
    """ASGI middleware: a request has the password, whatever its user name. An address with ten wrong passwords in a
    minute waits until the minute is over."""

    def __init__(self, app: Application, password: str, now: Callable[[], float] = time.monotonic) -> None:
        self.app, self.now = app, now
        self._password = password.encode()
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()  # times of wrong passwords, by address

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket") or scope["path"] == _OPEN:
            await self.app(scope, receive, send)
            return
        given = headers(scope).get(b"authorization")
        address = str((scope.get("client") or ["unknown"])[0])
        recent = [at for at in self._wrong.get(address, []) if self.now() - at < _PERIOD]
        if given is not None and len(recent) >= _TRIES:
            await refuse(scope, send, 429, "Too many wrong passwords; wait a minute.", {"retry-after": "60"})
        elif given is not None and secrets.compare_digest(_password(given), self._password):
            await self.app(scope, receive, send)
        else:
            if given is not None:
                self._wrong[address] = [*recent, self.now()]
                self._wrong.move_to_end(address)
                if len(self._wrong) > _ADDRESSES:
                    self._wrong.popitem(last=False)
            ask = {"www-authenticate": 'Basic realm="Outrider", charset="UTF-8"'}
            await refuse(scope, send, 401, "This page needs a password.", ask)


def _password(given: str) -> bytes:
    """The password in an Authorization header; empty if there is none."""
    scheme, _, encoded = given.partition(" ")
    try:
        return b64decode(encoded.strip(), validate=True).partition(b":")[2] if scheme.lower() == "basic" else b""
    except (binascii.Error, ValueError):
        return b""
