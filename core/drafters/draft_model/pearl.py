"""PEARL: draft and verification at the same time (Liu et al., "PEARL: parallel speculative decoding with adaptive draft
length", arXiv 2408.11850).

While the target verifies a draft, the drafter draws the `length` tokens that would follow it. The first of them is
verified in the same pass, as a late guess (outrider.core.late_guess): the target's distribution after the draft is
known when the pass ends. If all is accepted, the others are the next draft (post-verify). After a miss the target
scores no draft, and the drafter's first new token is verified while the others are drafted (pre-verify). As in the
paper no draft waits for the drafter, and a drafter identical to the target never misses."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.device import download, upload
from outrider.core.distribution import Distribution, Sampling, concatenated
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree

_AHEAD = 0x5D  # label of the random generator for drafting ahead


class Pearl:
    """Chains of `length` draws from a model. `tries` counts the late guesses, `hits` those after which the next draft
    was ready."""

    needs: frozenset[str] = frozenset()

    def __init__(self, model: Target, *, length: int = 4, sampling: Sampling | None = None) -> None:
        if length < 1:
            raise InvalidOption(f"length={length}: it must be 1 or more")
        self.model, self.length = model, length
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = self.tries = self.hits = 0
        self._own = sampling

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model.begin(prompts, self._own or sampling, frozenset())
        self._next: tuple[Tensor, Distribution] | None = None  # tokens [B, K] and distributions [B, K, S]
        self._ready = [False] * len(prompts)  # whether a row's next tokens are its draft
        self._late: Draft | None = None

    def _score(self, draft: Draft, since: int | None) -> Scores:
        self.bytes_read += self.model.weight_bytes
        return self.model.score(draft, since)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = upload(room, rng.device)
        self._open, self._going, self._unfinished = left >= 0, (room > 0).tolist(), (room >= 0).tolist()
        self._rng, self._late = rng.fork(_AHEAD), None
        prepared = [ready and going for ready, going in zip(self._ready, self._going, strict=True)]
        size = min(self.length - 1, int(room.max())) if any(prepared) else 0
        self._at = torch.zeros_like(left)
        if self._next is None or size < 1:
            return Draft.empty(len(room), rng.device)
        tokens, distributions = self._next
        self._at = torch.where(upload(prepared, rng.device), left.clamp(max=size), 0)
        live = torch.arange(size, device=rng.device) < self._at[:, None]
        draft = Draft.drawn(tokens[:, :size], distributions.span(slice(0, size)), live)
        return replace(draft, note=tuple("prepared" if ready else "" for ready in prepared))

    def draft_ahead(self, draft: Draft) -> None:
        if not any(self._going):
            return
        rows, size, rng, device = draft.rows, draft.size, self._rng, draft.tokens.device
        going = upload(self._going, device)
        rng.reserve(self.length)
        tokens, parents = draft.tokens, Tree.chain(size, device).parents.expand(rows, -1)
        scores = self._score(Draft.guess(tokens, Tree.chain(size, device), torch.ones_like(draft.live)), None)
        row, above = self._at[:, None], self._at[:, None] - 1  # each row's draft may be shorter than the longest
        drawn, distributions = list[Tensor](), list[Distribution]()
        for level in range(self.length):
            distributions.append(scores.distributions(row))
            drawn.append(rng.sample(distributions[-1].column(0), level, Purpose.DRAW, going))
            if level + 1 == self.length:
                break
            tokens, parents = torch.cat([tokens, drawn[-1][:, None]], 1), torch.cat([parents, above], 1)
            tree = Tree(parents, size + level + 1, 2)
            above = torch.full_like(above, size + level)
            scores, row = (
                self._score(
                    Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool)),
                    size + level - 1 if size + level else None,
                ),
                above + 1,
            )
        self._late = Draft.drawn(drawn[0][:, None], distributions[0], going[:, None])
        self._foreseen = download(torch.stack([self._at, drawn[0]], 1))  # [B, 2], read with the verdict
        self._next = None
        if self.length > 1:
            self._next = torch.stack(drawn[1:], 1), concatenated(distributions[1:])

    def late_guess(self) -> Draft | None:
        return self._late

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self._ready = [False] * draft.rows
        if self._late is not None:
            ended = zip(verdict.results(), self._foreseen.tolist(), self._unfinished, strict=True)
            self._ready = [there and [*result] == foreseen for result, foreseen, there in ended]
            self.tries += sum(self._going)
            self.hits += sum(hit and going for hit, going in zip(self._ready, self._going, strict=True))
        self.model.keep(draft, verdict, verdict.kept(self._open))

    def end(self) -> None:
        self._next = self._late = None
        self.model.end()
