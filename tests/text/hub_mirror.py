"""A mirror of the hub on this machine: serves the folders below a root as models, by the routes that huggingface_hub
uses (HF_ENDPOINT)."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    """Answers model listings (/api/models/OWNER/NAME/...) and files (/OWNER/NAME/resolve/REVISION/FILE)."""

    root: Path
    requests: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0].strip("/")
        self.requests.append(f"{self.command} {path}")
        parts = path.split("/")
        if path == "":
            self.send(200, b"", body)
        elif parts[:2] == ["api", "models"] and (folder := self.root / parts[2] / parts[3]).is_dir():
            files = sorted(file.relative_to(folder).as_posix() for file in folder.rglob("*") if file.is_file())
            if "tree" in parts:
                listed = [
                    {"type": "file", "path": name, "oid": COMMIT, "size": (folder / name).stat().st_size}
                    for name in files
                ]
                self.send(200, json.dumps(listed).encode(), body)
                return
            name = f"{parts[2]}/{parts[3]}"
            about = {"id": name, "modelId": name, "sha": COMMIT, "siblings": [{"rfilename": file} for file in files]}
            self.send(200, json.dumps(about).encode(), body)
        elif "resolve" in parts and (file := self.root.joinpath(*parts[:2], *parts[4:])).is_file():
            self.send(200, file.read_bytes(), body)
        else:
            self.send(404, b"{}", body, {"X-Error-Code": "RepoNotFound" if "api" in parts else "EntryNotFound"})

    def send(self, status: int, content: bytes, body: bool, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.end_headers()
        if body:
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def mirror(root: Path) -> Iterator[tuple[str, list[str]]]:
    """Serve the models in root/OWNER/NAME; gives the address and the requests so far."""
    requests: list[str] = []
    handler = type("RootHandler", (Handler,), {"root": root, "requests": requests})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", requests
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
