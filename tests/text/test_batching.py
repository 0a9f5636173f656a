"""lm.batch(): requests in a continuous batch give the outputs of generate()."""

from __future__ import annotations

import pytest

from outrider.core.errors import InvalidOption
from outrider.text import TextModel

PROMPTS = ["the cat sat", "a quick brown fox", "seven wizards play", "rain", "the dog sat on the log while the rain"]


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "auto"])
def test_requests_give_the_same_output_as_alone(lm: TextModel, drafter: str | None) -> None:
    options = {"costs": "1:10 2:11 8:14"} if drafter == "auto" else {}
    with lm.batch(rows=2, drafter=drafter, stop=["o"], logprobs=True, drafter_options=options) as batch:
        asked = [batch.add(one, 5 + place) for place, one in enumerate(PROMPTS)]
        pieces = dict.fromkeys(range(len(PROMPTS)), "")
        for piece in batch:
            assert batch.active <= 2
            pieces[piece.row] += piece.text
    for place, (prompt, request) in enumerate(zip(PROMPTS, asked, strict=True)):
        alone = lm.generate(
            prompt, drafter=drafter, stop=["o"], max_new_tokens=5 + place, logprobs=True, drafter_options=options
        )
        result = request.result
        assert (result.text, result.tokens, result.finish_reason) == (alone.text, alone.tokens, alone.finish_reason)
        assert result.text == pieces[request.number] == request.text
        assert result.logprobs == pytest.approx(alone.logprobs, abs=1e-4)
        assert result.trace.summary().tokens == len(result.tokens)
    assert batch.idle and batch.cache_bytes == 0


def test_a_request_seed_gives_the_same_output_as_alone(lm: TextModel) -> None:
    batch = lm.batch(rows=3, drafter="prompt-lookup", temperature=0.9, max_new_tokens=12)
    asked = [batch.add("the cat sat", seed=seed) for seed in (1, 2, 3, 4)]
    for _ in batch:
        pass
    texts = [one.text for one in asked]
    assert len(set(texts)) > 1
    again = lm.batch(rows=1, drafter="prompt-lookup", temperature=0.9, max_new_tokens=12)
    alone = again.add("the cat sat", seed=3)
    for _ in again:
        pass
    assert alone.text == texts[2]


def test_a_common_beginning_is_read_once(lm: TextModel) -> None:
    prompts = [f"the quick brown fox and the lazy dog sat on {place}" for place in ("logs", "mats", "mats")]
    with lm.batch(rows=2, drafter=None, max_new_tokens=5) as batch:
        asked = [batch.add(prompt) for prompt in prompts]
        for _ in batch:
            pass
        assert asked[0].reused == 0 < asked[1].reused <= asked[2].reused == len(asked[2].prompt) - 1
        assert asked[2].result.trace.options["reused"] == asked[2].reused
        assert batch.reused_tokens == sum(request.reused for request in asked)
        assert batch.prefix_bytes > 0
    for prompt, request in zip(prompts, asked, strict=True):
        assert request.tokens == lm.generate(prompt, drafter=None, max_new_tokens=5).tokens
    with lm.batch(rows=2, prefix_memory=None, drafter=None, max_new_tokens=2) as batch:
        asked = [batch.add(prompt) for prompt in prompts]
        for _ in batch:
            pass
        assert batch.reused_tokens == batch.prefix_bytes == 0


def test_cancelling_ends_only_one_request(lm: TextModel) -> None:
    batch = lm.batch(rows=2, drafter=None)
    asked = [batch.add(prompt, 8) for prompt in PROMPTS[:3]]
    batch.round()
    asked[0].cancel()
    asked[0].cancel()
    for piece in batch:
        assert piece.row != 0
    assert asked[0].cancelled and asked[0].done and asked[0].finish_reason is None and len(asked[0].tokens) == 1
    assert asked[1].text == lm.generate(PROMPTS[1], drafter=None, max_new_tokens=8).text
    assert all(one.finish_reason is not None for one in asked[1:])


def test_invalid_options_raise(lm: TextModel) -> None:
    from outrider.core.drafters.lookup.prompt_lookup import PromptLookup

    with pytest.raises(InvalidOption, match="drafter's name"):
        lm.batch(drafter=PromptLookup())
    with pytest.raises(InvalidOption, match="no room"):
        lm.batch(drafter=None).add([5] * 600)
    with pytest.raises(InvalidOption, match="option"):
        lm.batch(droughter=None)  # type: ignore[call-arg]
