"""A fake vLLM server that always returns the same answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

PROMPT = [5, 17, 42, 9, 88]
ROUNDS = [[11], [12, 13, 14], [15], [16, 17]]


class Speaks(BaseHTTPRequestHandler):
    """One answer of four rounds, with accepted, partly accepted and rejected drafts."""

    asked = 0
    names: tuple[str, ...] = ("m",)
    speculates, chats = True, True

    def do_GET(self) -> None:
        n = Speaks.asked
        by_position = "".join(
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{place}"}} {n * count}.0\n'
            for place, count in enumerate((2, 1, 0))
        )
        counts = (
            "# HELP x\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0"}} {n * 3}.0\n'
            f'vllm:spec_decode_num_draft_tokens_total{{engine="0"}} {n * 9}.0\n'
            f'vllm:spec_decode_num_accepted_tokens_total{{engine="0"}} {n * 3}.0\n{by_position}'
        )
        pages = {
            "/health": "",
            "/v1/models": json.dumps({"data": [{"id": name} for name in Speaks.names]}),
            "/metrics": counts if Speaks.speculates else "# HELP x\n",
        }
        self._answer(200, pages[self.path])

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["model"] == "m"
        if self.path == "/tokenize":
            if "messages" in asked and not Speaks.chats:
                self._answer(400, "no chat template")
                return
            self._answer(200, json.dumps({"tokens": PROMPT if "messages" in asked else [*PROMPT, 3]}))
        elif self.path == "/detokenize":
            self._answer(200, json.dumps({"prompt": "".join(f" w{one}" for one in asked["tokens"])}))
        elif asked["max_tokens"] == 1:
            self._answer(400, "the prompt is too long")
        else:
            assert asked["prompt"] == PROMPT and asked["stop_token_ids"] in ([2], [])
            Speaks.asked += 1
            lines = [{"choices": [{"token_ids": one, "finish_reason": None}]} for one in ROUNDS]
            lines.append({"choices": [{"token_ids": [], "finish_reason": "length"}]})
            self._answer(200, "".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n")

    def _answer(self, code: int, text: str) -> None:
        self.send_response(code)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


@contextmanager
def speaking() -> Iterator[str]:
    """Run the server within the context; yields its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Speaks)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
