"""Bounds what requests take: which paths they reach, how much they send, and how long they are read.

Bodies are read whole before the page sees them, so that an aborted request leaves nothing behind. Knows the paths of
Gradio, but nothing of the page."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections import OrderedDict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from outrider.app.page.guard.asgi import Application, Message, Receive, Scope, Send, headers, refuse

REQUESTS = 512  # at the same time
JSON = 512_000  # bytes of a call
UPLOADS = 4  # at the same time
KEPT, KEPT_OF_ONE = 32, 16  # uploaded files, in all and of one address
FRESH = 30.0  # seconds for which an uploaded file isn't deleted to make room for others
HELD = 600.0  # seconds at most for which a waiting call holds the files that it names
UNREAD = 4  # calls of a session that nobody reads the results of
SESSIONS = 64  # whose state is kept
PATIENCE = 30.0  # seconds for a body to arrive, and for the reader of a stream to take a message

_API = "/gradio_api/"
_UPLOAD, _JOIN, _STREAM, _CALL = f"{_API}upload", f"{_API}queue/join", f"{_API}queue/data", f"{_API}call/"
_FILES = {"/", "/config", "/theme.css", "/favicon.ico", "/robots.txt", "/manifest.json"}
_CALLS = {
    f"{_API}{name}" for name in ("info", "theme.css", "startup-events", "app_id", "run/predict", "cancel", "reset")
}
_PATHS = frozenset({*_FILES, *_CALLS, _UPLOAD, _JOIN, _STREAM})
_FOLDERS = ("/assets/", "/static/", "/svelte/", _CALL, f"{_API}heartbeat/", f"{_API}file=")


class Limits:
    """ASGI middleware with the limits of this module. `upload` is the largest body of an upload in bytes."""

    def __init__(self, app: Application, upload: int, patience: float = PATIENCE) -> None:
        self.app, self.upload, self.patience = app, upload, patience
        self.kept: dict[str, tuple[float, str]] = {}  # uploaded files, oldest first: time of arrival and address
        self._requests = self._uploads = 0
        self._held: dict[str, tuple[float, str]] = {}  # by file: until when and for which session's call
        self._unread: OrderedDict[str, int] = OrderedDict()  # by session: calls since results were last read

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http" or not (scope["path"] in _PATHS or scope["path"].startswith(_FOLDERS)):
            await refuse(scope, send, 404, "This page has no such address.")
        elif self._requests >= REQUESTS:
            await _busy(scope, send, f"{REQUESTS} requests are being answered")
        else:
            self._requests += 1
            try:
                await self._request(scope, receive, send)
            finally:
                self._requests -= 1

    async def _request(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"]
        if scope["method"] == "POST" and path == _UPLOAD:
            await self._accept_upload(scope, receive, send)
        elif scope["method"] == "POST":
            await self._call(scope, receive, send)
        elif scope["method"] == "GET" and (path == _STREAM or path.startswith(_CALL)):
            await self._stream(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    # ---- calls

    async def _call(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await self._body(scope, receive, send, JSON)
        if body is None:
            return
        if scope["path"] == _JOIN:
            await self._join(body, scope, receive, send)
        else:
            await self.app(scope, _replay(body, receive), send)

    async def _join(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a call enter the queue, which holds the files that it names."""
        session = _session(body)
        unread = self._unread.pop(session, 0)
        if unread >= UNREAD:
            self._unread[session] = unread
            await _busy(scope, send, f"the results of {UNREAD} earlier calls were not read")
            return
        self._unread[session] = unread + 1
        if len(self._unread) > 2 * SESSIONS:
            self._unread.popitem(last=False)
        before = {path: self._held.pop(path, None) for path in self.kept if json.dumps(path).encode() in body}
        self._held |= dict.fromkeys(before, (time.monotonic() + HELD, session))

        async def answered(message: Message) -> None:
            if message.get("status", 200) >= 400:  # the queue is full: nothing waits for the files
                self._unread[session] = max(self._unread.get(session, 0) - 1, 0)  # others may have come meanwhile
                for path, earlier in before.items():
                    self._held.pop(path, None)
                    if earlier is not None:
                        self._held[path] = earlier
            await send(message)

        await self.app(scope, _replay(body, receive), answered)

    async def _body(self, scope: Scope, receive: Receive, send: Send, limit: int) -> bytes | None:
        """The request's body; None if it was refused or the client left."""
        length = headers(scope).get(b"content-length", "0")
        size = int(length) if length.isdecimal() else limit + 1
        parts: list[bytes] = []
        more, received = size <= limit, size if size > limit else 0
        deadline = time.monotonic() + self.patience
        while more and received <= limit:
            try:
                message = await asyncio.wait_for(receive(), max(deadline - time.monotonic(), 0))
            except TimeoutError:
                await refuse(scope, send, 408, f"The request took longer than {self.patience:g} seconds.")
                return None
            if message["type"] == "http.disconnect":
                return None
            parts.append(message.get("body", b""))
            received += len(parts[-1])
            more = message.get("more_body", False)
        if received > limit:
            await refuse(scope, send, 413, f"The request is larger than {limit:,} bytes.", {"connection": "close"})
            return None
        return b"".join(parts)

    # ---- uploads

    async def _accept_upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self._uploads >= UPLOADS:
            await _busy(scope, send, f"{UPLOADS} files are being uploaded")
            return
        self._uploads += 1
        try:
            body = await self._body(scope, receive, send, self.upload)
            if body is not None:
                quiet = {**scope, "query_string": b""}  # without an id, Gradio keeps no record of the progress
                await self._store(quiet, _replay(body, receive), send)
        finally:
            self._uploads -= 1

    async def _store(self, scope: Scope, receive: Receive, send: Send) -> None:
        address = str((scope.get("client") or ["unknown"])[0])
        now = time.monotonic()
        for path in [path for path, (arrived, _) in self.kept.items() if now - arrived > FRESH]:
            if now > self._held.get(path, (0.0, ""))[0]:
                self._discard(path)
        own = sum(kept_by == address for _, kept_by in self.kept.values())
        if len(self.kept) >= KEPT or own >= KEPT_OF_ONE:
            await _busy(
                scope,
                send,
                f"{len(self.kept)} uploaded files, {own} of them yours, are less than {FRESH:g} s old or in use",
            )
            return
        messages: list[Message] = []

        async def held(message: Message) -> None:
            messages.append(message)

        await self.app(scope, receive, held)
        stored = _paths(b"".join(message.get("body", b"") for message in messages))
        for path in stored:
            self.kept.pop(path, None)
            self.kept[path] = now, address
        if len(stored) > 1:
            for path in stored:
                self._discard(path)
            await refuse(scope, send, 400, f"{len(stored)} files were uploaded; upload one at a time.")
            return
        for message in messages:
            await send(message)

    def _discard(self, path: str) -> None:
        """Delete an uploaded file."""
        del self.kept[path]
        self._held.pop(path, None)
        Path(path).unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # the folder of files with these contents may have another one
            Path(path).parent.rmdir()

    # ---- results

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send results as they come. A client that stops reading is treated as one that closes the connection."""
        query = parse_qs(scope["query_string"].decode("latin-1"))
        session = query.get("session_hash", [""])[0]
        gone = asyncio.Event()

        async def received() -> Message:
            closed, stuck = asyncio.ensure_future(receive()), asyncio.ensure_future(gone.wait())
            try:
                await asyncio.wait([closed, stuck], return_when=asyncio.FIRST_COMPLETED)
                return {"type": "http.disconnect"} if gone.is_set() else closed.result()
            finally:
                closed.cancel()
                stuck.cancel()

        async def sent(message: Message) -> None:
            self._unread.pop(session, None)
            if b'"process_completed"' in message.get("body", b""):
                self._release(session)
            if not gone.is_set():
                try:
                    await asyncio.wait_for(send(message), self.patience)
                except (TimeoutError, OSError):
                    gone.set()

        try:
            await self.app(scope, received, sent)
        finally:
            self._release(session)

    def _release(self, session: str) -> None:
        for path in [path for path, (_, holder) in self._held.items() if holder == session]:
            del self._held[path]


async def _busy(scope: Scope, send: Send, why: str) -> None:
    await refuse(scope, send, 503, f"The page is busy: {why}; try again in a minute.", {"retry-after": "60"})


def _replay(body: bytes, receive: Receive) -> Receive:
    """A `receive` that gives the body first."""
    waiting: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return waiting.pop() if waiting else await receive()

    return replayed


def _session(body: bytes) -> str:
    """The session that a call names."""
    try:
        content: Any = json.loads(body)
    except (ValueError, RecursionError):
        return ""
    return str(content.get("session_hash", ""))[:100] if isinstance(content, dict) else ""


def _paths(reply: bytes) -> list[str]:
    """The files in the reply to an upload."""
    try:
        content: Any = json.loads(reply)
    except ValueError:
        return []
    return [path for path in content if isinstance(path, str)] if isinstance(content, list) else []
