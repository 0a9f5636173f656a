"""Types and plain replies of ASGI, for the layers of the guard."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Scope, Receive, Send], Awaitable[None]]


def headers(scope: Scope) -> dict[bytes, str]:
    """The request's headers. Of repeated ones, the values are joined by commas."""
    result: dict[bytes, str] = {}
    for name, value in scope["headers"]:
        text = value.decode("latin-1")
        result[name] = f"{result[name]},{text}" if name in result else text
    return result


async def refuse(scope: Scope, send: Send, status: int, reason: str, more: dict[str, str] | None = None) -> None:
    """Answer a request with a status and one line, or close a websocket."""
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    lines = {"content-type": "text/plain; charset=utf-8", **(more or {})}
    encoded = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in lines.items()]
    await send({"type": "http.response.start", "status": status, "headers": encoded})
    await send({"type": "http.response.body", "body": f"{reason}\n".encode()})
