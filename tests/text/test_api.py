"""The API as other libraries have it: draft models, numbers of draft tokens, samples, processors, async streams."""

from __future__ import annotations

import asyncio
import inspect
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import text
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS
from outrider.text import TextModel, drafter_inputs
from outrider.text.options import Given, Options
from outrider.text.resolve_drafter import resolve_drafter
from outrider.text.stream import Piece

RAW: dict[str, Any] = {"raw": True, "max_new_tokens": 24}
PROMPT = "the cat sat on"
SAMPLED: dict[str, Any] = {"temperature": 1.0, "rule": "gumbel-match"}


@pytest.mark.parametrize("extra", [{}, SAMPLED])
def test_a_draft_model_is_named_in_the_call_or_when_loading(lm: TextModel, folder: Path, extra: dict[str, Any]) -> None:
    plain = lm.generate(PROMPT, drafter=None, **RAW, **extra)
    called = lm.generate(PROMPT, draft_model=folder, **RAW, **extra)
    loaded = text.load(folder, dtype="float32", draft_model=folder)
    given = loaded.generate(PROMPT, **RAW, **extra)
    assert called.trace.method == given.trace.method == "draft-model"
    assert called.tokens == given.tokens == plain.tokens
    assert '"policy": "confidence", "threshold": 0.9' in called.trace.options["drafter.options"]
    assert extra or called.trace.summary().tokens_per_pass == 2  # the same weights guess right, and cost as much
    assert loaded.generate(PROMPT, drafter="prompt-lookup", **RAW, **extra).tokens == plain.tokens
    assert loaded.generate(PROMPT, drafter=None, **RAW, **extra).trace.method == "plain"
    other = loaded.generate(PROMPT, drafter_options={"drafters": ["prompt-lookup"]}, **RAW, **extra)
    assert other.trace.method == "auto" and other.tokens == plain.tokens, "options of auto's own ask for auto"
    tree = lm.generate(PROMPT, drafter="dynamic-tree", draft_model=loaded, num_draft_tokens=3, **RAW, **extra)
    assert tree.tokens == plain.tokens and max(len(step.drafted) for step in tree.trace.steps) == 3


@pytest.mark.parametrize("drafter", ["draft-model", "dynamic-tree", "sampled-tree", "specexec"])
@pytest.mark.parametrize("extra", [{}, SAMPLED])
def test_a_draft_model_may_draft_its_first_tokens_only(
    lm: TextModel, folder: Path, drafter: str, extra: dict[str, Any]
) -> None:
    plain = lm.generate(PROMPT, drafter=None, **RAW, **extra)
    every = lm.generate(PROMPT, drafter=drafter, draft_model=folder, draft_vocabulary=0, **RAW, **extra)
    first = lm.generate(PROMPT, drafter=drafter, draft_model=folder, draft_vocabulary=80, **RAW, **extra)
    assert every.tokens == first.tokens == plain.tokens
    drafted = [{token for step in out.trace.steps for token in step.drafted} for out in (every, first)]
    assert max(drafted[1]) < 80 <= max(drafted[0])


def test_a_draft_model_of_many_languages_drafts_common_tokens(
    lm: TextModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where that halves its output layer, unless the user says otherwise."""
    monkeypatch.setattr(drafter_inputs, "_COMMON", 80)
    for given, most in ((None, 80), (0, lm.target().vocabulary)):
        options = Options(drafter="draft-model", draft_model=folder, draft_vocabulary=given)
        model: Any = resolve_drafter(lm, options).made
        selected = model.model.network.selected
        assert (lm.target().vocabulary if selected is None else len(selected.kept)) == most
    monkeypatch.setattr(drafter_inputs, "_COMMON", lm.target().vocabulary)
    model = resolve_drafter(lm, Options(drafter="draft-model", draft_model=folder)).made
    assert model.model.network.selected is None


def test_a_draft_model_may_be_a_model_object_of_transformers(lm: TextModel, folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    small = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    plain = lm.generate(PROMPT, drafter=None, **RAW)
    assert lm.generate(PROMPT, draft_model=small, **RAW).tokens == plain.tokens
    assert lm.generate(PROMPT, drafter="draft-model", drafter_options={"model": small}, **RAW).tokens == plain.tokens


@pytest.mark.parametrize("drafter", ["prompt-lookup", "jacobi", "suffix", "token-recycling", "anpd", "ensemble"])
def test_the_number_of_draft_tokens_is_an_upper_bound(drafter: str, lm: TextModel) -> None:
    plain = lm.generate(PROMPT, drafter=None, raw=True, max_new_tokens=60)
    for count in (1, 4):
        out = lm.generate(PROMPT, drafter=drafter, num_draft_tokens=count, raw=True, max_new_tokens=60)
        assert out.tokens == plain.tokens
        assert max(len(step.drafted) for step in out.trace.steps) == count


def test_every_option_that_limits_draft_tokens_exists() -> None:
    limited = set()
    for name, method in DRAFTERS.items():
        with suppress(InvalidOption):
            options = method.with_draft_tokens({}, 3)
            assert set(options) <= set(method.options) and set(options.values()) == {3}
            limited.add(name)
    assert len(limited) > 35 and not limited & {"sampled-tree", "lookahead", "adaptive", "guarded"}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"drafter": "suffix", "draft_model": "x"}, "takes no draft model"),
        ({"drafter": "lookahead", "num_draft_tokens": 3}, "no option for num_draft_tokens"),
        ({"drafter": None, "num_draft_tokens": 3}, "num_draft_tokens goes with"),
        ({"drafter": None, "draft_model": "x"}, "draft_model goes with"),
        ({"num_draft_tokens": 0}, "num_draft_tokens is 0"),
        ({"drafter": "suffix", "draft_vocabulary": 32}, "draft_vocabulary does nothing there"),
        ({"drafter": None, "draft_vocabulary": 32}, "draft_vocabulary goes with"),
        ({"draft_vocabulary": 33}, "a multiple of 16"),
        ({"draft_vocabulary": "many"}, "draft_vocabulary is 'many'"),
        ({"drafter": "suffix", "num_draft_tokens": 3, "drafter_options": {"nodes": 4}}, "sets nodes"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids"),
        ({"logits_processor": 3}, "logits_processor"),
        ({"n": 0}, "n is 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str, lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match=said):
        lm.generate(PROMPT, **RAW, **options)


def test_stop_token_ids_end_the_text(lm: TextModel) -> None:
    whole = lm.generate(PROMPT, drafter=None, **RAW)
    stop = whole.tokens[9]
    first = whole.tokens.index(stop)
    for drafter in (None, "jacobi"):
        out = lm.generate(PROMPT, drafter=drafter, stop_token_ids=[stop], **RAW)
        assert out.tokens == whole.tokens[: first + 1] and out.finish_reason == "stop"
    assert whole.finish_reason == "length"


def test_samples_are_those_of_their_seeds(lm: TextModel) -> None:
    options = {**RAW, "temperature": 1.0, "drafter": "prompt-lookup"}
    samples = lm.generate(PROMPT, n=3, seed=5, **options)
    assert [one.tokens for one in samples] == [lm.generate(PROMPT, seed=5 + i, **options).tokens for i in range(3)]
    assert [one.trace.seed for one in samples] == [5, 6, 7] and len({one.text for one in samples}) == 3
    assert [one.text for one in lm.generate(PROMPT, n=1, seed=6, **options)] == [samples[1].text]
    batch = lm.generate([PROMPT, "é"], n=2, seed=5, **options)
    other = [lm.generate("é", seed=seed, **options).tokens for seed in (5, 6)]
    assert [one.tokens for one in batch] == [*(one.tokens for one in samples[:2]), *other]
    assert [one.trace.seed for one in batch] == [5, 6, 5, 6]


def no_repeats(ids: Tensor, logits: Tensor) -> Tensor:
    """Forbids the last three tokens, in place."""
    logits[:, ids[0, -3:]] = -torch.inf
    return logits


def odd_places(ids: Tensor, logits: Tensor) -> Tensor:
    """Shifts the logits by the sequence's length."""
    return logits.roll(ids.shape[1] % 5, -1)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "suffix", "jacobi", "draft-model", "dynamic-tree", "layers"])
@pytest.mark.parametrize("extra", [{}, SAMPLED, {"repetition_penalty": 1.3}])
def test_processors_change_drafted_and_plain_decoding_alike(
    drafter: str, extra: dict[str, Any], lm: TextModel, folder: Path
) -> None:
    hook = [no_repeats, odd_places]
    options: dict[str, Any] = {**RAW, **extra, "logits_processor": hook}
    if drafter in ("draft-model", "dynamic-tree"):
        options["draft_model"] = folder
    drafter = "swift" if drafter == "layers" else drafter
    plain = lm.generate(PROMPT, **{**options, "drafter": None, "draft_model": None})
    out = lm.generate(PROMPT, drafter=drafter, **options)
    assert out.tokens == plain.tokens != lm.generate(PROMPT, drafter=None, **RAW, **extra).tokens
    assert out.trace.options["logits_processor"] == "no_repeats odd_places"
    if drafter == "draft-model" and extra != SAMPLED:
        assert out.trace.summary().tokens_per_pass > 3  # the draft model's logits are processed too


def test_processors_see_prompt_and_output_and_work_in_batches(lm: TextModel) -> None:
    lengths: list[int] = []

    def watched(ids: Tensor, logits: Tensor) -> Tensor:
        lengths.append(ids.shape[1])
        return no_repeats(ids, logits)

    options: dict[str, Any] = {**RAW, "logits_processor": watched}
    alone = [lm.generate(prompt, drafter=None, **options) for prompt in (PROMPT, "é")]
    assert lengths[:24] == list(range(len(alone[0].prompt), len(alone[0].prompt) + 24))
    together = lm.generate([PROMPT, "é"], drafter="suffix", **options)
    assert [one.tokens for one in together] == [one.tokens for one in alone]
    with lm.batch(rows=2, drafter="prompt-lookup", **options) as batch:
        requests = [batch.add(prompt) for prompt in ("a quick brown fox", PROMPT, "é")]
        for _ in batch:
            pass
    assert [one.tokens for one in requests[1:]] == [one.tokens for one in alone]


def test_processors_of_transformers_do(lm: TextModel) -> None:
    from transformers import NoRepeatNGramLogitsProcessor

    hook = NoRepeatNGramLogitsProcessor(2)
    plain = lm.generate(PROMPT, drafter=None, logits_processor=hook, **RAW)
    assert lm.generate(PROMPT, drafter="suffix", logits_processor=hook, **RAW).tokens == plain.tokens
    pairs = list(zip(plain.tokens, plain.tokens[1:], strict=False))
    assert len(set(pairs)) == len(pairs)


def test_a_processor_of_the_wrong_shape_is_refused(lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match="must return logits of shape"):
        lm.generate(PROMPT, drafter=None, logits_processor=lambda ids, logits: logits[0], **RAW)


def test_an_async_stream_gives_the_same_pieces(lm: TextModel) -> None:
    async def collected() -> list[Piece]:
        return [piece async for piece in lm.stream(PROMPT, drafter="jacobi", **RAW)]

    pieces = asyncio.run(collected())
    assert "".join(piece.text for piece in pieces) == lm.generate(PROMPT, drafter=None, **RAW).text
    assert pieces[-1].finish_reason == "length" and all(piece.finish_reason is None for piece in pieces[:-1])


def test_a_cancelled_async_stream_ends_its_generation(lm: TextModel) -> None:
    async def cancelled() -> Any:
        stream, started = lm.stream(PROMPT, drafter=None, raw=True, max_new_tokens=400), asyncio.Event()

        async def read() -> None:
            async for _ in stream:
                started.set()

        task = asyncio.create_task(read())
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return stream

    stream = asyncio.run(cancelled())
    (result,) = stream.results
    assert result.finish_reason is None and 0 < len(result.tokens) < 400
    assert list(stream) == []  # it is closed


def test_precisions_are_names_or_torch_dtypes(folder: Path) -> None:
    assert text.load(folder, dtype=torch.float32).dtype == "float32" and text.load(folder).dtype == "bfloat16"
    with pytest.raises(InvalidOption, match="unknown dtype 'int64'"):
        text.load(folder, dtype=torch.int64)


def test_help_shows_every_option(lm: TextModel) -> None:
    names = [each.name for each in fields(Options)]
    assert set(names) == set(Given.__annotations__)
    for method in (lm.generate, lm.stream, lm.batch):
        parameters = inspect.signature(method).parameters
        assert set(names) < set(parameters) and parameters["max_new_tokens"].default == 256
    assert len(repr(lm.generate(PROMPT, **RAW))) < 150
