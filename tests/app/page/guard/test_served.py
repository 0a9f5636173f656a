"""The page as it is served, through HTTP: whom it answers, what it keeps of visitors, and how places become free."""

from __future__ import annotations

import gc
import json
import runpy
import socket
import threading
import time
import warnings
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

gradio = pytest.importorskip("gradio")
import httpx  # noqa: E402

from outrider.app.page import validate  # noqa: E402
from outrider.app.page.app import serve  # noqa: E402
from outrider.app.page.guard.access import Access  # noqa: E402
from outrider.app.page.guard.limits import SESSIONS  # noqa: E402
from outrider.app.page.recordings import Recording  # noqa: E402
from outrider.core.bench.runner import PLAIN  # noqa: E402
from outrider.core.trace import Step, Trace  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore::ResourceWarning"), pytest.mark.slow]
SMALL = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[3] / "browser" / "small.py")))
PASSWORD = "correct horse"
RETURNED = threading.Event()  # freed memory was given back
NODES = {"drafted": [1, 2], "parents": [-1, 0], "fixed": [True] * 2, "tried": [True] * 2, "path": [0, 1]}
STEP = {"row": 0, "emitted": [1, 2, 3], "sources": ["drafted", "drafted", "bonus"], **NODES}


class Endless:
    """A run that ends only when it is cancelled."""

    running, over = threading.Event(), threading.Event()  # `over` frees the model thread for other tests

    def __init__(self) -> None:
        self.step = Step(row=0, index=0, emitted=(1,), sources=("bonus",))

    def __iter__(self) -> Iterator[Step]:
        while not self.over.is_set():
            self.running.set()
            time.sleep(0.005)
            yield self.step

    def close(self) -> None:
        self.running.clear()

    def preview(self) -> str:
        return "…"

    def recording(self) -> Recording:
        return Recording("text", Trace((self.step,)))


class Served:
    """A page with a password, and requests to it."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.http = page, httpx.Client(base_url=address, timeout=60, auth=("me", PASSWORD))
        config = self.http.get("config").json()
        self.events = {event["api_name"]: event["id"] for event in config["dependencies"]}

    def join(self, session: str, name: str, data: list[Any]) -> httpx.Response:
        event = {"data": data, "fn_index": self.events[name], "session_hash": session}
        return self.http.post("gradio_api/queue/join", json=event)

    def follow(self, session: str) -> dict[str, Any]:
        """The output of a session's only event."""
        with self.http.stream("GET", "gradio_api/queue/data", params={"session_hash": session}) as stream:
            for line in stream.iter_lines():
                message = json.loads(line[6:]) if line.startswith("data: ") else {}
                if message.get("msg") == "process_completed":
                    output: dict[str, Any] = message["output"]
                    return output
        raise AssertionError("the stream ended early")

    def predict(self, session: str, name: str, data: list[Any]) -> httpx.Response:
        event = {"data": data, "fn_index": self.events[name], "session_hash": session}
        return self.http.post("gradio_api/run/predict", json=event)

    def open_trace(self, session: str, file: bytes) -> dict[str, Any]:
        stored = self.http.post("gradio_api/upload", files={"files": ("trace.json", file)}).json()[0]
        data = [{"path": stored, "meta": {"_type": "gradio.FileData"}}]
        assert self.join(session, "_open_file", data).status_code == 200
        return self.follow(session)

    @property
    def sessions(self) -> dict[str, Any]:
        data: dict[str, Any] = self.page.server_app.state_holder.session_data
        return data


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    backends = SMALL.backends(tmp_path_factory.mktemp("models"))
    text = backends["text"]
    usual = text.begin
    text.begin = lambda settings: Endless() if settings.prompt == "endless" else usual(settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GRADIO_TEMP_DIR", str(tmp_path_factory.mktemp("files")))
        patch.setattr("outrider.app.page.app._RETURN_SECONDS", 0.1)
        patch.setattr("outrider.app.page.app.return_freed_memory", RETURNED.set)
        page, address = serve(browser=False, own=backends, access=Access(password=PASSWORD))
        made = Served(page, address)
        yield made
        Endless.over.set()
        made.http.close()
        page.close(verbose=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_freed_memory_is_given_back_again_and_again(served: Served) -> None:
    for _ in range(2):
        RETURNED.clear()
        assert RETURNED.wait(30)


# ---- whom it answers


def test_a_password_is_asked_for_everywhere(served: Served) -> None:
    address = served.http.base_url
    for path in ("", "config", "gradio_api/info", "theme.css", "gradio_api/queue/data?session_hash=a"):
        assert httpx.get(f"{address}{path}").status_code == 401
    assert httpx.post(f"{address}gradio_api/upload", files={"files": ("a.txt", b"a")}).status_code == 401
    assert served.http.get("").status_code == 200


def test_other_names_and_sites_are_refused(address: str) -> None:
    preflight = {"access-control-request-method": "POST"}
    evil = "http://evil.example"
    for method, path in (("GET", ""), ("POST", "gradio_api/upload"), ("OPTIONS", "gradio_api/upload")):
        for given in ({"host": "evil.example"}, {"host": "evil.example", "origin": evil}, {"origin": evil}):
            reply = httpx.request(method, address + path, headers={**given, **preflight})
            assert reply.status_code == 403 and "access-control-allow-origin" not in reply.headers
    for site, kind, status in (
        ("cross-site", "image", 403),
        ("same-site", "empty", 403),
        ("cross-site", "document", 200),
    ):
        assert httpx.get(address, headers={"sec-fetch-site": site, "sec-fetch-dest": kind}).status_code == status
    upload = {"files": ("a.txt", b"a")}
    own = {"origin": address.rstrip("/"), "sec-fetch-site": "same-origin"}
    assert httpx.post(f"{address}gradio_api/upload", files=upload, headers=own).status_code == 200


def test_the_page_forbids_scripts_of_others(address: str) -> None:
    policy = httpx.get(address).headers["content-security-policy"]
    assert "default-src 'none'" in policy and policy.count("'sha256-") >= 3 and "frame-ancestors 'none'" in policy
    assert "'unsafe-inline'" not in policy.partition("style-src")[0]


def test_programs_use_the_endpoints_with_the_password(served: Served) -> None:
    from gradio_client import Client

    headers = {"authorization": "Basic " + b64encode(f"me:{PASSWORD}".encode()).decode()}
    client = Client(str(served.http.base_url), verbose=False, headers=headers)
    assert (
        client.predict("the cat", PLAIN, "exact", 0.0, 0, {"max_new_tokens": 4}, api_name="/text")["summary"]["tokens"]
        == 4
    )
    client.close()


# ---- uploads


def test_aborted_uploads_leave_no_file(address: str, page_files: Path) -> None:
    host, port = address.removeprefix("http://").rstrip("/").split(":")
    head = f"POST /gradio_api/upload HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Length: 900000\r\n"
    head += "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\nContent-Disposition: form-data; "
    head += 'name="files"; filename="a.json"\r\n\r\n'
    before = {path for path in page_files.rglob("*") if path.is_file()}
    for _ in range(8):
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + b" " * 100_000)
    assert httpx.get(address).status_code == 200
    assert {path for path in page_files.rglob("*") if path.is_file()} == before


def test_one_file_of_at_most_5_mb_is_accepted(served: Served) -> None:
    def upload(*sizes: int) -> int:
        files = [("files", (f"{number}.json", b" " * size)) for number, size in enumerate(sizes)]
        return served.http.post("gradio_api/upload", files=files).status_code

    assert upload(validate.FILE) == 200 and upload(1) == 200
    assert upload(validate.FILE + 1) == 413 and upload(2 * validate.FILE) == 413 and upload(1, 1, 1) == 400


# ---- memory


def test_little_is_kept_of_a_session_that_opened_a_trace(served: Served) -> None:
    """Neither the HTML that was sent nor the numbers of a trace stay with Gradio's state of a session."""
    file = json.dumps({"steps": [{**STEP, "index": index} for index in range(2_000)]}).encode()
    output = served.open_trace("reader", file)
    sent = sum(len(part) for part in output["data"] if isinstance(part, str))
    state = served.sessions["reader"]
    assert sent > len(file) and len(str(state.config_values)) < 400_000 < sent
    assert not any(isinstance(value, Recording) for value in state.state_data.values())


def test_few_sessions_are_kept(served: Served) -> None:
    for number in range(SESSIONS + 20):
        assert served.predict(f"visitor{number}", "_imagine", [0.5, 0.1, 3, 0.02]).status_code == 200
    assert len(served.sessions) == SESSIONS and f"visitor{SESSIONS + 19}" in served.sessions


def test_a_visitor_who_leaves_is_forgotten(served: Served) -> None:
    assert served.predict("leaver", "_imagine", [0.5, 0.1, 3, 0.02]).status_code == 200
    assert "leaver" in served.sessions
    with served.http.stream("GET", "gradio_api/heartbeat/leaver") as stream:
        next(stream.iter_lines())
    until(lambda: "leaver" not in served.sessions)


def test_nothing_is_kept_of_dropped_connections(served: Served) -> None:
    queue = served.page._queue
    for number in range(4):
        served.join(f"drops{number}", "text", ["the cat", PLAIN, "exact", 0.0, 0, {"max_new_tokens": 64}])
        with served.http.stream("GET", f"gradio_api/queue/data?session_hash=drops{number}") as stream:
            next(stream.iter_lines())
    until(lambda: not any(name.startswith("drops") for name in queue.pending_event_ids_session))
    assert not any(name.startswith("drops") for name in queue.pending_messages_per_session)


# ---- places in the queue


@pytest.mark.parametrize("way", ["the page", "a program", "a simple program"])
def test_an_aborted_run_frees_its_place(served: Served, way: str) -> None:
    session = f"aborts {way}"
    if way == "a simple program":
        event = served.http.post(
            "gradio_api/call/text", json={"data": ["endless", PLAIN, "exact", 0.0, 0, None]}
        ).json()["event_id"]
        path = f"gradio_api/call/text/{event}"
    elif way == "a program":
        assert served.join(session, "text", ["endless", PLAIN, "exact", 0.0, 0, None]).status_code == 200
        path = f"gradio_api/queue/data?session_hash={session}"
    else:
        assert served.predict(session, "_begin", []).status_code == 200
        controls = [block.value for block in served.page.fns[served.events["_run"]].inputs]
        controls[1:3] = ["endless", PLAIN]
        assert served.join(session, "_run", controls).status_code == 200
        path = f"gradio_api/queue/data?session_hash={session}"
    with served.http.stream("GET", path) as stream:
        lines = stream.iter_lines()
        if way != "a simple program":
            next(lines)
        until(Endless.running.is_set)
    until(lambda: not Endless.running.is_set())
    assert served.join("next", "text", ["the cat", PLAIN, "exact", 0.0, 0, {"max_new_tokens": 4}]).status_code == 200
    assert served.follow("next")["data"][0]["summary"]["tokens"] == 4


def test_the_queue_is_bounded_and_says_so(served: Served) -> None:
    endless = ["endless", PLAIN, "exact", 0.0, 0, None]
    assert served.join("first", "text", endless).status_code == 200
    until(Endless.running.is_set)
    replies = [served.join(f"waits{number}", "text", endless) for number in range(validate.WAITING + 4)]
    assert [reply.status_code for reply in replies] == [200] * validate.WAITING + [503] * 4
    assert "16 runs wait already" in served.predict("late", "_begin", []).text
    for session in ["first", *(f"waits{number}" for number in range(validate.WAITING))]:
        with served.http.stream("GET", f"gradio_api/queue/data?session_hash={session}") as stream:
            next(stream.iter_lines())
    until(lambda: not Endless.running.is_set() and not len(served.page._queue))
    assert "Waiting for the model" in served.predict("late", "_begin", []).text
