"""The vLLM benchmark with a fake server that decodes with our own model: comparisons, skipped drafters, the report."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.core.bench.runner import Item
from outrider.text import load
from outrider.text.bench.run import Settings
from outrider.text.model import TextModel
from outrider.text.vllm import bench
from outrider.text.vllm.bench import VllmBench
from outrider.text.vllm.client import Counters, Reply, ServeError
from outrider.text.vllm.server import Setup
from tests.text.tiny import write

ITEMS = [Item("a", "chat", "the cat"), Item("b", "chat", "seven wizards")]


class Stand:
    """A server of one drafter; with `wrong`, its tokens are not those of the model."""

    def __init__(self, lm: TextModel, setup: Setup) -> None:
        self.lm, self.setup, self.asked = lm, setup, 0

    def counters(self) -> Counters:
        return (
            Counters(self.asked, 2 * self.asked, self.asked, (self.asked, 0)) if self.setup.speculative else Counters()
        )

    def complete(self, ids: Sequence[int], limit: int, **_: Any) -> Reply:
        self.asked += 1
        tokens = tuple(self.lm.generate(list(ids), drafter=None, max_new_tokens=limit).tokens)
        if self.setup.speculative is None:
            return Reply(tokens, tuple((one,) for one in tokens), 0.1, "length", Counters())
        if self.setup.speculative["method"] == "suffix":
            tokens = (*tokens[:-1], 0)  # the last one is wrong
        rounds = ((tokens[0],), tokens[1:3], *((token,) for token in tokens[3:]))
        return Reply(tokens, rounds, 0.05, "length", Counters(1, 2, 1, (1, 0)))


def test_drafters_are_compared_with_vllms_own_plain_decoding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(str(write(tmp_path / "m")), dtype="float32")
    started: list[Setup] = []

    @contextmanager
    def running(setup: Setup, *_: Any, **__: Any) -> Iterator[Stand]:
        started.append(setup)
        yield Stand(lm, setup)

    monkeypatch.setattr(bench, "running", running)
    monkeypatch.setattr(bench, "can_draft", lambda *_: None)  # the fake server accepts every drafter
    settings = Settings(drafters=("prompt-lookup", "suffix", "hydra"), max_new_tokens=8)
    one = VllmBench(lm, settings, ITEMS, Path("python"), 1, ("--enforce-eager",))
    lines = list(one.run())
    assert lines.count("prompt-lookup") == 2 and len(started) == 3
    assert all("--enforce-eager" in setup.extra and setup.rows == 1 for setup in started)
    result = one.report({"prompts_from": "built in"})
    rows = {row["drafter"]: row for row in result["rows"]}
    assert list(rows) == ["plain", "prompt-lookup", "suffix"] and not result["peers"]
    assert rows["plain"]["tokens_per_pass"] == 1 and rows["prompt-lookup"]["tokens_per_pass"] == pytest.approx(8 / 7)
    assert (rows["prompt-lookup"]["identical"], rows["suffix"]["wrong"]) == (1, 1)
    assert rows["prompt-lookup"]["acceptance_rate"] == pytest.approx(0.5)
    assert result["settings"]["vllm_counters"]["prompt-lookup"]["drafts"] == 3  # the warm-up is counted too
    assert "can't run the drafter 'hydra'" in result["skipped"]["vllm hydra"]


def test_a_failing_plain_server_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = load(str(write(tmp_path / "m")), dtype="float32")

    @contextmanager
    def running(*_: Any, **__: Any) -> Iterator[Stand]:
        raise ServeError("too little memory")
        yield

    monkeypatch.setattr(bench, "running", running)
    one = VllmBench(lm, Settings(drafters=("prompt-lookup",)), ITEMS, Path("python"), 1)
    with pytest.raises(ServeError, match="too little memory"):
        list(one.run())
