"""Only requests with the password pass, and guessing is slow."""

from __future__ import annotations

import asyncio
from base64 import b64encode
from typing import Any

import pytest

from outrider.app.page.guard.password import Password

RIGHT, WRONG = "correct horse: ü", "correct horse"


def basic(password: str) -> str:
    return "Basic " + b64encode(f"anyone:{password}".encode()).decode()


class Door:
    """A page behind a password, with a clock that is set by hand."""

    def __init__(self) -> None:
        self.time = 0.0
        self.layer = Password(self.page, RIGHT, lambda: self.time)

    async def page(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    def ask(self, given: str | None, address: str = "192.0.2.1", **more: Any) -> dict[str, Any]:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        lines = [] if given is None else [(b"authorization", given.encode("latin-1"))]
        scope = {"type": "http", "path": "/", "client": (address, 1), "headers": lines, **more}
        asyncio.run(self.layer(scope, None, send))  # type: ignore[arg-type]
        answer: dict[str, Any] = sent[0]
        return answer


def test_the_password_opens_every_path() -> None:
    door = Door()
    assert door.ask(basic(RIGHT))["status"] == 200
    assert door.ask(basic(RIGHT), path="/gradio_api/queue/join")["status"] == 200


@pytest.mark.parametrize("given", [None, basic(WRONG), basic(""), "Basic !", "Basic", "", f"Bearer {RIGHT[:5]}"])
def test_anything_else_is_asked_for_it(given: str | None) -> None:
    answer = Door().ask(given)
    assert (
        answer["status"] == 401
        and (b"www-authenticate", b'Basic realm="Outrider", charset="UTF-8"') in answer["headers"]
    )
    assert Door().ask(given, type="websocket")["code"] == 1008
    assert Door().ask(given, path="/gradio_api/upload")["status"] == 401


def test_ten_wrong_passwords_block_an_address_for_a_minute() -> None:
    door = Door()
    assert [door.ask(basic(WRONG))["status"] for _ in range(12)] == [401] * 10 + [429] * 2
    assert door.ask(basic(RIGHT))["status"] == 429 and door.ask(None)["status"] == 401
    assert door.ask(basic(RIGHT), "192.0.2.2")["status"] == 200
    door.time = 61
    assert door.ask(basic(RIGHT))["status"] == 200


def test_few_addresses_are_remembered() -> None:
    door = Door()
    for number in range(1_100):
        door.ask(basic(WRONG), f"192.0.2.{number}")
    assert len(door.layer._wrong) == 1_000
