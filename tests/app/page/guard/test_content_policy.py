"""A browser runs the page's own scripts and no others."""

from __future__ import annotations

import re
from base64 import b64encode
from hashlib import sha256

from starlette.applications import Starlette
from starlette.responses import HTMLResponse, PlainTextResponse, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from outrider.app.page.guard.content_policy import ContentPolicy

HTML = '<script>\nlet a = 1 < 2;\n</script><script src="/assets/a.js"></script><script type="module">b()</script>'


def client() -> TestClient:
    async def parts(request: object) -> StreamingResponse:
        return StreamingResponse(iter([HTML[:9], HTML[9:]]), media_type="text/html")

    routes = [
        Route("/", lambda request: HTMLResponse(HTML)),
        Route("/parts", parts),
        Route("/text", lambda request: PlainTextResponse("<script>evil()</script>")),
    ]
    return TestClient(ContentPolicy(Starlette(routes=routes)))


def hashed(script: str) -> str:
    return f"'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'"


def test_inline_scripts_are_admitted_by_their_hashes() -> None:
    for path in ("/", "/parts"):
        reply = client().get(path)
        policy = reply.headers["content-security-policy"]
        assert reply.text == HTML and re.findall(r"'sha256-[^']+'", policy) == [
            hashed("\nlet a = 1 < 2;\n"),
            hashed("b()"),
        ]
        script = next(part for part in policy.split("; ") if part.startswith("script-src"))
        assert "unsafe-inline" not in script and "*" not in policy and "http" not in policy


def test_what_is_not_html_has_no_hashes() -> None:
    reply = client().get("/text")
    assert "sha256" not in reply.headers["content-security-policy"]
    assert reply.headers["x-content-type-options"] == "nosniff" and reply.headers["x-frame-options"] == "DENY"


def test_a_head_request_is_answered() -> None:
    reply = client().head("/")
    assert reply.status_code == 200 and "default-src 'none'" in reply.headers["content-security-policy"]
