"""Compares weight precisions: perplexity and greedy agreement with 32 bits (teacher-forced), and plain decoding speed.

All precisions use the same texts, and decoding is timed in turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from outrider.core.bench.runner import Item
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Target
from outrider.core.tree import Tree
from outrider.text.model import TextModel

REFERENCE = "float32"
PRECISIONS = ("bfloat16", "int8", "int4")
_CHUNK = 128  # teacher-forced tokens per pass


@dataclass(frozen=True)
class Precision:
    """One row of the table."""

    dtype: str
    weight_bytes: int  # read per pass
    perplexity: float
    agreement: float  # share of positions with the same likeliest token as the reference
    tokens_per_second: float  # plain decoding, median over the prompts
    slowest: float
    fastest: float


@torch.no_grad()
def forced(target: Target, ids: Sequence[int]) -> tuple[float, list[int]]:
    """Read a text teacher-forced; return the sum of the negative log-probabilities from the second token on, and the
    likeliest token at each of these positions."""
    loss, chosen = 0.0, list[int]()
    for start in range(1, len(ids), _CHUNK):
        tokens = torch.tensor([ids[start : start + _CHUNK]], device=target.device)
        target.begin([list(ids[:start])], Sampling(), frozenset())
        try:
            drafted = tokens[:, :-1]
            draft = Draft.guess(drafted, Tree.chain(drafted.shape[1], drafted.device), torch.ones_like(drafted).bool())
            logits = target.score(draft).logits()[0].double()
        finally:
            target.end()
        loss += float((logits.logsumexp(-1) - logits.gather(-1, tokens[0][:, None])[:, 0]).sum())
        chosen += logits.argmax(-1).tolist()
    return loss, chosen


def compare(
    models: dict[str, TextModel], items: Sequence[Item], *, tokens: int = 96, repeat: int = 1
) -> Iterator[Precision | str]:
    """Yield a row for each model, keyed by precision, and progress messages (strings) before them."""
    if REFERENCE not in models:
        raise InvalidOption(f"agreement is measured with {REFERENCE}; add it to the precisions")
    first = models[REFERENCE]
    texts = [first.tokens.encode(item.content, special=False)[: first.context] for item in items]
    texts = [ids for ids in texts if len(ids) > 1]
    count = sum(len(ids) - 1 for ids in texts)
    readings: dict[str, tuple[float, list[int]]] = {}
    for dtype, lm in models.items():
        yield f"{dtype}: reading {count:,} tokens"
        parts = [forced(lm.target(), ids) for ids in texts]
        readings[dtype] = sum(loss for loss, _ in parts), [token for _, chosen in parts for token in chosen]
    speeds: dict[str, list[float]] = {dtype: [] for dtype in models}
    for number, item in enumerate(
        [items[0], *(item for _ in range(repeat) for item in items)]
    ):  # the first is a warm-up
        for dtype, lm in models.items():
            yield f"{dtype}: decoding {item.id}"
            start = time.perf_counter()
            result = lm.generate(item.content, drafter=None, max_new_tokens=tokens, temperature=0.0)
            if number:
                speeds[dtype].append(len(result.tokens) / (time.perf_counter() - start))
    reference_choices = readings[REFERENCE][1]
    for dtype, (loss, chosen) in readings.items():
        target = models[dtype].target()
        if not isinstance(target, Decoder):
            raise Incompatible("precisions can only be compared on our own decoder; this model runs in transformers")
        same = (
            sum(choice == reference_choice for choice, reference_choice in zip(chosen, reference_choices, strict=True))
            / count
        )
        speed = speeds[dtype]
        yield Precision(dtype, target.weight_bytes, math.exp(loss / count), same, median(speed), min(speed), max(speed))
