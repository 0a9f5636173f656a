"""Files of other engines as traces and summaries, and AIPerf's record out of any trace."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from outrider.app.formats.acceptance import Acceptance
from outrider.app.formats.engines import to_aiperf
from outrider.app.formats.files import Opened, opened
from outrider.core.errors import TraceError

RESPONSES = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("responses.py"))))
VLLM, SGLANG, LLAMA = RESPONSES.VLLM, RESPONSES.SGLANG, RESPONSES.LLAMA


def read(content: Any) -> Opened:
    return opened(json.dumps(content).encode())


def test_vllm_steps_become_a_trace_with_the_tokens_of_each_pass() -> None:
    trace = read(VLLM).trace
    assert trace is not None
    assert [step.emitted for step in trace.steps] == [(1,), (2, 3, 4), (5, 6)]
    assert [step.drafted for step in trace.steps] == [(), (2, 3, -1), (5, -1, -1)]
    summary = trace.summary()
    assert (summary.tokens, summary.drafted, summary.accepted) == (6, 6, 3)
    assert read(VLLM).content["names"]["4"] == " d"


def test_tokens_without_a_place_are_counted_not_guessed() -> None:
    loose = {**VLLM, "usage": {"completion_tokens": 9}}
    trace = read(loose).trace
    assert trace is not None and set(trace.tokens()) == {-1}
    assert trace.options["tokens_without_a_place"] == 3 and trace.options["text"] == "a b c d e f"


@pytest.mark.parametrize(
    ("content", "totals", "text"),
    [
        (SGLANG, (3, 9, 3, 7), "the answer"),
        (LLAMA, (63, 25, 17, 80), "To create a Python list of strings from 1 to 12"),
    ],
    ids=["sglang", "llama.cpp"],
)
def test_totals_become_a_summary(content: Any, totals: tuple[int, ...], text: str) -> None:
    found = read(content)
    assert found.trace is None
    assert tuple(found.content[name] for name in ("passes", "drafted", "accepted", "tokens")) == totals
    assert found.content["text"].startswith(text)
    assert read(found.content).acceptance == found.acceptance  # a summary reads back


def test_aiperf_records_read_back_what_was_written() -> None:
    given = read(VLLM).as_acceptance()
    record = to_aiperf(given)
    assert record["mean_acceptance_length"] == 2.5 and record["draft_acceptance_rate"] == 0.5
    assert record["acceptance_histogram"] == {"1": 1, "2": 1} and record["per_step_accepted"] == [2, 1]
    assert to_aiperf(read({"spec_decode_acceptance": record}).as_acceptance()) == record
    lines = "\n".join(json.dumps(one) for one in ({"metadata": {}}, {"spec_decode_acceptance": record}))
    assert to_aiperf(opened(lines.encode()).as_acceptance()) == record


def test_every_bundled_trace_gives_a_record_with_consistent_counts() -> None:
    from outrider.app.viewer.html import recordings

    for path in recordings().values():
        record = to_aiperf(opened(path.read_bytes()).as_acceptance())
        histogram = {int(key): count for key, count in record["acceptance_histogram"].items()}
        assert sum(histogram.values()) == record["num_spec_steps"] == len(record["per_step_accepted"])
        assert sum(key * count for key, count in histogram.items()) == record["num_accepted_draft_tokens"]
        pairs = zip(record["per_step_accepted"], record["per_step_drafted"], strict=True)
        assert all(0 <= accepted <= drafted for accepted, drafted in pairs)


def test_totals_without_a_histogram_give_no_record() -> None:
    with pytest.raises(TraceError, match="no histogram"):
        to_aiperf(read(LLAMA).as_acceptance())


def changed(**fields: Any) -> dict[str, Any]:
    metrics = {**VLLM["metrics"]["speculative_decoding"], **fields}
    return {**VLLM, "metrics": {"speculative_decoding": metrics}}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (changed(num_spec_steps=3), "total is 3"),
        (changed(per_step_accepted=[4, 1]), "step 1 accepted 4 of 3"),
        (changed(per_step_accepted=[2]), "1 entries"),
        (changed(acceptance_histogram=[0, -1]), "whole numbers"),
        (changed(num_draft_tokens="6"), "whole number"),
        ({"timings": {"predicted_n": 3, "draft_n_accepted": 4}}, "less than"),
        ({"acceptance": 1, "engine": "x", "passes": -4}, "passes is -4"),
        ({"acceptance": 1, "engine": 3}, "not a summary"),
        ({"schema": 1, "steps": []}, "no steps"),
        ({"something": 1}, "none of these"),
        (3, "none of these"),
    ],
)
def test_contradictions_are_refused(content: Any, said: str) -> None:
    with pytest.raises(TraceError, match=said):
        read(content)


def test_a_file_recorded_with_vllm_is_read() -> None:
    """tests/app/formats/vllm.json: a response of vLLM's CPU build, version 0.32.0, drafting with EAGLE-3."""
    path = Path(__file__).with_name("vllm.json")
    found = opened(path.read_bytes())
    assert found.trace is not None and found.acceptance is not None
    reported = json.loads(path.read_bytes())
    usage, metrics = reported["usage"], reported["metrics"]["speculative_decoding"]
    summary = found.trace.summary()
    assert (summary.tokens, summary.accepted) == (usage["completion_tokens"], metrics["num_accepted_draft_tokens"])
    names = found.content["names"]
    assert "".join(names[str(token)] for token in found.trace.tokens()).startswith(
        reported["choices"][0]["message"]["content"][:40]
    )


def test_an_acceptance_of_nothing_is_valid() -> None:
    nothing = Acceptance(engine="vllm", steps=(), tokens=1).filled()
    assert to_aiperf(nothing)["mean_acceptance_length"] == 1.0 and len(nothing.trace().steps) == 1
