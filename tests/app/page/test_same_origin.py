"""Only the page's own requests, and those of programs on this machine, reach the page."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.app.page.same_origin import SameOrigin


def status(headers: dict[str, str], kind: str = "http") -> Any:
    """What a request with these headers gets: 200 from the page, else what the middleware sends."""
    sent: list[dict[str, Any]] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    scope = {"type": kind, "headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    asyncio.run(SameOrigin(page)(scope, None, send))
    return sent[0].get("status", sent[0].get("code"))


@pytest.mark.parametrize("host", ["127.0.0.1:7860", "localhost:7860", "[::1]:7860", "localhost"])
def test_the_page_s_own_requests_pass(host: str) -> None:
    assert status({"host": host}) == 200
    assert status({"host": host, "origin": f"http://{host}"}) == 200
    assert status({"host": host, "origin": f"http://{host}"}, "websocket") == 200


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example:7860", "localhost.evil.example", "", "[::1"])
def test_a_name_that_was_made_to_point_here_is_refused(host: str) -> None:
    assert status({"host": host}) == 403


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "http://localhost:8888", "https://127.0.0.1.evil.example:7860", "null", "http://["],
)
def test_another_site_s_requests_are_refused(origin: str) -> None:
    assert status({"host": "127.0.0.1:7860", "origin": origin}) == 403
    assert status({"host": "127.0.0.1:7860", "origin": origin}, "websocket") == 1008
    assert status({"origin": origin}) == 403


def test_what_is_no_request_passes() -> None:
    assert status({}, "lifespan") == 200
