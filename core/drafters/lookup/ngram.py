"""N-grams without a model: tables of what followed the last few tokens, counted as the text grows.

`ANPD` (Ou et al., "Lossless acceleration of large language model via adaptive n-gram parallel decoding", arXiv
2404.08698) drafts a chain from a table of several levels that every emitted token updates; where levels disagree the
longer context decides. `NGrammys` (Stewart et al., "The N-Grammys: accelerating autoregressive inference with
learning-free batched speculation", arXiv 2411.03786) drafts several continuations side by side: those of earlier
occurrences in the text first, then those of the target's own bigrams, extended bigram by bigram. The paper verifies
them as rows of a batch; ours are one tree, in which common beginnings are scored once. Both know token ids only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.prompt_lookup import guesses
from outrider.core.drafters.lookup.trie import Grower, Trie
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target, WeightFree
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class Counts:
    """What followed each context of 1 to `max_ngram` tokens in a growing text, and how often."""

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
                    self._best[context] = token  # the later where equal
            self.tokens.append(token)

    def after(self, context: Sequence[int]) -> int | None:
        """The token that mostly followed the longest end of a context that is known."""
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
        left = [min(self.length, one) for one in room.tolist()]
        return guesses([_chain(*pair) for pair in zip(self._tables, left, strict=True)], rng.device)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for table, tokens in zip(self._tables, verdict.rows(draft), strict=True):
            table.add(tokens)

    def end(self) -> None:
        self._tables = []


def _chain(table: Counts, most: int) -> list[int]:
    """Guess after guess, as long as the table knows what follows."""
    context = table.tokens[-table.max_ngram :]
    known = len(context)
    for _ in range(most):
        token = table.after(context[-table.max_ngram :])
        if token is None:
            break
        context.append(token)
    return context[known:]


class NGrammys(WeightFree, Grower):
    """Up to `drafts` continuations of up to `length` tokens. `model` is the target, or another of its weights; its
    `bigrams` [V, K], each token's likeliest successors, are worked out at the first use if they are not given."""

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
        self._after = self.bigrams.cpu().numpy()
        self._texts = [_Places(self.max_ngram, prompt) for prompt in prompts]

    def tries(self, room: Sequence[int]) -> list[Trie]:
        return [self._guess(*pair) for pair in zip(self._texts, room, strict=True)]

    def _guess(self, text: _Places, room: int) -> Trie:
        trie, most = Trie(), min(self.length, room)
        if most < 1:
            return trie
        chains = text.continuations(self.drafts, most)
        firsts = {chain[0] for chain in chains}
        for token in self._after[text.tokens[-1]].tolist():
            if len(chains) >= self.drafts:
                break
            if token not in firsts:
                chain = [token]
                while len(chain) < most:
                    chain.append(int(self._after[chain[-1], 0]))
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


class _Places:
    """A growing text, and where each of its n-grams of 1 to `max_ngram` tokens occurred."""

    def __init__(self, max_ngram: int, prompt: Sequence[int]) -> None:
        self.max_ngram = max_ngram
        self.tokens: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = {}
        self._known = 0
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        self.tokens += tokens
        for place in range(self._known + 1, len(self.tokens)):  # what something follows
            for length in range(1, min(self.max_ngram, place) + 1):
                self._places.setdefault(tuple(self.tokens[place - length : place]), []).append(place)
        self._known = max(len(self.tokens) - 1, 0)

    def continuations(self, count: int, most: int) -> list[list[int]]:
        """Different ones, behind longer matches first, then the more frequent, then the latest."""
        found: dict[tuple[int, ...], None] = {}
        for length in range(min(self.max_ngram, len(self.tokens)), 0, -1):
            places = self._places.get(tuple(self.tokens[len(self.tokens) - length :]), [])[-64:]
            votes: dict[tuple[int, ...], int] = {}
            for place in reversed(places):
                after = tuple(self.tokens[place : place + most])
                votes[after] = votes.get(after, 0) + 1
            for after in sorted(votes, key=lambda one: -votes[one]):
                found.setdefault(after)
        return [list(one) for one in list(found)[:count]]


@torch.no_grad()
def bigram_table(
    model: Target,
    successors: int,
    *,
    prefix: Sequence[int] = (0,),
    chunk: int = 256,
    progress: Callable[[int], object] = lambda done: None,
) -> Tensor:
    """[V, K] the likeliest successors of every token on its own behind a prefix, from one pass over the vocabulary:
    the tokens of a chunk are children of the same root, so that none sees another."""
    count = min(successors, model.vocabulary)
    model.begin([list(prefix)], Sampling(), frozenset())
    try:
        found = []
        for start in range(0, model.vocabulary, chunk):
            ids = torch.arange(start, min(start + chunk, model.vocabulary), device=model.device)[None]
            tree = Tree(torch.full_like(ids, -1), 1, ids.shape[1])
            scores = model.score(Draft.guess(ids, tree, torch.ones_like(ids, dtype=torch.bool)))
            rows = torch.arange(1, ids.shape[1] + 1, device=model.device)[None]
            found.append(scores.logits(rows)[0].topk(count).indices)
            progress(ids.shape[1])
        return torch.cat(found)
    finally:
        model.end()
