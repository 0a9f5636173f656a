"""Plain decoding of many rows, against the decoding loop."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.rules.exact import Exact
from outrider.text.training.generation import continue_rows, draws_simply

CONFIG = Config(vocabulary=60, hidden_size=32, layers=2, heads=4, kv_heads=2, head_dim=8, intermediate_size=40)


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    return Decoder.random(CONFIG, 0)


def _prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 70, (count,), generator=generator).tolist()
    return [torch.randint(0, 60, (length,), generator=generator).tolist() for length in lengths]


def test_greedy_rows_are_those_of_the_loop(decoder: Decoder) -> None:
    prompts, sampling = _prompts(24), Sampling(temperature=0.0, end=(3, 5, 8, 11))
    answers: list[list[int]] = [[] for _ in prompts]
    for step in decode(decoder, None, Exact(), prompts, sampling=sampling, max_new_tokens=70):
        answers[step.row] += step.emitted
    assert continue_rows(decoder, prompts, sampling, 70) == answers
    assert len({len(answer) for answer in answers}) > 3  # rows that end are dropped, others go on
    assert continue_rows(decoder, prompts, sampling, 7) == [answer[:7] for answer in answers]
    assert continue_rows(decoder, [], sampling, 7) == [] and continue_rows(decoder, [[1]], sampling, 0) == [[]]


def test_rows_at_a_temperature_have_the_distribution(decoder: Decoder) -> None:
    rows, sampling = 4000, Sampling(temperature=0.8, top_p=0.9)
    drawn = torch.tensor(continue_rows(decoder, [[1, 2, 3]] * rows, sampling, 1, seed=4))[:, 0]
    state = decoder.begin([[1, 2, 3, 0]], sampling, frozenset({"last"})).hidden["last"][0, 2]
    probs = (decoder.network.logits(state[None])[0] / 0.8).softmax(-1)
    order = probs.argsort(descending=True)
    kept = order[probs[order].cumsum(0) - probs[order] < 0.9]
    expected = torch.zeros(60).index_copy_(0, kept, probs[kept] / probs[kept].sum())
    counted = torch.bincount(drawn, minlength=60) / rows
    assert not counted[expected == 0].any()
    assert float((counted - expected).abs().sum()) / 2 < 0.04


def test_only_plain_sampling_is_drawn_so() -> None:
    assert draws_simply(Sampling(temperature=0.9, top_p=0.95))
    assert not draws_simply(Sampling(repetition_penalty=1.1)) and not draws_simply(Sampling(min_p=0.1))
