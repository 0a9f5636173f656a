"""Drafting while the target verifies, so that the next draft is ready together with the verdict.

While a draft is verified, the draft model predicts the outcome and drafts after each likely one: Speculative
Speculative Decoding (Kumar, Dao and May, arXiv 2603.03251), where an outcome is the number of accepted guesses and the
token that follows. PEARL (arXiv 2408.11850) is the case of a single outcome, full acceptance and the drafter's own next
token, with its first guess verified alone after a miss while the rest is drafted. The loop runs `draft_ahead` during
the target pass, in a thread of its own (on a GPU, a stream of its own). Knows a draft model's distributions, nothing of
the target.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Distribution, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import concatenated
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree

_PREPARED = 0x5D  # the label of the random generator that draw ahead


class Overlapped:
    """Chains of `length` draws from a model, prepared behind `outcomes` likely ends of the verification in progress.

    Which outcomes: each number accepted, by the acceptance seen so far, with the `width` tokens the model thinks
    likeliest behind it, all of them weighed against each other (the paper allots a fixed, geometric number to each
    length instead, and also bends what is drafted so that outcomes are easier to foresee; ours leaves the distribution
    alone). `first_length` is how much is drafted where nothing was prepared. A prepared chain is drawn from the model's
    distribution behind an outcome, with numbers of its own, and used only if that outcome comes true, so that it is as
    fresh as any.

    `tries` and `hits` count the verdicts that something was prepared for, and those that were foreseen.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Target,
        *,
        length: int = 4,
        outcomes: int = 4,
        width: int = 2,
        first_length: int | None = None,
        full_acceptance_only: bool = False,
        sampling: Sampling | None = None,
    ) -> None:
        if min(length, outcomes, width) < 1 or (first_length is not None and not 1 <= first_length <= length):
            raise InvalidOption(
                f"length={length}, outcomes={outcomes}, width={width}, first_length={first_length}: each must be 1 or "
                "more, and first_length at most length"
            )
        self.model, self.length, self.outcomes, self.width = model, length, outcomes, width
        self.first_length, self.full_acceptance_only = first_length or length, full_acceptance_only
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = self.tries = self.hits = 0
        self._own = sampling

    @property
    def hit_rate(self) -> float:
        return self.hits / self.tries if self.tries else 0.0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model.begin(prompts, self._own or sampling, frozenset())
        self._rate = torch.full((len(prompts), 1), 0.7, dtype=torch.float64, device=self.model.device)
        self._next: tuple[Tensor, Distribution] | None = (
            None  # tokens [B, K] and distributions [B, K, S] of the outcome that came true
        )
        self._hit = torch.zeros(len(prompts), dtype=torch.bool, device=self.model.device)
        self._known = [False] * len(prompts)  # the same on the host
        self._prepared: tuple[Tensor, Tensor, Tensor, Distribution] | None = None

    def _score(self, draft: Draft, since: int | None) -> Scores:
        self.bytes_read += self.model.weight_bytes
        return self.model.score(draft, since)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = upload(room, rng.device)
        self._open, self._going = left >= 0, (room > 0).tolist()
        self._rng, self._prepared = rng.fork(_PREPARED), None
        rows = len(room)
        hits = [known and going for known, going in zip(self._known, self._going, strict=True)]
        if not any(self._going):
            return Draft.empty(rows, rng.device)
        if self._next is not None and hits == self._going:
            tokens, distributions = self._next
            lengths = torch.full_like(left, self.length)
        else:
            tokens, distributions = self._draw(left, rng)
            lengths = torch.full_like(left, tokens.shape[1])
            if self._next is not None and any(hits):
                tokens, distributions, lengths = self._merge(tokens, distributions, lengths)
        size = min(tokens.shape[1], int(room.max()))
        live = torch.arange(size, device=rng.device) < torch.minimum(lengths, left)[:, None]
        self._distributions = Distribution(
            distributions.probs[:, :size],
            None if distributions.tokens is None else distributions.tokens[:, :size],
            distributions.vocabulary,
        )
        draft = Draft.drawn(tokens[:, :size], self._distributions, live)
        note = tuple("prepared" if hit else "" for hit in hits)
        return replace(draft, note=note) if any(hits) else draft

    def _draw(self, left: Tensor, rng: CounterRNG) -> tuple[Tensor, Distribution]:
        """A chain for every row, as nothing was prepared for some of them."""
        longest = min(self.first_length, max(int(left.max()), 1)) if left.device.type == "cpu" else self.first_length
        needed = self._open & ~self._hit
        rng.reserve(longest)
        draft, tokens, distributions = Draft.empty(len(left), rng.device), list[Tensor](), list[Distribution]()
        for depth in range(longest):
            scores = self._score(draft, depth - 1 if depth else None)
            distribution = scores.distributions(torch.full_like(left, depth)[:, None])
            tokens.append(rng.sample(distribution.column(0), depth, Purpose.DRAW, needed & (left > depth)))
            distributions.append(distribution)
            live = torch.ones(len(left), depth + 1, dtype=torch.bool, device=rng.device)
            draft = Draft.guess(torch.stack(tokens, 1), Tree.chain(depth + 1, rng.device), live)
        return draft.tokens, concatenated(distributions)

    def _merge(
        self, tokens: Tensor, distributions: Distribution, lengths: Tensor
    ) -> tuple[Tensor, Distribution, Tensor]:
        """What was prepared, for the rows it was foreseen for."""
        assert self._next is not None
        ready, known = self._next
        size = max(tokens.shape[1], ready.shape[1])
        hit = self._hit[:, None]

        def pad(part: Tensor) -> Tensor:
            return torch.nn.functional.pad(part, (0, 0) * (part.dim() - 2) + (0, size - part.shape[1]))

        probs = torch.where(hit[..., None], pad(known.dense().probs), pad(distributions.dense().probs))
        lengths = torch.where(self._hit, self.length, lengths)
        return torch.where(hit, pad(ready), pad(tokens)), Distribution(probs, None, distributions.vocabulary), lengths

    def draft_ahead(self, draft: Draft) -> None:
        if not draft.size or self.length < 1:
            return
        chain = Draft.guess(draft.tokens, draft.tree, torch.ones_like(draft.live))
        at, guess = self._likely(draft, self._score(chain, None).logits())
        rows, (count, size) = draft.rows, (at.shape[1], draft.size)
        rng, device = self._rng, draft.tokens.device
        rng.reserve(count * self.length)
        alive = self._open[:, None].expand(-1, count)
        tokens, parents, above = draft.tokens, draft.tree.parents.expand(rows, -1), at - 1
        drawn, distributions = list[Tensor](), list[Distribution]()
        for level in range(self.length):
            tokens, parents = torch.cat([tokens, guess if not level else drawn[-1]], 1), torch.cat([parents, above], 1)
            first = size + level * count
            above = torch.arange(first, first + count, device=device).expand(rows, -1)
            tree = Tree(parents, size + level + 1, count + 1)
            grown = Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool))
            distribution = self._score(grown, first).distributions(above + 1)  # [B, O, S]
            place = torch.arange(count, device=device).expand(rows, -1) + level * count
            drawn.append(rng.sample(distribution, place, Purpose.DRAW, alive))
            distributions.append(distribution)
        self._prepared = at, guess, torch.stack(drawn, 2), concatenated(distributions)

    def _likely(self, draft: Draft, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The outcomes thought likeliest: how many are accepted and what follows, [B, O] each; logits [B, N + 1, V]."""
        size, device = draft.size, draft.tokens.device
        probs = torch.softmax(logits.double(), -1)
        there = torch.arange(size + 1, device=device)
        length = draft.live.sum(1, keepdim=True)
        rejected = torch.zeros_like(probs, dtype=torch.bool)
        rejected[:, :size].scatter_(2, draft.tokens[..., None], True)
        probs = probs.masked_fill(rejected & (there < length)[..., None], 0.0)
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-30)
        value, token = probs.topk(min(self.width, probs.shape[2]), -1)  # [B, N + 1, W]
        rate = self._rate.clamp(0.02, 0.98)
        chance = rate**there * torch.where(there < length, 1 - rate, 1.0)
        usable = (there == length) if self.full_acceptance_only else (there <= length)
        value = (value * (chance * usable)[..., None]).flatten(1)
        best = value.topk(min(self.outcomes, value.shape[1])).indices
        return best // token.shape[2], token.flatten(1).gather(1, best)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self._next, self._hit = None, torch.zeros_like(self._hit)
        self._known = [False] * len(self._known)
        if self._prepared is not None:
            at, guess, tokens, distributions = self._prepared
            matches = (at == verdict.accepted[:, None]) & (guess == verdict.token[:, None])
            self._hit, which = matches.any(1) & self._open, matches.to(torch.uint8).argmax(1)
            self._known = self._hit.tolist()
            self.tries += sum(self._going)
            self.hits += sum(hit and going for hit, going in zip(self._known, self._going, strict=True))
            index = torch.arange(self.length, device=tokens.device) * at.shape[1] + which[:, None]
            chosen = tokens.gather(1, which[:, None, None].expand(-1, 1, self.length))[:, 0]
            self._next = chosen, distributions.rows(index)
            drafted = draft.live.sum(1)
            seen = (verdict.accepted / drafted.clamp(min=1)).double()
            fresh = torch.where(drafted > 0, 0.9 * self._rate[:, 0] + 0.1 * seen, self._rate[:, 0])
            self._rate = fresh[:, None]
        self._prepared = None
        self.model.keep(draft, verdict, verdict.kept(self._open))

    def end(self) -> None:
        self._next = self._prepared = None
        self.model.end()


def pearl(model: Target, *, length: int = 4, sampling: Sampling | None = None) -> Overlapped:
    """PEARL (arXiv 2408.11850): while a draft is verified, the drafter goes on behind it as if all of it, and its own
    next token, came true (post-verify); after it did not, the first new guess goes to the target at once, and the rest
    is drafted meanwhile (pre-verify). The paper drops the target's own token where all was accepted; ours keeps it, so
    that a hit also takes that this token is the drafter's."""
    return Overlapped(
        model, length=length, outcomes=1, width=1, first_length=1, full_acceptance_only=True, sampling=sampling
    )
