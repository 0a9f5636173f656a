"""Puts the recorded race into the page as it is sent, so that it is read before Gradio has built the page over it.

ASGI middleware. The script of the page removes the first view once the same race stands in the page itself.
"""

from __future__ import annotations

import re

from outrider.app.page import theme
from outrider.app.page.guard.asgi import Application, Message, Receive, Scope, Send

_BODY = re.compile(rb"<body\b[^>]*>")
_STYLE = """#or-first { position: absolute; inset: 0; z-index: 9; background: Canvas; color: CanvasText;
padding: 12px 24px; font-family: system-ui, sans-serif; color-scheme: light dark; --border-color-primary: #8886; }
#or-first .or-later { visibility: visible; } #or-first .or-lanes { max-width: 1280px; }"""


def first_view(race: str) -> bytes:
    """The HTML of the first view: the heading and a race."""
    inner = f'<div class="or-head">{theme.HEAD}</div><div class="or-out">{race}</div>'
    style = f"<style>{theme.style()}{_STYLE}</style>"
    return f'<div id="or-first" aria-hidden="true">{style}{inner}</div>'.encode()


class FirstView:
    """Inserts HTML at the beginning of the body of the page."""

    def __init__(self, app: Application, html: bytes) -> None:
        self.app, self.html = app, html

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] != "/":
            await self.app(scope, receive, send)
            return
        start: Message | None = None
        body = b""

        async def sent(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                if any(value.startswith(b"text/html") for name, value in message["headers"] if name == b"content-type"):
                    start = message
                    return
            elif start is not None:
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                whole = _BODY.sub(lambda found: found.group() + self.html, body, count=1)
                kept = [(name, value) for name, value in start["headers"] if name.lower() != b"content-length"]
                start["headers"] = [*kept, (b"content-length", str(len(whole)).encode())]
                await send(start)
                start, message = None, {**message, "body": whole}
            await send(message)

        await self.app(scope, receive, sent)
