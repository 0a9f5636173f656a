"""What fewer bits cost in quality and bring in speed: perplexity and greedy agreement with 32 bits, beside plain speed.

All are measured on the same texts, teacher-forced; plain decoding is timed in turns. Knows text models and prompts.
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
_ROWS = 128  # teacher-forced a pass


@dataclass(frozen=True)
class Precision:
    """One row of the table."""

    dtype: str
    weight_bytes: int  # read by one pass
    perplexity: float
    agreement: float  # of the likeliest token with the reference's, over all positions
    tokens_per_second: float  # of plain decoding, the median over the prompts
    slowest: float
    fastest: float


@torch.no_grad()
def forced(target: Target, ids: Sequence[int]) -> tuple[float, list[int]]:
    """A text read with every token given: the sum of its tokens' negative log-probabilities from the second on, and
    the likeliest token at each of those places."""
    lost, chosen = 0.0, list[int]()
    for start in range(1, len(ids), _ROWS):
        said = torch.tensor([ids[start : start + _ROWS]], device=target.device)
        target.begin([list(ids[:start])], Sampling(), frozenset())
        try:
            guess = said[:, :-1]
            draft = Draft.guess(guess, Tree.chain(guess.shape[1], guess.device), torch.ones_like(guess).bool())
            logits = target.score(draft).logits()[0].double()
        finally:
            target.end()
        lost += float((logits.logsumexp(-1) - logits.gather(-1, said[0][:, None])[:, 0]).sum())
        chosen += logits.argmax(-1).tolist()
    return lost, chosen


def compare(
    models: dict[str, TextModel], items: Sequence[Item], *, tokens: int = 96, repeat: int = 1
) -> Iterator[Precision | str]:
    """A row for each model, under its precision's name, the reference's first; in between what is being done."""
    if REFERENCE not in models:
        raise InvalidOption(f"agreement is measured with {REFERENCE}: let it be among the precisions")
    first = models[REFERENCE]
    texts = [first.tokens.encode(item.content, special=False)[: first.context] for item in items]
    texts = [ids for ids in texts if len(ids) > 1]
    count = sum(len(ids) - 1 for ids in texts)
    read: dict[str, tuple[float, list[int]]] = {}
    for dtype, lm in models.items():
        yield f"{dtype}: reading {count:,} tokens"
        parts = [forced(lm.target(), ids) for ids in texts]
        read[dtype] = sum(lost for lost, _ in parts), [token for _, chosen in parts for token in chosen]
    speeds: dict[str, list[float]] = {dtype: [] for dtype in models}
    for number, item in enumerate([items[0], *(item for _ in range(repeat) for item in items)]):  # the first warms up
        for dtype, lm in models.items():
            yield f"{dtype}: decoding {item.id}"
            start = time.perf_counter()
            found = lm.generate(item.content, drafter=None, max_new_tokens=tokens, temperature=0.0)
            if number:
                speeds[dtype].append(len(found.tokens) / (time.perf_counter() - start))
    said = read[REFERENCE][1]
    for dtype, (lost, chosen) in read.items():
        target = models[dtype].target()
        if not isinstance(target, Decoder):
            raise Incompatible("precisions are compared on our own decoder; this model runs in transformers")
        same = sum(one == other for one, other in zip(chosen, said, strict=True)) / count
        pace = speeds[dtype]
        yield Precision(dtype, target.weight_bytes, math.exp(lost / count), same, median(pace), min(pace), max(pace))
