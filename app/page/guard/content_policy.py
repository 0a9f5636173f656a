"""Adds a Content-Security-Policy and related headers, so that the page loads and runs nothing but its own files.

Inline scripts are admitted by their hashes, computed as the page is sent. Independent of the page."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from outrider.app.page.guard.asgi import Application, Message, Receive, Scope, Send

# Gradio builds the templates of its HTML component with `new Function`, and styles elements in place.
_POLICY = (
    "default-src 'none'; script-src 'self' 'unsafe-eval'{hashes}; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; media-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; "
    "worker-src 'self' blob:; manifest-src 'self'; base-uri 'self'; form-action 'self'; frame-ancestors 'none'"
)
_HEADERS = {
    b"x-content-type-options": b"nosniff",
    b"x-frame-options": b"DENY",
    b"referrer-policy": b"no-referrer",
    b"cross-origin-opener-policy": b"same-origin",
    b"cross-origin-resource-policy": b"same-origin",
}
_INLINE = re.compile(rb"<script(?![^>]*\ssrc=)[^>]*>(.*?)</script>", re.DOTALL)


class ContentPolicy:
    """ASGI middleware that adds the headers. HTML is sent uncompressed and whole."""

    def __init__(self, app: Application) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        if scope["path"] == "/":
            plain = [(name, value) for name, value in scope["headers"] if name != b"accept-encoding"]
            scope = {**scope, "headers": plain}
        start: Message | None = None  # of a page whose body is not complete
        body = b""

        async def sent(message: Message) -> None:
            nonlocal start, body
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() not in _HEADERS]
                message = {**message, "headers": [*kept, *_HEADERS.items()]}
                kind = next((value for name, value in kept if name.lower() == b"content-type"), b"")
                if kind.startswith(b"text/html"):
                    start = message
                    return
                message["headers"].append((b"content-security-policy", _policy(b"")))
            elif start is not None:
                body += message.get("body", b"")
                if message.get("more_body"):
                    return
                start["headers"].append((b"content-security-policy", _policy(body)))
                await send(start)
                start, message = None, {**message, "body": body}
            await send(message)

        await self.app(scope, receive, sent)


def _policy(html: bytes) -> bytes:
    hashes = dict.fromkeys(b64encode(sha256(script).digest()).decode() for script in _INLINE.findall(html))
    return _POLICY.format(hashes="".join(f" 'sha256-{value}'" for value in hashes)).encode()
