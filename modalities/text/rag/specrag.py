"""Plain RAG and Speculative RAG: one lookup, then an answer.

Speculative RAG ("Speculative RAG: Enhancing Retrieval Augmented Generation through Drafting", arXiv 2407.08223)
clusters the retrieved documents. A small model drafts answers with rationales, each from one document of every cluster,
and the large model scores all drafts in one pass. A draft's score is the product of three probabilities: the drafter's
for its text, the large model's for the same text without documents, and the large model's for "Yes" when asked whether
the rationale supports the answer. Ours takes any chat model as drafter, which writes its rationale after the answer,
and averages probabilities geometrically over tokens, so that short drafts have no advantage. Not lossless.
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
    """One drafted answer, the documents it used, and the three probabilities of its score."""

    documents: tuple[int, ...]
    rationale: str
    answer: str
    drafter_probability: float  # of answer and rationale
    target_probability: float  # of the same, without the documents
    support_probability: float  # of "Yes": the rationale supports the answer

    @property
    def score(self) -> float:
        return self.drafter_probability * self.target_probability * self.support_probability


@dataclass(frozen=True)
class Reply:
    """An answer and the documents it used."""

    text: str
    tokens: list[int]  # of the answer, in the large model's vocabulary
    documents: list[int]
    drafts: tuple[Draft, ...] = ()
    steps: tuple[Step, ...] = ()  # of the large model's decoding
    seconds: dict[str, float] = field(default_factory=dict)
    read: int = 0  # tokens that the large model has read
    wrote: int = 0  # tokens that the large model has written


def plain(
    lm: TextModel, retriever: Retriever, question: str, *, documents: int = 10, max_new_tokens: int = 48
) -> Reply:
    """Answer with the large model from all documents in one prompt."""
    clock = _Clock()
    (documents_found,) = retriever.search([retriever.encode(question)], documents)
    clock.lap("lookup")
    prompt = lm.encode(PLAIN.format(documents=_bullet_list(retriever, documents_found), question=question))
    out = lm.generate(prompt, drafter=None, max_new_tokens=max_new_tokens)
    clock.lap("writing")
    wrote = len(out.tokens)
    return Reply(out.text, out.tokens, documents_found, (), out.trace.steps, clock.taken, len(prompt), wrote)


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
    """Draft `drafts` answers with the small model, each from `each` documents, and return the one that the large model
    scores highest."""
    if documents < each or each < 1 or drafts < 1:
        raise InvalidOption(
            f"documents={documents}, each={each}, drafts={drafts}: each draft needs between 1 and all of the documents"
        )
    clock = _Clock()
    (retrieved,) = retriever.search([retriever.encode(question)], documents)
    parts = subsets(embed([f"{question} {retriever.passages[index]}" for index in retrieved]), each, drafts, seed)
    shown = [[retrieved[index] for index in part] for part in parts]
    clock.lap("lookup")
    prompts = [PLAIN.format(documents=_bullet_list(retriever, part), question=question) for part in shown]
    conversations: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    answers, answer_probabilities = _write(drafter, conversations, max_new_tokens)
    for conversation, answer in zip(conversations, answers, strict=True):
        conversation += [{"role": "assistant", "content": answer}, {"role": "user", "content": RATIONALE}]
    rationales, rationale_probabilities = _write(drafter, conversations, max_new_tokens)
    clock.lap("drafting")
    target = lm.target()
    pairs = list(zip(rationales, answers, strict=True))
    bare_prompt = lm.encode(ALONE.format(question=question))
    support_prompts = [
        lm.encode(SUPPORTS.format(question=question, rationale=rationale, answer=answer)) for rationale, answer in pairs
    ]
    drafted_ids = [lm.tokens.encode(f"{answer}\n{rationale}", special=False) for rationale, answer in pairs]
    target_probabilities = _means(target, [bare_prompt] * len(pairs), drafted_ids)
    yes = lm.tokens.encode(YES, special=False)
    support_probabilities = _means(target, support_prompts, [yes] * len(pairs))
    clock.lap("scoring")
    drafts_made = tuple(
        Draft(tuple(part), rationale, answer, math.sqrt(a * b), c, d)
        for part, (rationale, answer), a, b, c, d in zip(
            shown,
            pairs,
            answer_probabilities,
            rationale_probabilities,
            target_probabilities,
            support_probabilities,
            strict=True,
        )
    )
    best = max(drafts_made, key=lambda draft: draft.score)
    read = len(pairs) * (len(bare_prompt) + len(yes)) + sum(map(len, drafted_ids)) + sum(map(len, support_prompts))
    tokens = lm.tokens.encode(best.answer, special=False)
    return Reply(best.answer, tokens, retrieved, drafts_made, (), clock.taken, read)


def subsets(vectors: Numbers, each: int, count: int, seed: int = 0) -> list[list[int]]:
    """Return up to `count` different choices of `each` documents, one from every cluster."""
    import faiss

    clusters = faiss.Kmeans(vectors.shape[1], min(each, len(vectors)), niter=20, seed=seed + 1)
    clusters.cp.min_points_per_centroid = 1  # suppresses a warning about few documents
    clusters.train(vectors)
    _, nearest = clusters.index.search(vectors, 1)
    groups = [[int(index) for index in np.flatnonzero(nearest[:, 0] == label)] for label in range(each)]
    groups = [group for group in groups if group]
    rng, result = random.Random(seed), list[list[int]]()
    for _ in range(20 * count):
        choice = [rng.choice(group) for group in groups]
        if choice not in result:
            result.append(choice)
        if len(result) == count:
            break
    return result


def _write(lm: TextModel, conversations: Sequence[Sequence[Message]], limit: int) -> tuple[list[str], list[float]]:
    """Answer conversations in one batch; return the texts and the geometric mean probability of their tokens."""
    prompts = [lm.encode(conversation) for conversation in conversations]
    answers = outputs(lm, prompts, Sampling(temperature=0, end=lm.end), limit)
    without_end = [answer[:-1] if answer and answer[-1] in lm.end else answer for answer in answers]
    texts = [" ".join(lm.tokens.decode(answer).split()) for answer in without_end]
    return texts, _means(lm.target(), prompts, answers)


@torch.no_grad()
def _means(target: Target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]) -> list[float]:
    """Return the geometric mean probability of each answer's tokens after its prompt, from one pass."""
    target.begin(prompts, Sampling(), frozenset())
    try:
        draft, _, _ = forced(
            [[*answer, 0] for answer in answers], target.device
        )  # the distribution after the last token is not needed
        logits = target.score(draft).logits().float()
        probabilities = torch.log_softmax(logits[:, :-1], -1).gather(2, draft.tokens[..., None])[..., 0]
        return [
            math.exp(row[: len(answer)].mean().item()) if answer else 0.0
            for row, answer in zip(probabilities, answers, strict=True)
        ]
    finally:
        target.end()


def _bullet_list(retriever: Retriever, numbers: Sequence[int]) -> str:
    return "\n".join(f"- {retriever.passages[index]}" for index in numbers)


class _Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.taken: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.taken[name] = now - self._last
        self._last = now
