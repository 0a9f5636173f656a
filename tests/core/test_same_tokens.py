"""A seed gives a request the same tokens alone, in a batch and where rows enter and leave, under sampling, for every
drafter but those that choose by the number of rows.

The default run draws a few requests for the drafters with code of their own for one row, many rows or both. The whole
table, `OUTRIDER_REQUESTS=500 pytest tests/core/test_same_tokens.py -m ""`, takes hours of one core; in it is SmolLM2,
too, in 16 bits or in OUTRIDER_DTYPE, with the heads and inputs that users get (`-k smollm2`).
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import islice
from typing import Any, cast

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.kernels import native
from outrider.core.methods import DRAFTERS, make_rule
from outrider.core.protocol import Drafter
from outrider.core.step_recorder import Record
from outrider.core.testing.conformance import random_draft_head, trial_drafter
from outrider.core.testing.soak import SoakRequest, decode_alone, random_requests
from outrider.core.testing.table_target import TableTarget
from outrider.text.model import TextModel
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter

COUNT = int(os.environ.get("OUTRIDER_REQUESTS", "0"))
CONFIG = Config(vocabulary=61, hidden_size=16, layers=2, heads=2, kv_heads=1, head_dim=8, intermediate_size=24)
SAMPLINGS = {"0.8": Sampling(temperature=0.8, end=(3,)), "1": Sampling(end=(3,))}
BY_ROWS = {"adaptive", "auto", "guarded"}  # draft as many tokens as pay for the rows that share a pass
ALONE = ("draft-verify", "swift", "draft-on-the-fly", "sparse-cache", "triforce", "qspec")  # need views of the target
NEVER_FLOWING = (*ALONE, "pass", "layer-skip", "kangaroo")  # rows of a continuous batch lack what these read or feed
NAMES = [name for name in DRAFTERS if name not in BY_ROWS]
FEW = (
    "top-k-tree",
    "dynamic-tree",
    "specexec",
    "predrafted",
    "pearl",
    "draft-model",
    "cs-drafting",
    "eagle3",
    "swift",
    "ctc",
)


@cache
def network(eps: float = 1e-6) -> Any:
    return Decoder.random(replace(CONFIG, norm_eps=eps), 1, dtype=torch.float64).network


@cache
def smollm2() -> TextModel:
    from outrider import text

    return text.load("smollm2-135m", dtype=os.environ.get("OUTRIDER_DTYPE", "bfloat16"))


def table(blur: float = 0.0) -> TableTarget:
    return TableTarget(61, 1, sharpness=2.0, blur=blur)


def maker(name: str, target: Callable[[], Any], draft: Callable[[], Any]) -> Callable[[], Drafter]:
    method = DRAFTERS[name]
    if method.draft_head is not None:
        head = random_draft_head(method, target(), vocabulary=0)
        return lambda: method.make(head)
    return lambda: trial_drafter(method, method.test_options[0], draft)


def together(requests: Sequence[SoakRequest], target: Any, drafter: Drafter, sampling: Sampling) -> list[list[int]]:
    """Batches of eight that start together."""
    tokens: list[list[int]] = [[] for _ in requests]
    for step in decode(
        target,
        drafter,
        make_rule("exact"),
        [request.prompt for request in requests],
        sampling=sampling,
        max_new_tokens=[request.limit for request in requests],
        seed=[request.seed for request in requests],
        record=Record(nodes=False),
    ):
        tokens[step.row] += step.emitted
    return tokens


def flowing(
    requests: Sequence[SoakRequest], target: Any, make: Callable[[], Drafter], sampling: Sampling
) -> dict[int, list[int]]:
    """A continuous batch in which requests arrive by and by, and some are cancelled -> the tokens of the others."""
    batch = ContinuousBatch(target, make, make_rule("exact"), sampling=sampling, rows=6)
    late, rng, tokens = iter(enumerate(requests)), random.Random(5), dict[int, list[int]]()
    index_of: dict[int, int] = {}
    cancelled = 0
    while True:
        while batch.waiting < 2 and (request := next(late, None)) is not None:
            index, wanted = request
            index_of[batch.add(wanted.prompt, wanted.limit, seed=wanted.seed)] = index
            tokens[index] = []
        if batch.idle:
            break
        for step in batch.round():
            tokens[index_of[step.row]] += step.emitted
            if step.finish is not None:
                del index_of[step.row]
        if rng.random() < 0.05 and index_of and cancelled < len(requests) // 5:
            number = rng.choice(list(index_of))
            batch.cancel(number)
            cancelled += 1
            del tokens[index_of.pop(number)]
    batch.close()
    return tokens


def differing(name: str, kind: str, sampling: Sampling, count: int) -> int:
    vocabulary, longest = 61, (30, 24)
    if kind == "table":
        target: Callable[[], Any] = table
        make = maker(name, table, lambda: table(0.3))
    elif kind == "smollm2":
        lm, vocabulary, longest = smollm2(), 49152, (8, 8)
        target, sampling = lm.target, replace(sampling, end=lm.end)
        make = lambda: cast(Drafter, resolve_drafter(lm, Options(drafter=name)).made)  # noqa: E731
    else:
        target = lambda: Decoder(network())  # noqa: E731
        make = maker(name, target, lambda: Decoder(network(0.3)))
    requests = list(islice(random_requests(vocabulary, 3, *longest), count))
    alone = [decode_alone(request, target(), make, make_rule("exact"), sampling=sampling) for request in requests]
    starts = range(0, count, 8)
    batches = [row for start in starts for row in together(requests[start : start + 8], target(), make(), sampling)]
    wrong = sum(batched != single for batched, single in zip(batches, alone, strict=True))
    if kind != "table" and name not in NEVER_FLOWING:
        rows = flowing(requests, target(), make, sampling)
        assert len(rows) > count // 2
        wrong += sum(rows[index] != alone[index] for index in rows)
    return wrong


@pytest.mark.slow
@pytest.mark.parametrize("temperature", SAMPLINGS)
@pytest.mark.parametrize("kind", ["table", "decoder", *["smollm2"] * bool(COUNT)])
@pytest.mark.parametrize("name", NAMES if COUNT else FEW)
def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch(name: str, kind: str, temperature: str) -> None:
    if kind == "smollm2" and not (name in smollm2().drafters and smollm2().drafters[name].ready):
        pytest.skip("it is for images or speech, or needs a model or a file that the user gives")
    if kind == "decoder" and name in ALONE:
        pytest.skip("drafts with a view of the target, which the tests of its own file cover")
    if not COUNT and (kind == "table") == (temperature == "1"):
        pytest.skip("one temperature each by default")
    assert differing(name, kind, SAMPLINGS[temperature], COUNT or 12) == 0


@pytest.mark.slow
@pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")
@pytest.mark.parametrize("vocabulary", [96, 91])  # 91: not whole tiles
@pytest.mark.parametrize("name", ["draft-model", "eagle3"])
def test_compiled_drafts_are_those_of_a_batch(name: str, vocabulary: int) -> None:
    """In bfloat16 chains are drawn, and trees grown, in one call of the compiled kernels."""
    shape = replace(CONFIG, vocabulary=vocabulary, hidden_size=64, head_dim=32, intermediate_size=96)
    networks = [Decoder.random(replace(shape, layers=n), 3, dtype=torch.bfloat16, gain=3.0).network for n in (2, 1)]
    target = lambda: Decoder(networks[0])  # noqa: E731
    make, sampling = maker(name, target, lambda: Decoder(networks[1])), SAMPLINGS["0.8"]
    requests = list(islice(random_requests(vocabulary, seed=3, max_tokens=24), COUNT or 16))
    alone = [decode_alone(request, target(), make, make_rule("exact"), sampling=sampling) for request in requests]
    starts = range(0, len(requests), 8)
    batches = [row for start in starts for row in together(requests[start : start + 8], target(), make(), sampling)]
    assert batches == alone
    rows = flowing(requests, target(), make, sampling)
    assert [rows[index] for index in rows] == [alone[index] for index in rows]
