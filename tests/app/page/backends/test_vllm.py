"""The page's backend for a vLLM server, on a fake server: its choices, its recordings and its errors."""

from __future__ import annotations

import gc
import html
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace

import pytest

gradio = pytest.importorskip("gradio")

from typer.testing import CliRunner  # noqa: E402

from outrider.app.cli import cli  # noqa: E402
from outrider.app.page import recordings, render  # noqa: E402
from outrider.app.page.app import backends, build, endpoint  # noqa: E402
from outrider.app.page.backends.interface import checked, drafter_knobs, selectable_drafters, summary  # noqa: E402
from outrider.app.page.backends.vllm import VllmBackend  # noqa: E402
from outrider.app.page.runner import follow  # noqa: E402
from outrider.app.viz.story import story  # noqa: E402
from outrider.core.bench.runner import PLAIN  # noqa: E402
from outrider.core.errors import InvalidOption  # noqa: E402
from outrider.core.methods import DRAFTERS  # noqa: E402
from outrider.text.vllm.client import SERVED, ServeError  # noqa: E402
from tests.text.vllm.fake_server import Speaks, speaking  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::ResourceWarning")  # Gradio leaves event loops open


@pytest.fixture(scope="module", autouse=True)
def tidy() -> Iterator[None]:
    yield
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


@pytest.fixture
def server() -> Iterator[str]:
    with speaking() as address:
        yield address


@pytest.mark.slow
def test_only_the_server_s_drafter_is_offered(server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Speaks, "names", ("m", "m:medusa"))
    backend = VllmBackend(server)
    assert (
        selectable_drafters(backend) == ["medusa"]
        and drafter_knobs(backend, "medusa") == []
        and backend.rules() == ["exact"]
    )
    assert backend.description == "m on vLLM"
    for given in ({"drafter": PLAIN}, {"drafter": "suffix"}, {"rule": "typical"}, {"drafter_options": {"length": 3}}):
        with pytest.raises(InvalidOption):
            checked(backend, {"prompt": "Why?", **given})
    page = build({**backends(), "text": backend}, backends())
    parts = {one.elem_id: one for one in page.blocks.values() if getattr(one, "elem_id", None)}
    assert parts["text-drafter"].choices == [("medusa", "medusa")] and parts["text-drafter"].value == "medusa"
    assert not parts["text-go"].visible and parts["image-go"].visible
    monkeypatch.setattr(Speaks, "names", ("m",))
    assert selectable_drafters(VllmBackend(server)) == [SERVED] and "started with" in summary(SERVED, DRAFTERS)
    monkeypatch.setattr(Speaks, "speculates", False)
    assert selectable_drafters(VllmBackend(server)) == [PLAIN]


def test_a_recording_has_the_counts_that_the_server_reports(server: str) -> None:
    backend = VllmBackend(server)
    settings = checked(backend, {"prompt": "Why?", "temperature": 0.5, "seed": 3})
    *live, (_, recording) = follow(backend, settings, lambda: True, "served")
    assert recording is not None and "w11" in str(live[-1][0][1])
    found = recording.trace.summary()
    assert (found.tokens, found.target_passes, found.drafted, found.accepted) == (7, 4, 9, 3)
    assert recording.trace.method == SERVED and recording.trace.seed == 3
    again = recordings.read(recording.to_json())
    assert again.trace == recording.trace and again.name(-1) == "?"
    rounds = json.loads(html.unescape(story(again.trace, again.name)))["rounds"]
    nodes = [node for told in rounds for row in told["rows"] for node in row["nodes"]]
    assert len(rounds) == 4 and len(nodes) == 9 and all(node[4:] == [None] * 4 for node in nodes)  # no p, q, chance
    assert "3 of 9" in render.charts(again) and "w17" in render.output(again)
    inconsistent = replace(again.trace.steps[1], p=(0.5,))
    with pytest.raises(Exception, match="contradicts itself"):
        recordings.read(replace(recording, trace=replace(recording.trace, steps=(inconsistent,))).to_json())


def test_a_run_can_be_cancelled_and_the_endpoint_works(server: str) -> None:
    backend = VllmBackend(server)
    settings = checked(backend, {"prompt": "Why?"})
    turns = iter([True, True, False])
    *_, (_, recording) = follow(backend, settings, lambda: next(turns, False), "served")
    assert recording is not None and 1 <= len(recording.trace.steps) < 4
    reply = endpoint(backend, lambda session: False)(None, "Why?", SERVED)
    assert reply["text"] == " w11 w12 w13 w14 w15 w16 w17" and reply["summary"]["accepted"] == 3
    assert json.dumps(reply)
    with pytest.raises(gradio.Error, match="too long"):
        endpoint(backend, lambda session: False)(None, "Why?", SERVED, options={"max_new_tokens": 1})


def test_an_unreachable_server_is_an_error_before_the_page_opens() -> None:
    result = CliRunner().invoke(cli, ["demo", "--no-browser", "--vllm", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ServeError) and "outrider serve" in str(result.exception)
    result = CliRunner().invoke(cli, ["demo", "--no-browser", "--vllm", "localhost"])
    assert isinstance(result.exception, InvalidOption)
