"""Requests are bounded in path, size, number and time, and a client that goes away leaves nothing behind."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from outrider.app.page.guard import limits as module
from outrider.app.page.guard.limits import JSON, KEPT, KEPT_OF_ONE, UNREAD, UPLOADS, Limits

UPLOAD, JOIN, STREAM = "/gradio_api/upload", "/gradio_api/queue/join", "/gradio_api/queue/data"


class Site:
    """A page behind the limits. It stores uploads as files, and answers everything else."""

    def __init__(self, folder: Path, patience: float = 5.0) -> None:
        self.folder, self.bodies = folder, list[bytes]()
        self.limits = Limits(self.page, 1_000, patience)
        self.status = 200

    async def page(self, scope: Any, receive: Any, send: Any) -> None:
        body = (await receive())["body"] if scope["method"] == "POST" else b""
        self.bodies.append(body)
        reply = b"{}"
        if scope["path"] == UPLOAD:
            names = [f"{len(self.bodies)}{part}" for part in body.decode()]
            files = [self.folder / name / "a.json" for name in names]
            for file in files:
                file.parent.mkdir()
                file.write_bytes(body)
            reply = json.dumps([str(file) for file in files]).encode()
        await send({"type": "http.response.start", "status": self.status, "headers": []})
        await send({"type": "http.response.body", "body": reply})

    def files(self) -> int:
        return sum(path.is_file() for path in self.folder.rglob("*"))

    async def ask(self, path: str, *parts: bytes, length: int | None = None, **more: Any) -> tuple[int, str]:
        """The status and the text of the reply to a request whose body comes in parts; None leaves in the middle."""
        given = [{"type": "http.request", "body": part, "more_body": True} for part in parts] or [{}]
        given[-1]["more_body"] = False
        return await self.send(path, given, length, **more)

    async def send(self, path: str, given: list[Any], length: int | None, **more: Any) -> tuple[int, str]:
        sent: list[Any] = []

        async def receive() -> Any:
            if given:
                return given.pop(0)
            return await asyncio.Event().wait()

        async def send(message: Any) -> None:
            sent.append(message)

        lines = [] if length is None else [(b"content-length", str(length).encode())]
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "client": ("192.0.2.1", 1)}
        await self.limits({**scope, "headers": lines, **more}, receive, send)
        status = sent[0]["status"] if sent else 0
        return status, b"".join(message.get("body", b"") for message in sent).decode()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


def run(work: Any) -> Any:
    return asyncio.run(work)


@pytest.mark.parametrize(
    "path",
    ["/gradio_api/deep_link", "/monitoring", "/gradio_api/proxy=http://a.example", "/login", "/openapi.json", "/docs",
     "/gradio_api/vibe-edit/", "/gradio_api/process_recording", "/gradio_api/run/text", "/gradio_api/mcp", ""],
)  # fmt: skip
def test_paths_that_the_page_does_not_use_do_not_exist(site: Site, path: str) -> None:
    for method in ("GET", "POST"):
        assert run(site.ask(path, b"", method=method))[0] == 404
    assert site.bodies == []


def test_bodies_are_bounded_with_and_without_a_length(site: Site) -> None:
    assert run(site.ask(JOIN, b"{}", b" " * (JSON - 2)))[0] == 200
    assert run(site.ask(JOIN, b"{}", b" " * (JSON - 1)))[0] == 413
    assert run(site.ask(JOIN, length=JSON + 1))[0] == 413
    assert run(site.ask(JOIN, b"", length=-1))[0] == 413
    assert run(site.ask(UPLOAD, b"a" + b"" * 3, length=1_001))[0] == 413
    assert len(site.bodies) == 1


def test_an_aborted_or_stalled_request_never_reaches_the_page(tmp_path: Path) -> None:
    site = Site(tmp_path, patience=0.02)
    part = {"type": "http.request", "body": b"a", "more_body": True}
    for path in (UPLOAD, JOIN):
        assert run(site.send(path, [part, {"type": "http.disconnect"}], None)) == (0, "")
        assert run(site.send(path, [part], None))[0] == 408
    assert site.bodies == [] and site.files() == 0
    assert run(site.ask(UPLOAD, b"a"))[0] == 200  # their places are free


def test_uploads_are_bounded_in_number(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = [("192.0.2.1", 1)] * 20 + [("192.0.2.2", 1)] * 20
    statuses = [run(site.ask(UPLOAD, b"a", client=address))[0] for address in addresses]
    assert statuses == 2 * ([200] * KEPT_OF_ONE + [503] * (20 - KEPT_OF_ONE))
    assert site.files() == KEPT and run(site.ask(UPLOAD, b"a", client=("192.0.2.3", 1)))[0] == 503
    monkeypatch.setattr(module, "FRESH", -1.0)
    assert run(site.ask(UPLOAD, b"a"))[0] == 200 and site.files() == 1 and len(site.limits.kept) == 1


def test_a_file_stays_while_a_call_that_names_it_waits(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy page reaches the call long after the upload (the soak's clients lost files that way)."""
    monkeypatch.setattr(module, "FRESH", -1.0)
    (path,) = json.loads(run(site.ask(UPLOAD, b"a"))[1])
    run(site.ask(JOIN, json.dumps({"data": [{"path": path}], "session_hash": "abc"}).encode()))
    run(site.ask(UPLOAD, b"b"))
    assert Path(path).is_file() and site.files() == 2
    run(site.ask(STREAM, method="GET", query_string=b"session_hash=abc"))  # the results are read
    run(site.ask(UPLOAD, b"c"))
    assert not Path(path).is_file() and site.files() == 1


def test_a_call_that_is_refused_holds_no_file(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue answered clients whose files then took all places for ten minutes."""
    monkeypatch.setattr(module, "FRESH", -1.0)
    (path,) = json.loads(run(site.ask(UPLOAD, b"a"))[1])
    call = json.dumps({"data": [{"path": path}], "session_hash": "abc"}).encode()
    site.status = 503
    assert [run(site.ask(JOIN, call))[0] for _ in range(2 * UNREAD)] == [503] * 2 * UNREAD
    site.status = 200
    run(site.ask(UPLOAD, b"b"))
    assert not Path(path).is_file() and site.files() == 1
    (path,) = json.loads(run(site.ask(UPLOAD, b"c"))[1])
    call = json.dumps({"data": [{"path": path}], "session_hash": "abc"}).encode()
    assert run(site.ask(JOIN, call))[0] == 200  # refused calls have no results to read
    site.status = 503
    assert run(site.ask(JOIN, call))[0] == 503
    site.status = 200
    run(site.ask(UPLOAD, b"d"))
    assert Path(path).is_file(), "the first call waits still"


def test_several_files_in_one_upload_are_deleted(site: Site) -> None:
    status, words = run(site.ask(UPLOAD, b"abc"))
    assert status == 400 and "3 files" in words and site.files() == 0 and not site.limits.kept


def test_few_uploads_run_at_the_same_time(tmp_path: Path) -> None:
    site = Site(tmp_path, patience=0.05)

    async def many() -> list[int]:
        part = {"type": "http.request", "body": b"a", "more_body": True}
        slow = [asyncio.ensure_future(site.send(UPLOAD, [part], None)) for _ in range(UPLOADS)]
        await asyncio.sleep(0)
        status, _ = await site.ask(UPLOAD, b"a")
        for one in slow:
            one.cancel()
        await asyncio.gather(*slow, return_exceptions=True)
        return [status, (await site.ask(UPLOAD, b"a"))[0]]

    assert run(many()) == [503, 200]


def test_few_requests_run_at_the_same_time(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REQUESTS", 0)
    assert run(site.ask(JOIN, b"{}"))[0] == 503


def test_a_session_that_never_reads_its_results_may_not_call_again(site: Site) -> None:
    call = json.dumps({"session_hash": "abc"}).encode()
    assert [run(site.ask(JOIN, call))[0] for _ in range(UNREAD + 1)] == [200] * UNREAD + [503]
    assert run(site.ask(JOIN, b'{"session_hash": "another"}'))[0] == 200
    run(site.ask(STREAM, method="GET", query_string=b"session_hash=abc"))
    assert run(site.ask(JOIN, call))[0] == 200
    for body in (b"[]", b"\xff", b"[" * 100_000, b'{"session_hash": {}}'):
        assert run(site.ask(JOIN, body))[0] == 200
    for number in range(1_000):
        run(site.ask(JOIN, json.dumps({"session_hash": str(number)}).encode()))
    assert len(site.limits._unread) <= 200


# ---- results


def stream(patience: float, receive: Any, send: Any) -> list[str]:
    """The types of the messages that a page receives while it sends results, until the client has gone."""
    seen: list[str] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"data: 1", "more_body": True})
        while "http.disconnect" not in seen:
            seen.append((await receive())["type"])

    scope = {"type": "http", "method": "GET", "path": STREAM, "headers": [], "query_string": b"session_hash=abc"}
    asyncio.run(Limits(page, 0, patience)(scope, receive, send))
    return seen


async def taken(message: Any) -> None: ...


def test_a_client_that_closes_the_connection_is_noticed() -> None:
    given = ["http.request", "http.disconnect"]

    async def receive() -> Any:
        return {"type": given.pop(0)}

    assert stream(5, receive, taken) == ["http.request", "http.disconnect"]


@pytest.mark.parametrize("broken", [False, True])
def test_a_client_that_stops_reading_counts_as_gone(broken: bool) -> None:
    async def send(message: Any) -> None:
        if broken:
            raise OSError
        await asyncio.Event().wait()

    async def receive() -> Any:
        return await asyncio.Event().wait()

    assert stream(0.02, receive, send) == ["http.disconnect"]
