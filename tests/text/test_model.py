"""Text generation on a tiny random model: every option, batches, conversations and errors."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider import text
from outrider.core.errors import InvalidOption
from outrider.core.trace import Trace
from outrider.text import TextModel
from outrider.text.options import Options

RAW: dict[str, Any] = {"raw": True, "max_new_tokens": 24}
PROMPTS = ["the cat sat on", "a quick brown fox jumps over the lazy dog and the rain", "é"]


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "jacobi"])
@pytest.mark.parametrize("extra", [{}, {"temperature": 1.0, "rule": "gumbel-match"}])
def test_drafting_changes_no_token(drafter: str | None, extra: dict[str, Any], lm: TextModel) -> None:
    plain = lm.generate(PROMPTS[0], drafter=None, **RAW, **extra)
    other = lm.generate(PROMPTS[0], drafter=drafter, **RAW, **extra)
    assert other.tokens == plain.tokens
    assert other.text == plain.text == lm.tokens.decode(plain.tokens)
    assert other.trace.method == (drafter or "plain")
    assert other.trace.lossless


def test_a_batch_row_gives_the_same_output_as_alone(lm: TextModel) -> None:
    together = lm.generate(PROMPTS, drafter="prompt-lookup", **RAW)
    alone = [lm.generate(prompt, drafter="prompt-lookup", **RAW) for prompt in PROMPTS]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.trace.tokens(row) for row, result in enumerate(together)] == [result.tokens for result in alone]


def test_a_string_is_a_users_message_and_raw_a_prefix(lm: TextModel) -> None:
    message = lm.encode("the cat")
    assert message == lm.encode([{"role": "user", "content": "the cat"}])
    assert lm.tokens.decode(message, special=True) == "<|im_start|>user\nthe cat<|im_end|>\n<|im_start|>assistant\n"
    assert lm.tokens.decode(lm.encode("the cat", raw=True), special=True) == "the cat"
    assert lm.encode([5, 6, 7]) == [5, 6, 7]


def test_a_model_without_a_template_continues_strings(tiny: SimpleNamespace, tmp_path: Path) -> None:
    base = text.load(tiny.write(tmp_path / "base", template=None), dtype="float32")
    assert base.encode("the cat") == base.encode("the cat", raw=True)


def test_streamed_pieces_are_the_text(lm: TextModel) -> None:
    for drafter in (None, "jacobi"):
        stream = lm.stream(PROMPTS, drafter=drafter, **RAW)
        shown = ["", "", ""]
        for piece in stream:
            shown[piece.row] += piece.text
        assert shown == [result.text for result in stream.results]
        assert shown == [lm.tokens.decode(one.tokens) for one in stream.results]


def test_closing_a_stream_keeps_its_text_and_the_model_usable(lm: TextModel) -> None:
    stream = lm.stream(PROMPTS[0], drafter=None, **RAW)
    for _ in range(5):
        next(stream)
    stream.close()
    (result,) = stream.results
    assert len(result.tokens) == 5
    assert result.finish_reason is None
    assert lm.generate(PROMPTS[0], drafter=None, **RAW).tokens[:5] == result.tokens


def test_two_interleaved_streams_are_independent(lm: TextModel) -> None:
    alone = [lm.generate(prompt, drafter=None, **RAW).tokens for prompt in PROMPTS[:2]]
    one, two = (lm.stream(prompt, drafter="prompt-lookup", **RAW) for prompt in PROMPTS[:2])
    open_ = [one, two]
    while open_:
        open_ = [stream for stream in open_ if next(stream, None) is not None]
    assert [one.results[0].tokens, two.results[0].tokens] == alone


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "jacobi"])
def test_a_stop_string_ends_the_text_across_token_boundaries(drafter: str | None, lm: TextModel) -> None:
    whole = lm.generate(PROMPTS[0], drafter=None, **RAW).text
    for start in range(1, 12, 2):
        stop = whole[start : start + 3]
        out = lm.generate(PROMPTS[0], drafter=drafter, stop=["never there", stop], **RAW)
        assert out.text == whole[: whole.index(stop)]
        assert out.finish_reason == "stop"
        assert stop in lm.tokens.decode(out.tokens), "its tokens stay, the text ends before it"
        assert stop not in lm.tokens.decode(out.tokens[:-1])


def test_the_end_token_ends_the_text(lm: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = lm.generate(PROMPTS[0], drafter=None, **RAW)
    assert whole.finish_reason == "length"
    monkeypatch.setattr(lm, "end", (whole.tokens[6],))
    first = whole.tokens.index(whole.tokens[6])
    for drafter in (None, "jacobi"):
        out = lm.generate(PROMPTS[0], drafter=drafter, **RAW)
        assert out.tokens == whole.tokens[: first + 1]
        assert out.finish_reason == "stop"


def test_seeds(lm: TextModel) -> None:
    def drawn(seed: int | torch.Generator, **more: Any) -> list[int]:
        return lm.generate(PROMPTS[0], temperature=1.0, seed=seed, drafter="prompt-lookup", **RAW, **more).tokens

    assert drawn(3) == drawn(3) != drawn(4)
    generator = torch.Generator().manual_seed(0)
    first, second = drawn(generator), drawn(generator)
    assert first != second, "a generator moves on"
    assert first == drawn(torch.Generator().manual_seed(0))
    state = torch.random.get_rng_state()
    drawn(1)
    assert torch.equal(state, torch.random.get_rng_state()), "torch's own generator is left alone"


def test_sampling_options_reach_the_distribution(lm: TextModel) -> None:
    greedy = lm.generate(PROMPTS[0], drafter=None, **RAW).tokens
    for narrow in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 0.999}):
        options: dict[str, Any] = {"temperature": 1.0, "drafter": None, **narrow, **RAW}
        assert lm.generate(PROMPTS[0], **options).tokens == greedy
    penalised = lm.generate(PROMPTS[0], drafter=None, frequency_penalty=100.0, **RAW).tokens
    assert len(set(penalised)) == len(penalised)


def test_logprobs_and_alternatives(lm: TextModel) -> None:
    out = lm.generate(PROMPTS[0], drafter="jacobi", logprobs=True, alternatives=3, temperature=1.0, **RAW)
    assert out.logprobs is not None
    assert len(out.logprobs) == len(out.tokens)
    target = lm.target()
    from outrider.core.distribution import Sampling
    from outrider.core.draft import Draft

    for place in (0, 5, 11):
        target.begin([out.prompt + out.tokens[:place]], Sampling(), frozenset())
        distribution = target.score(Draft.empty(1)).distributions().probs[0, 0]
        assert out.logprobs[place] == pytest.approx(float(distribution[out.tokens[place]].log()), abs=1e-4)
    assert all(len(three) == 3 for step in out.trace.steps for three in step.alternatives)
    assert lm.generate(PROMPTS[0], **RAW).logprobs is None


def test_the_trace_records_its_settings_and_round_trips(lm: TextModel) -> None:
    out = lm.generate(PROMPTS[0], drafter="prompt-lookup", drafter_options={"length": 3}, seed=9, top_k=50, **RAW)
    trace = Trace.from_json(out.trace.to_json())
    assert trace == out.trace
    assert trace.seed == 9
    assert trace.memory > 0
    assert trace.options == {
        "model": "tiny",
        "dtype": "float32",
        "max_new_tokens": 24,
        "temperature": 0.0,
        "top_k": 50,
        "raw": True,
        "drafter.length": 3,
    }


def test_the_next_turn_reads_only_new_tokens(lm: TextModel) -> None:
    talk, last = [{"role": "user", "content": "the cat sat on the mat"}], 0
    for turn in range(3):
        lm_fresh = lm.generate([talk], drafter=None, max_new_tokens=12)[0]  # a batch keeps no cache
        out = lm.generate(talk, drafter="prompt-lookup", max_new_tokens=12)
        assert out.tokens == lm_fresh.tokens, "with the cache or without"
        reused = out.trace.options["reused"]
        assert isinstance(reused, int)
        talk = [*talk, {"role": "assistant", "content": out.text}, {"role": "user", "content": f"and then {turn}?"}]
        assert reused >= last, "at least the prompt of the turn before"
        last = len(out.prompt)
    again = [talk[0], {"role": "assistant", "content": "another answer"}, {"role": "user", "content": "why?"}]
    out = lm.generate(again, drafter=None, max_new_tokens=12)
    assert out.tokens == lm.generate([again], drafter=None, max_new_tokens=12)[0].tokens, (
        "where they part, it goes back"
    )
    lm.forget()
    assert lm.generate(again, drafter=None, max_new_tokens=2).trace.options["reused"] == 0


def test_an_interrupted_turn_can_be_continued(lm: TextModel) -> None:
    talk = [{"role": "user", "content": "the dog sat on the log"}]
    stream = lm.stream(talk, drafter="jacobi", max_new_tokens=20)
    next(stream)
    stream.close()
    out = lm.generate(talk, drafter=None, max_new_tokens=20, temperature=1.0, rule="gumbel-match", presence_penalty=0.5)
    alone = lm.generate(
        [talk], drafter=None, max_new_tokens=20, temperature=1.0, rule="gumbel-match", presence_penalty=0.5
    )
    assert out.tokens == alone[0].tokens
    assert out.trace.options["reused"]


def test_a_second_model_drafts(lm: TextModel, tiny: SimpleNamespace, tmp_path: Path) -> None:
    small = text.load(tiny.write(tmp_path / "small", seed=1), dtype="float32")
    plain = lm.generate(PROMPTS[0], drafter=None, **RAW)
    for model in (small, lm):
        out = lm.generate(PROMPTS[0], drafter="draft-model", drafter_options={"model": model, "length": 3}, **RAW)
        assert out.tokens == plain.tokens
    assert out.trace.summary().acceptance_rate == 1.0, "it agrees with itself"


def test_the_answer_ends_at_the_context_limit(tiny: SimpleNamespace, tmp_path: Path) -> None:
    short = text.load(tiny.write(tmp_path / "short", max_position_embeddings=32), dtype="float32")
    out = short.generate(list(range(3, 23)), drafter=None)
    assert len(out.tokens) == 12
    assert out.finish_reason == "length"
    with pytest.raises(InvalidOption, match="no room for output"):
        short.generate(list(range(3, 35)))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        (" \n", {}, "the prompt is empty"),
        ("", {"raw": True}, "the prompt is empty"),
        ([], {}, "at least one"),
        ([[]], {}, "conversation is empty"),
        (7, {}, "the prompt is a int"),
        ({"role": "user", "content": "x"}, {}, "the prompt is a dict"),
        ([{"role": "user", "content": "x"}, "y"], {}, "message 0|a prompt is|the prompt is"),
        ([{"role": "user", "content": "x"}], {"raw": True}, "cannot be raw"),
        ([999], {}, "contains token 999"),
        ("x", {"drafter": "medussa"}, "unknown drafter .medussa.*medusa"),
        ("x", {"rule": "exakt"}, "Did you mean 'exact'"),
        ("x", {"drafter": "prompt-lookup", "drafter_options": {"len": 3}}, "Known: .*length"),
        ("x", {"rule": "threshold", "rule_options": {"t": 3}}, "Known: threshold"),
        ("x", {"drafter": None, "drafter_options": {"length": 3}}, "drafter_options go with"),
        ("x", {"drafter": "draft-model"}, "no weights of draft-model"),
        ("x", {"max_tokens": 3}, "unknown option 'max_tokens'. Did you mean 'max_new_tokens'"),
        ("x", {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ("x", {"max_new_tokens": 1.5}, "it must be a whole number"),
        ("x", {"temperature": "hot"}, "it must be a number"),
        ("x", {"temperature": -1}, "temperature is -1"),
        ("x", {"top_p": 0.0}, "top_p is 0"),
        ("x", {"seed": 1.0}, "torch.Generator"),
        ("x", {"stop": [""]}, "stop is"),
        ("x", {"stop": [1]}, "stop is"),
        ("x", {"logprobs": 3}, "True or False"),
        ("x", {"alternatives": -1}, "alternatives is -1"),
    ],
)
def test_invalid_options_raise_before_anything_runs(
    prompt: Any, options: dict[str, Any], message: str, lm: TextModel
) -> None:
    with pytest.raises(InvalidOption, match=message):
        next(lm.stream(prompt, **options))


def test_names(lm: TextModel) -> None:
    assert next(iter(lm.drafters)) == "auto"
    assert {"prompt-lookup", "jacobi", "draft-model"} <= set(lm.drafters)
    assert {"exact", "gumbel-match", "typical"} <= set(lm.rules)
    assert "tiny" in repr(lm)


def test_what_a_call_may_say_is_what_options_has() -> None:
    from dataclasses import fields

    from outrider.text.options import Given

    assert list(Given.__annotations__) == [field.name for field in fields(Options)]
