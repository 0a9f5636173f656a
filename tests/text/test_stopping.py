"""Stopping criteria: applied after every token, on the output's own path, whatever a pass commits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.errors import InvalidOption
from outrider.text import TextModel

PROMPT = "the cat sat on the mat and the cat sat on"
OPTIONS: dict[str, Any] = {"raw": True, "max_new_tokens": 24}


class SumOver:
    """Stops once the ids sum to more than a bound, and records the lengths that it sees."""

    def __init__(self, bound: int) -> None:
        self.bound, self.lengths = bound, list[int]()

    def __call__(self, ids: Tensor, scores: Any) -> Tensor:
        assert ids.shape[0] == 1 and scores is None
        self.lengths.append(ids.shape[1])
        return torch.tensor([int(ids.sum()) > self.bound])


def bound(lm: TextModel, count: int, sampled: dict[str, Any]) -> int:
    """The sum of ids that the output passes with its token number `count`."""
    free = lm.generate(PROMPT, drafter=None, **OPTIONS, **sampled)
    return sum(free.prompt) + sum(free.tokens[:count]) - 1


@pytest.mark.parametrize("drafter", [None, "prompt-lookup", "suffix", "jacobi", "draft-model", "dynamic-tree", "swift"])
@pytest.mark.parametrize("sampled", [{}, {"temperature": 1.0, "rule": "gumbel-match"}], ids=["greedy", "sampled"])
def test_every_drafter_stops_at_the_same_token(lm: TextModel, drafter: str | None, sampled: dict[str, Any]) -> None:
    criterion = SumOver(bound(lm, 13, sampled))
    options = OPTIONS | sampled | ({"draft_model": lm} if drafter in ("draft-model", "dynamic-tree") else {})
    free = lm.generate(PROMPT, drafter=None, **OPTIONS, **sampled)
    result = lm.generate(PROMPT, drafter=drafter, stopping_criteria=criterion, **options)
    assert result.tokens == free.tokens[:13] and result.finish_reason == "stop"
    assert result.text == lm.tokens.decode(result.tokens)
    assert criterion.lengths == list(range(len(result.prompt) + 1, len(result.prompt) + 14)), "each length once"
    assert result.trace.options["stopping_criteria"] == "SumOver"


def test_batches_stop_row_by_row(lm: TextModel) -> None:
    from transformers import MaxLengthCriteria

    criteria = [MaxLengthCriteria(30), SumOver(bound(lm, 5, {}))]
    prompts = [PROMPT, "a quick brown fox jumps over"]
    alone = [lm.generate(prompt, drafter=None, stopping_criteria=criteria, **OPTIONS).tokens for prompt in prompts]
    together = lm.generate(prompts, drafter="suffix", stopping_criteria=criteria, **OPTIONS)
    assert [one.tokens for one in together] == alone and len(alone[0]) == 5
    batch = lm.batch(rows=2, drafter="prompt-lookup", stopping_criteria=criteria, **OPTIONS)
    requests = [batch.add(prompt) for prompt in prompts]
    list(batch)
    assert [request.tokens for request in requests] == alone


def test_the_earlier_of_a_string_and_a_criterion_ends_the_text(lm: TextModel) -> None:
    free = lm.generate(PROMPT, drafter=None, **OPTIONS)
    string = free.text[4:7]
    by_string = lm.generate(PROMPT, stop=string, **OPTIONS)
    both = lm.generate(PROMPT, stop=string, stopping_criteria=SumOver(bound(lm, 20, {})), **OPTIONS)
    assert both.text == by_string.text == free.text[: free.text.index(string)]
    early = lm.generate(PROMPT, stop=string, stopping_criteria=SumOver(bound(lm, 1, {})), **OPTIONS)
    assert early.tokens == free.tokens[:1]


def test_what_is_no_function_is_refused(lm: TextModel) -> None:
    with pytest.raises(InvalidOption, match="stopping_criteria is 3"):
        lm.generate(PROMPT, stopping_criteria=3, **OPTIONS)
