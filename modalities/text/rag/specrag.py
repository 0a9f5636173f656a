"""One lookup, then an answer: plain RAG, and Speculative RAG, in which a small model drafts several answers and a
large one only says which to keep.

Speculative RAG ("Speculative RAG: Enhancing Retrieval Augmented Generation through Drafting", arXiv 2407.08223): the
documents found are clustered by what they say about the question, each draft sees one of every cluster, and is an
answer with its rationale; the large model scores all drafts in one pass. A draft counts by the product of how sure its
drafter was of it, how likely the large model finds it by itself, and how likely it says Yes to whether the rationale
supports it.

Ours differs: the drafter is any chat model, not one tuned to write rationales, and gives its rationale after
the answer; probabilities are geometric means over tokens, so that short drafts have no advantage. It changes what is
answered, so it is no lossless method.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.core.distribution import Sampling
from outrider.core.draft import forced
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Target
from outrider.core.trace import Step
from outrider.text.model import TextModel
from outrider.text.rag.retrievers import Embed, Numbers, Retriever
from outrider.text.tokenizer import Message
from outrider.text.training.data import outputs

PLAIN = "Here are some notes:\n{documents}\n\n{question} Answer in one sentence."
RATIONALE = "Quote the note that says so."
ALONE = "{question} Answer in one sentence, and say how you know."
SUPPORTS = "Question: {question}\nEvidence: {rationale}\nAnswer: {answer}\n\nDoes the evidence support the answer?"
YES = "Yes"


@dataclass(frozen=True)
class Draft:
    """One answer of the small model, by some of the documents, and what the large one makes of it."""

    documents: tuple[int, ...]
    rationale: str
    answer: str
    sure: float  # the drafter of what it wrote
    likely: float  # the large model, of answer and rationale, without the documents
    supported: float  # the large model: does the one support the other?

    @property
    def score(self) -> float:
        return self.sure * self.likely * self.supported


@dataclass(frozen=True)
class Reply:
    """What was answered, and by which documents."""

    text: str
    tokens: list[int]  # of the answer, for the large model
    documents: list[int]
    drafts: tuple[Draft, ...] = ()
    steps: tuple[Step, ...] = ()  # of the large model's own writing
    seconds: dict[str, float] = field(default_factory=dict)
    read: int = 0  # tokens that the large model has read
    wrote: int = 0  # tokens that the large model has written


def plain(
    lm: TextModel, retriever: Retriever, question: str, *, documents: int = 10, max_new_tokens: int = 48
) -> Reply:
    """All documents in one prompt, read and answered by the large model."""
    clock = _Clock()
    (found,) = retriever.search([retriever.encode(question)], documents)
    clock.lap("lookup")
    prompt = lm.encode(PLAIN.format(documents=_listed(retriever, found), question=question))
    out = lm.generate(prompt, drafter=None, max_new_tokens=max_new_tokens)
    clock.lap("writing")
    wrote = len(out.tokens)
    return Reply(out.text, out.tokens, found, (), out.trace.steps, clock.taken, len(prompt), wrote)


def speculative(
    lm: TextModel,
    drafter: TextModel,
    retriever: Retriever,
    embed: Embed,
    question: str,
    *,
    documents: int = 10,
    drafts: int = 5,
    each: int = 2,
    max_new_tokens: int = 48,
    seed: int = 0,
) -> Reply:
    """`drafts` answers of the small model, each by `each` of the documents found; the best one in the large model's
    eyes is the answer."""
    if documents < each or each < 1 or drafts < 1:
        raise InvalidOption(
            f"documents={documents}, each={each}, drafts={drafts}: a draft needs a document or more of those found"
        )
    clock = _Clock()
    (found,) = retriever.search([retriever.encode(question)], documents)
    parts = subsets(embed([f"{question} {retriever.passages[one]}" for one in found]), each, drafts, seed)
    shown = [[found[one] for one in part] for part in parts]
    clock.lap("lookup")
    asked = [PLAIN.format(documents=_listed(retriever, part), question=question) for part in shown]
    talks: list[list[Message]] = [[{"role": "user", "content": one}] for one in asked]
    answers, sure = _write(drafter, talks, max_new_tokens)
    for talk, answer in zip(talks, answers, strict=True):
        talk += [{"role": "assistant", "content": answer}, {"role": "user", "content": RATIONALE}]
    rationales, surer = _write(drafter, talks, max_new_tokens)
    clock.lap("drafting")
    target = lm.target()
    pairs = list(zip(rationales, answers, strict=True))
    alone = lm.encode(ALONE.format(question=question))
    judging = [lm.encode(SUPPORTS.format(question=question, rationale=why, answer=one)) for why, one in pairs]
    written = [lm.tokens.encode(f"{one}\n{why}", special=False) for why, one in pairs]
    likely = _means(target, [alone] * len(pairs), written)
    yes = lm.tokens.encode(YES, special=False)
    supported = _means(target, judging, [yes] * len(pairs))
    clock.lap("scoring")
    made = tuple(
        Draft(tuple(part), why, one, math.sqrt(a * b), c, d)
        for part, (why, one), a, b, c, d in zip(shown, pairs, sure, surer, likely, supported, strict=True)
    )
    best = max(made, key=lambda one: one.score)
    read = len(pairs) * (len(alone) + len(yes)) + sum(map(len, written)) + sum(map(len, judging))
    tokens = lm.tokens.encode(best.answer, special=False)
    return Reply(best.answer, tokens, found, made, (), clock.taken, read)


def subsets(vectors: Numbers, each: int, count: int, seed: int = 0) -> list[list[int]]:
    """`count` different choices of `each` documents, one of every cluster; fewer where there are not so many."""
    import faiss

    clusters = faiss.Kmeans(vectors.shape[1], min(each, len(vectors)), niter=20, seed=seed + 1)
    clusters.cp.min_points_per_centroid = 1  # no warning: there are few documents
    clusters.train(vectors)
    _, nearest = clusters.index.search(vectors, 1)
    groups = [[int(one) for one in np.flatnonzero(nearest[:, 0] == label)] for label in range(each)]
    groups = [group for group in groups if group]
    rng, found = random.Random(seed), list[list[int]]()
    for _ in range(20 * count):
        part = [rng.choice(group) for group in groups]
        if part not in found:
            found.append(part)
        if len(found) == count:
            break
    return found


def _write(lm: TextModel, talks: Sequence[Sequence[Message]], limit: int) -> tuple[list[str], list[float]]:
    """What a model answers in conversations, side by side, and how sure it was of it: the mean chance of a token."""
    ids = [lm.encode(one) for one in talks]
    found = outputs(lm, ids, Sampling(temperature=0, end=lm.end), limit)
    said = [one[:-1] if one and one[-1] in lm.end else one for one in found]
    return [" ".join(lm.tokens.decode(one).split()) for one in said], _means(lm.target(), ids, found)


@torch.no_grad()
def _means(target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[float]:
    """The geometric mean of the chances of each answer's tokens behind its prompt, all scored in one pass."""
    target.begin(prompts, Sampling(), frozenset())
    try:
        draft, _, _ = forced([[*one, 0] for one in answers], target.device)  # the last one is not read
        logits = target.score(draft).logits().float()
        chances = torch.log_softmax(logits[:, :-1], -1).gather(2, draft.tokens[..., None])[..., 0]
        return [
            math.exp(row[: len(one)].mean().item()) if one else 0.0 for row, one in zip(chances, answers, strict=True)
        ]
    finally:
        target.end()


def _listed(retriever: Retriever, numbers: Sequence[int]) -> str:
    return "\n".join(f"- {retriever.passages[one]}" for one in numbers)


class _Clock:
    """Seconds by what they were spent on."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.taken[name] = now - self._last
        self._last = now
