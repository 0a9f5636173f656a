"""Published models on the page in a browser: a picture and a sound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.browser
Open = Callable[..., Any]


def test_a_published_model_draws(visit_published: Open) -> None:
    seen = visit_published()
    seen.tab("Image")
    seen.page.fill("#image-prompt textarea", "a blue house on the hill")
    text = seen.run("image")
    assert "tokens per target pass" in text and "64 tokens in" in seen.text("#image-out")
    picture = "[...document.querySelectorAll('#image-out image')].map(one => one.href.baseVal.slice(0, 22))"
    assert seen.page.evaluate(picture) == ["data:image/png;base64,"]
    seen.page.locator("#image-image-views").get_by_label("Source").check()
    seen.page.locator("#image-out .or-layer-source [data-cell='9']").click()
    seen.until("#image-patches", "row 2, column 2")
    assert seen.page.locator("#image-patches img").count() > 3
    seen.run("image", "go")
    seen.until("#image-out", "Plain decoding")
    assert seen.page.locator("#image-out image").count() == 2


def test_a_published_model_speaks(visit_published: Open) -> None:
    seen = visit_published()
    seen.open("?panel=speech&prompt=a%20slow%20waltz&drafter=draft-model&rule=gumbel-match&max_new_tokens=40&seed=3")
    seen.page.wait_for_function("document.querySelector('#speech-prompt textarea')?.value === 'a slow waltz'")
    seen.run("speech", "go")
    assert "Same 172 tokens." in seen.until("#speech-out", "Plain decoding")  # 40 columns of 4 books, 3 for the delay
    length = (
        "new Promise(done => { const one = document.querySelector('#speech-out audio');"
        " if (one.duration) done(one.duration); one.onloadedmetadata = () => done(one.duration); one.load(); })"
    )
    assert abs(seen.page.evaluate(length) - 40 * 4 / 24000) < 1e-3  # this codec makes four samples of a frame
    assert seen.page.locator("#speech-out audio").count() == 2
