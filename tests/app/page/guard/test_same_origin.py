"""Only the page's own requests, and those of programs on this machine, reach the page."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from outrider.app.page.guard.same_origin import SameOrigin


def status(headers: dict[str, str] | list[tuple[str, str]], kind: str = "http") -> Any:
    """What a request with these headers gets: 200 from the page, else what the middleware sends."""
    sent: list[dict[str, Any]] = []

    async def page(scope: Any, receive: Any, send: Any) -> None:
        sent.append({"status": 200})

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    lines = headers.items() if isinstance(headers, dict) else headers
    scope = {"type": kind, "method": "GET", "headers": [(name.encode(), value.encode()) for name, value in lines]}
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


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_other_sites_may_link_to_the_page_but_not_embed_it(site: str) -> None:
    given = {"host": "localhost:7860", "sec-fetch-site": site}
    assert status({**given, "sec-fetch-dest": "document"}) == 200
    for kind in ("iframe", "image", "empty", "script"):
        assert status({**given, "sec-fetch-dest": kind}) == 403
    assert status({"host": "localhost:7860", "sec-fetch-site": "same-origin", "sec-fetch-dest": "empty"}) == 200


def test_a_second_host_is_refused() -> None:
    assert status([("host", "localhost:7860"), ("host", "evil.example")]) == 403
    assert status([("host", "localhost:7860"), ("host", "localhost:7860")]) == 403


def test_what_is_no_request_passes() -> None:
    assert status({}, "lifespan") == 200
