"""N-gram drafters: tables of the tokens that followed the last few tokens, counted as the text grows.

`ANPD` (Ou et al., "Lossless acceleration of large language model via adaptive n-gram parallel decoding", arXiv
2404.08698) drafts a chain from counts of n-grams of several lengths; the longest known context decides. `NGrammys`
(Stewart et al., "The N-Grammys: accelerating autoregressive inference with learning-free batched speculation", arXiv
2411.03786) drafts several continuations: those of earlier occurrences in the text, then chains of the target's bigrams.
The paper verifies them as batch rows, ours as one tree that scores common prefixes once. Both work on token ids alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.prompt_lookup import chain_draft
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target, WeightFree
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class Counts:
    """Counts of the tokens that followed each context of 1 to `max_ngram` tokens in a growing text."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self._seen: dict[tuple[int, ...], dict[int, int]] = {}
        self._best: dict[tuple[int, ...], int] = {}

    def add(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            end = len(self.tokens)
            for length in range(1, min(self.max_ngram, end) + 1):
                context = tuple(self.tokens[end - length :])
                counts = self._seen.setdefault(context, {})
                counts[token] = counts.get(token, 0) + 1
                if counts[token] >= counts.get(self._best.get(context, token), 0):
                    self._best[context] = token  # of equal counts the latest token
            self.tokens.append(token)

    def after(self, context: Sequence[int]) -> int | None:
        """The most frequent successor of the context's longest known suffix; None if no suffix is known."""
        for length in range(min(self.max_ngram, len(context)), 0, -1):
            best = self._best.get(tuple(context[len(context) - length :]))
            if best is not None:
                return best
        return None


class ANPD(WeightFree):
    """A chain of up to `length` guesses. Each is the most frequent successor of the longest known context of up to
    `max_ngram` tokens; contexts include the guesses before it."""

    def __init__(self, *, length: int = 7, max_ngram: int = 5) -> None:
        if min(length, max_ngram) < 1:
            raise InvalidOption(f"length={length}, max_ngram={max_ngram}: both must be 1 or more")
        self.length, self.max_ngram = length, max_ngram

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._tables = []
        for prompt in prompts:
            table = Counts(self.max_ngram)
            table.add(list(prompt))
            self._tables.append(table)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        pairs = zip(self._tables, room.tolist(), strict=True)
        return chain_draft([_chain(table, min(self.length, left)) for table, left in pairs], rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for table, tokens in zip(self._tables, verdict.rows(draft), strict=True):
            table.add(tokens)

    def end(self) -> None:
        self._tables = []


def _chain(table: Counts, max_tokens: int) -> list[int]:
    """A chain of the most frequent successors, as long as they are known."""
    context = table.tokens[-table.max_ngram :]
    start = len(context)
    for _ in range(max_tokens):
        token = table.after(context[-table.max_ngram :])
        if token is None:
            break
        context.append(token)
    return context[start:]


class NGrammys(WeightFree, TrieDrafter):
    """Up to `drafts` continuations of up to `length` tokens. `model` is the target, or a copy with the same weights;
    its `bigrams` [V, K], the likeliest successors of each token, are computed at the first use if they are not
    given."""

    def __init__(
        self, model: Target, *, bigrams: Tensor | None = None, drafts: int = 3, length: int = 4, max_ngram: int = 2
    ) -> None:
        if min(drafts, length, max_ngram) < 1:
            raise InvalidOption(f"drafts={drafts}, length={length}, max_ngram={max_ngram}: each must be 1 or more")
        self.vocabulary = model.vocabulary
        if bigrams is not None and (bigrams.dim() != 2 or len(bigrams) != model.vocabulary):
            raise Incompatible(
                f"bigrams has the shape {tuple(bigrams.shape)}; for this model it must be [{model.vocabulary}, K]"
            )
        self.model, self.bigrams = model, bigrams
        self.drafts, self.length, self.max_ngram = drafts, length, max_ngram

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        if self.bigrams is None:
            self.bigrams = bigram_table(self.model, self.drafts)
        self._successors = self.bigrams.cpu().numpy()
        self._texts = [_Occurrences(self.max_ngram, prompt) for prompt in prompts]

    def tries(self, room: Sequence[int]) -> list[Trie]:
        return [self._guess(*pair) for pair in zip(self._texts, room, strict=True)]

    def _guess(self, text: _Occurrences, room: int) -> Trie:
        trie, length = Trie(), min(self.length, room)
        if length < 1:
            return trie
        chains = text.continuations(self.drafts, length)
        first_tokens = {chain[0] for chain in chains}
        for token in self._successors[text.tokens[-1]].tolist():
            if len(chains) >= self.drafts:
                break
            if token not in first_tokens:
                chain = [token]
                while len(chain) < length:
                    chain.append(int(self._successors[chain[-1], 0]))
                chains.append(chain)
        for chain in chains:
            trie.add(chain)
        trie.weights = [weight / self.drafts for weight in trie.weights]
        return trie

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for text, tokens in zip(self._texts, verdict.rows(draft), strict=True):
            text.add(tokens)

    def end(self) -> None:
        self._texts = []


class _Occurrences:
    """A growing text, with all occurrences of each of its n-grams of 1 to `max_ngram` tokens."""

    def __init__(self, max_ngram: int, prompt: Sequence[int]) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}  # n-gram -> positions after its occurrences
        self._indexed = 0  # n-grams that end here or before are in the index
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for end in range(self._indexed + 1, len(self.tokens)):  # not the last token: nothing follows it yet
            for length in range(1, min(self.max_ngram, end) + 1):
                self._ends.setdefault(tuple(self.tokens[end - length : end]), []).append(end)
        self._indexed = max(len(self.tokens) - 1, 0)

    def continuations(self, count: int, max_tokens: int) -> list[list[int]]:
        """Up to `count` distinct continuations: those of longer matches first, then the more frequent, then the
        latest."""
        distinct: dict[tuple[int, ...], None] = {}
        for length in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            ends = self._ends.get(tuple(self.tokens[len(self.tokens) - length :]), [])[-64:]
            counts: dict[tuple[int, ...], int] = {}
            for end in reversed(ends):
                continuation = tuple(self.tokens[end : end + max_tokens])
                counts[continuation] = counts.get(continuation, 0) + 1
            for continuation in sorted(counts, key=lambda chain: -counts[chain]):
                distinct.setdefault(continuation)
        return [list(continuation) for continuation in list(distinct)[:count]]


@torch.no_grad()
def bigram_table(
    model: Target,
    successors: int,
    *,
    prefix: Sequence[int] = (0,),
    chunk: int = 256,
    progress: Callable[[int], object] = lambda done: None,
) -> Tensor:
    """[V, K] the likeliest successors of every single token after a prefix, in passes of `chunk` tokens, which are
    siblings in a tree and so do not attend to one another."""
    count = min(successors, model.vocabulary)
    model.begin([list(prefix)], Sampling(), frozenset())
    try:
        tables = []
        for start in range(0, model.vocabulary, chunk):
            ids = torch.arange(start, min(start + chunk, model.vocabulary), device=model.device)[None]
            tree = Tree(torch.full_like(ids, -1), 1, ids.shape[1])
            scores = model.score(Draft.guess(ids, tree, torch.ones_like(ids, dtype=torch.bool)))
            rows = torch.arange(1, ids.shape[1] + 1, device=model.device)[None]
            tables.append(scores.logits(rows)[0].topk(count).indices)
            progress(ids.shape[1])
        return torch.cat(tables)
    finally:
        model.end()
