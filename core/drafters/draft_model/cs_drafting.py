"""Cascades of drafters (CS Drafting, arXiv 2312.11462). In the vertical cascade each draft model has a cheaper drafter,
down to n-grams of the text; in the horizontal one cheaper drafters draft the later positions, which matter less.

Every drawn token is the draft model's own draw, made with fewer of its passes: the stage below guesses, the model draws
from its distribution at each guess, and continues in the same pass while the guess equals the draw. So q is the model's
distribution. With a lenience above 1, as in the paper, a model also accepts guesses that it would not have drawn: those
are fixed guesses of the draft, so that the output keeps the target's distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Distribution, Sampling, concatenated
from outrider.core.draft import Draft, Verdict, forced
from outrider.core.drafters.lookup.ngram import Counts
from outrider.core.drafters.lookup.prompt_lookup import chain_draft
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree

Rows = list[list[int]]


class _Statistics:
    """The last stage: the most frequent successors of the longest known context, in each row's own text."""

    def __init__(self, max_ngram: int) -> None:
        self.max_ngram = max_ngram

    def begin(self, prompts: Prompts) -> None:
        self.tables = []
        for prompt in prompts:
            table = Counts(self.max_ngram)
            table.add(list(prompt))
            self.tables.append(table)

    def guess(self, ahead: Rows, wanted: Sequence[int]) -> Rows:
        chains = []
        for table, before, count in zip(self.tables, ahead, wanted, strict=True):
            context = [*table.tokens[-self.max_ngram :], *before]
            start = len(context)
            while len(context) < start + count and (token := table.after(context)) is not None:
                context.append(token)
            chains.append(context[start:])
        return chains


class _Stage:
    """A draft model, with the stage below to guess for it."""

    def __init__(self, model: Target, below: _Stage | _Statistics, inner_length: int, lenience: float = 1.0) -> None:
        self.model, self.below, self.inner_length, self.lenience = model, below, inner_length, lenience
        self.bytes_read = 0
        self.taken: list[list[bool]] = []  # by row: which of the last tokens are guesses that lenience accepted

    def guess(self, ahead: Rows, wanted: Sequence[int]) -> Rows:
        """This model's likeliest tokens after the committed text and `ahead`."""
        return self.extend(ahead, wanted, None)[0]

    def extend(self, ahead: Rows, wanted: Sequence[int], rng: CounterRNG | None) -> tuple[Rows, Distribution | None]:
        """wanted[b] more tokens per row after the committed text and `ahead`: drawn with `rng`, at nodes numbered by
        their distance from the text, or without it the likeliest; and the distributions [B, max(wanted), S] they were
        drawn from."""
        device, rows = self.model.device, len(wanted)
        committed = self.model.mark()
        self.model.keep(*forced(ahead, device))
        tokens: Rows = [[] for _ in wanted]
        self.taken = [[] for _ in wanted]
        distributions = _Distributions(rows, max(wanted, default=0))
        while any(left := [count - len(row) for count, row in zip(wanted, tokens, strict=True)]):
            before = [[*first, *row] for first, row in zip(ahead, tokens, strict=True)]
            guesses = self.below.guess(before, [min(self.inner_length, max(count - 1, 0)) for count in left])
            draft = chain_draft(guesses, device)
            self.bytes_read += self.model.weight_bytes
            scores = self.model.score(draft)
            new_tokens: Rows = [[] for _ in wanted]
            active = [count > 0 for count in left]
            for position in range(draft.size + 1):
                distribution = scores.distribution(torch.full((rows,), position, device=device))
                going = upload(active, device)
                if rng is None:
                    chosen = distribution.top(1)[0][:, 0].tolist()
                else:
                    node = upload([len(row) + position for row in before], device)
                    chosen = rng.sample(distribution, node, Purpose.DRAW, going).tolist()
                    distributions.put(distribution, [len(row) + position for row in tokens], going)
                lenient = self._lenient(scores, position, guesses, active)
                for row, token in enumerate(chosen):
                    if active[row]:
                        taken = lenient[row]  # whatever was drawn: a guess that depended on the draw would be biased
                        self.taken[row].append(taken)
                        new_tokens[row].append(guesses[row][position] if taken else token)
                        active[row] = position < len(guesses[row]) and guesses[row][position] == new_tokens[row][-1]
                if not any(active):
                    break
            for own, new in zip(tokens, new_tokens, strict=True):
                own += new
            _, verdict, count = forced(new_tokens, device)
            self.model.keep(draft, _padded(draft, verdict), count)
        self.model.rewind(committed)
        return tokens, distributions.distribution

    def _lenient(self, scores: Scores, position: int, guesses: Rows, active: Sequence[bool]) -> list[bool]:
        """Whether each row's guess at a position, times the lenience, reaches the likeliest token's probability."""
        if self.lenience == 1:
            return [False] * len(guesses)
        device = scores.lengths.device
        there = [going and position < len(row) for going, row in zip(active, guesses, strict=True)]
        guess = upload([row[position] if known else 0 for known, row in zip(there, guesses, strict=True)], device)
        soft = scores.softmax(torch.full((len(guesses), 1), position, device=device)).column(0)
        enough = self.lenience * soft.at(guess[:, None])[:, 0] >= soft.probs.amax(-1)
        return [known and good for known, good in zip(there, enough.tolist(), strict=True)]


def _padded(draft: Draft, verdict: Verdict) -> Verdict:
    """The verdict with its path padded to the draft's size."""
    path = torch.nn.functional.pad(verdict.path, (0, draft.size - verdict.path.shape[1]), value=-1)
    return replace(verdict, path=path)


class _Distributions:
    """Collects the distributions of drawn tokens when rows advance at different speeds."""

    def __init__(self, rows: int, positions: int) -> None:
        self.rows, self.positions = rows, positions
        self.distribution: Distribution | None = None

    def put(self, distribution: Distribution, positions: Sequence[int], going: Tensor) -> None:
        """Store the distribution [B, S] at a position per row, for the rows that are `going`."""
        distribution = distribution if distribution.width == 1 else distribution.dense()
        if self.distribution is None:
            shape = (self.rows, self.positions + 1, distribution.width)  # the last position is for values to discard
            ids = None if distribution.tokens is None else distribution.tokens.new_zeros(shape)
            self.distribution = Distribution(distribution.probs.new_zeros(shape), ids, distribution.vocabulary)
        rows = torch.arange(self.rows, device=distribution.probs.device)
        index = torch.where(going, upload(positions, going.device).clamp(max=self.positions), self.positions)
        self.distribution.probs[rows, index] = distribution.probs
        if self.distribution.tokens is not None and distribution.tokens is not None:
            self.distribution.tokens[rows, index] = distribution.tokens


class CSDrafting:
    """A cascade of `model`, `other_models` in order, and n-grams of up to `max_ngram` tokens. `lengths` gives the
    number of positions that each stage drafts. For every pass of a model, the next stage guesses `inner_length` tokens.
    Lengths (5, 0) give the vertical cascade alone. A model accepts a guess whose probability times `lenience` reaches
    that of its likeliest token; 1: only its own draws."""

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Target,
        *,
        other_models: Sequence[Target] = (),
        lengths: Sequence[int] | None = None,
        inner_length: int = 4,
        max_ngram: int = 4,
        lenience: float = 1.0,
    ) -> None:
        if not lenience >= 1:
            raise InvalidOption(f"lenience is {lenience}; it must be 1 (only the models' own draws) or more")
        models = [model, *other_models]
        lengths = (4, *[2] * len(models)) if lengths is None else tuple(lengths)
        if len(lengths) != len(models) + 1 or min(lengths) < 0 or not any(lengths) or min(inner_length, max_ngram) < 1:
            raise InvalidOption(
                f"lengths={lengths}, inner_length={inner_length}, max_ngram={max_ngram}: give {len(models) + 1} "
                "lengths of 0 or more, one for each model and one for n-grams, not all 0; inner_length and max_ngram "
                "must be 1 or more"
            )
        sizes = {draft_model.vocabulary for draft_model in models}
        if len(sizes) > 1:
            raise Incompatible(f"the models have vocabularies of {sorted(sizes)}; all must have the target's")
        self.vocabulary: int | None = model.vocabulary
        self.lengths, self._statistics = lengths, _Statistics(max_ngram)
        below: _Stage | _Statistics = self._statistics
        self.stages: list[_Stage] = []
        for draft_model in reversed(models):
            below = _Stage(draft_model, below, inner_length, lenience)
            self.stages.insert(0, below)

    @property
    def bytes_read(self) -> int:
        return sum(stage.bytes_read for stage in self.stages)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        for stage in self.stages:
            stage.model.begin(prompts, sampling, frozenset())
        self._statistics.begin(prompts)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = room.tolist()
        self._open = [count >= 0 for count in left]
        rng.reserve(sum(self.lengths))
        ahead: Rows = [[] for _ in left]
        taken: list[list[bool]] = [[] for _ in left]
        distributions: list[Distribution] = []
        for stage, length in zip(self.stages, self.lengths, strict=False):
            wanted = [max(min(length, count - len(before)), 0) for count, before in zip(left, ahead, strict=True)]
            if not any(wanted):
                continue
            tokens, distribution = stage.extend(ahead, wanted, rng)
            ahead = [[*before, *new] for before, new in zip(ahead, tokens, strict=True)]
            taken = [[*before, *new] for before, new in zip(taken, stage.taken, strict=True)]
            assert distribution is not None
            distributions.append(distribution.select(torch.arange(max(wanted), device=rng.device)))
        drawn = max(map(len, ahead))
        last = self.lengths[-1]
        wanted = [max(min(last, count - len(before)), 0) for count, before in zip(left, ahead, strict=True)]
        ngrams = self._statistics.guess(ahead, wanted)
        chain = chain_draft([[*before, *new] for before, new in zip(ahead, ngrams, strict=True)], rng.device)
        if not distributions:
            return chain
        if not self.lengths[-1] and not any(map(any, taken)):
            return Draft.drawn(chain.tokens, concatenated(distributions), chain.live)
        slots = torch.arange(chain.size, device=rng.device).expand(len(left), -1)
        fixed = upload([[*row, *[False] * (chain.size - len(row))] for row in taken], rng.device)
        source = torch.where((slots < drawn) & ~fixed, slots, -1)
        return Draft(chain.tokens, Tree.chain(chain.size, rng.device), chain.live, concatenated(distributions), source)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        count = verdict.kept(upload(self._open, rng.device))
        for stage in self.stages:
            stage.model.keep(draft, verdict, count)
        for table, tokens, going in zip(self._statistics.tables, verdict.rows(draft), self._open, strict=True):
            if going:
                table.add(tokens)

    def end(self) -> None:
        for stage in self.stages:
            stage.model.end()
