"""Many clients use the page at once, some of them badly: memory stays flat, the queue bounded, and nobody starves.

`OUTRIDER_SOAK=3600 pytest -s tests/app/page/test_soak.py` does so for an hour, and prints the memory and the counts of
every minute. The suite runs it for a few seconds."""

from __future__ import annotations

import asyncio
import json
import os
import random
import runpy
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("gradio")

import httpx

from outrider.app.page import validate
from outrider.app.page.guard.limits import KEPT

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not Path("/proc/self/statm").is_file(), reason="reads /proc")]
OPENED = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "browser" / "opened.py")))
SECONDS = float(os.environ.get("OUTRIDER_SOAK", "2"))
CLIENTS = 64
STEP = {"row": 0, "emitted": [1, 2], "sources": ["drafted", "bonus"], "drafted": [1], "parents": [-1], "fixed": [True]}
TRACE = json.dumps({"steps": [{**STEP, "tried": [True], "path": [0], "index": index} for index in range(1000)]})


class Soak:
    """The clients, what they did, and the largest queue that they saw."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.counts: Counter[str] = Counter()
        self.served = dict.fromkeys(range(CLIENTS), 0)  # complete runs of each client
        self.longest_queue = 0
        self.over = False

    async def client(self, number: int, http: Any) -> None:
        rng, visit = random.Random(number), 0
        ways = [self.read, self.read, self.read_slowly, self.drop, self.never_read, self.abort_upload, self.open_trace]
        while not self.over:
            visit += 1
            way = rng.choice(ways) if self.served[number] else self.read
            try:
                done = await way(http, f"client{number}visit{visit}")
            except httpx.TransportError:  # the server closed a connection that was kept for the next request
                done = "lost"
            self.counts[f"{way.__name__}: {done}"] += 1
            self.served[number] += int(way == self.read and done == "complete")
            await asyncio.sleep(rng.random() * (0.2 if done != "refused" else 2))

    # ---- what a client does

    async def read(self, http: Any, session: str, pause: float = 0.0) -> str:
        given = ["the cat sat", "suffix", "exact", 0.0, 0, {"max_new_tokens": 16}]
        if not await self.join(http, session, "text", given):
            return "refused"
        return await self.follow(http, session, pause)

    async def read_slowly(self, http: Any, session: str) -> str:
        return await self.read(http, session, 0.3)

    async def drop(self, http: Any, session: str) -> str:
        given = ["the cat sat", "plain", "exact", 0.0, 0, {"max_new_tokens": 256}]
        if not await self.join(http, session, "text", given):
            return "refused"
        async with http.stream("GET", "gradio_api/queue/data", params={"session_hash": session}) as stream:
            async for _ in stream.aiter_lines():
                return "dropped"
        return "ended"

    async def never_read(self, http: Any, session: str) -> str:
        given = ["the cat sat", "plain", "exact", 0.0, 0, {"max_new_tokens": 8}]
        return "left" if await self.join(http, session, "text", given) else "refused"

    async def abort_upload(self, http: Any, session: str) -> str:
        _, writer = await asyncio.open_connection(http.base_url.host, http.base_url.port)
        head = (
            f"POST /gradio_api/upload HTTP/1.1\r\nHost: {http.base_url.netloc.decode()}\r\nContent-Length: 4000000\r\n"
        )
        head += "Content-Type: multipart/form-data; boundary=x\r\n\r\n--x\r\nContent-Disposition: form-data; "
        writer.write((head + 'name="files"; filename="a.json"\r\n\r\n').encode() + b" " * 200_000)
        await writer.drain()
        writer.close()
        return "aborted"

    async def open_trace(self, http: Any, session: str) -> str:
        file = {"files": (f"{session}.json", (TRACE + " " * len(session)).encode())}
        reply = await http.post("gradio_api/upload", files=file)
        assert reply.status_code in (200, 408, 503), reply.text  # 408: a busy machine took 30 s to read it
        if reply.status_code != 200:
            return "refused"
        data = [{"path": reply.json()[0], "meta": {"_type": "gradio.FileData"}}]
        async with http.stream("GET", f"gradio_api/heartbeat/{session}"):  # as a browser holds it
            return await self.follow(http, session) if await self.join(http, session, "_open_file", data) else "refused"

    # ---- Gradio's protocol

    async def join(self, http: Any, session: str, name: str, data: list[Any]) -> bool:
        event = {"data": data, "fn_index": self.events[name], "session_hash": session}
        reply = await http.post("gradio_api/queue/join", json=event)
        assert reply.status_code in (200, 408, 503), reply.text
        return bool(reply.status_code == 200)

    async def follow(self, http: Any, session: str, pause: float = 0.0) -> str:
        async with http.stream("GET", "gradio_api/queue/data", params={"session_hash": session}) as stream:
            async for line in stream.aiter_lines():
                message = json.loads(line[6:] or "{}") if line.startswith("data: ") else {}
                self.longest_queue = max(self.longest_queue, message.get("queue_size", 0))
                if message.get("msg") == "process_completed":
                    return "complete" if message["success"] else "failed"
                await asyncio.sleep(pause)
        return "ended"

    # ---- all of them

    async def go(self, process: int, seconds: float) -> list[int]:
        """The memory of the page, in MB, at twelve points of time."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=2)
        async with httpx.AsyncClient(base_url=self.address, timeout=120, limits=limits) as http:
            config = (await http.get("config")).json()
            self.events = {event["api_name"]: event["id"] for event in config["dependencies"]}
            async with asyncio.TaskGroup() as group:
                clients = [group.create_task(self.client(number, http)) for number in range(CLIENTS)]
                memory, begun = [], time.monotonic()
                minute = 0
                for part in range(1, 13):
                    while time.monotonic() - begun < seconds * part / 12:
                        await asyncio.sleep(0.2)
                        if time.monotonic() - begun >= 60 * (minute + 1):
                            minute += 1
                            print(f"minute {minute}: {megabytes(process)} MB, {dict(self.counts)}", flush=True)
                    memory.append(megabytes(process))
                while min(self.served.values()) < 1 and not any(client.done() for client in clients):
                    await asyncio.sleep(0.2)
                self.over = True
            assert await self.read(http, "the last") == "complete"
        return memory


def megabytes(process: int) -> int:
    return int(Path(f"/proc/{process}/statm").read_text().split()[1]) * 4096 >> 20


@pytest.mark.timeout(SECONDS + 300)
def test_many_clients_and_flat_memory(tmp_path: Path) -> None:
    files = tmp_path / "files"
    with OPENED.started("small.py", tmp_path / "page", {"GRADIO_TEMP_DIR": str(files)}) as (address, process):
        soak = Soak(address)
        memory = asyncio.run(soak.go(process, SECONDS))
        print(f"memory in MB {memory}, longest queue {soak.longest_queue}, {dict(soak.counts)}")
        kept = [path for path in files.rglob("*") if path.is_file()]
    counts = soak.counts
    assert min(soak.served.values()) >= 1, "a client starved"
    assert counts["read: complete"] >= CLIENTS and not any("failed" in name for name in counts)
    assert 0 < soak.longest_queue <= validate.WAITING
    assert len(kept) <= KEPT
    assert memory[-1] - memory[3] < (150 if SECONDS < 60 else 40), "memory grows"
