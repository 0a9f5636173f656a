"""Drafting while the target verifies, so that the next draft is ready together with the verdict.

While a draft is verified, the draft model predicts the outcome and drafts after each likely one: Speculative
Speculative Decoding (Kumar, Dao and May, arXiv 2603.03251), where an outcome is the number of accepted guesses and the
token that follows. The loop runs `draft_ahead` during the target pass, in its own thread (on a GPU, on its own stream).
Independent of the target.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.device import download, upload
from outrider.core.distribution import Distribution, Sampling, concatenated
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree

FAN_OUTS = ("likely", "geometric")
_PREPARED = 0x5D  # label of the random generator for drafting ahead


class Overlapped:
    """Chains of `length` draws from a model, prepared for the `outcomes` most probable outcomes of the verification.

    The candidates are every number of accepted tokens, weighted by the acceptance rate so far, with each of the model's
    `width` likeliest next tokens, weighted by their probabilities. `fan_out="geometric"` is the paper's Saguaro: each
    number of accepted tokens k gets F_k of its likeliest tokens, F_k proportional to P(k)^(1 / (1 + r)), a geometric
    series in the acceptance rate that is capped at full acceptance; it is optimal if F tokens miss with a chance that
    falls as F^-r (`exponent`). `downscale` below 1 is its sampling: the model's `width` likeliest tokens are drawn that
    much less often, so that what the target draws after a rejection is more often one of them. If nothing was prepared,
    `first_length` tokens are drafted, the paper's backup for small batches. A prepared chain has its own random numbers
    and is used only if its outcome happens, so it is distributed like any other draft.

    `tries` counts the verdicts for which chains were prepared, `hits` those whose outcome was among them.
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
        fan_out: str = "likely",
        exponent: float = 0.5,
        downscale: float = 1.0,
        sampling: Sampling | None = None,
    ) -> None:
        if min(length, outcomes, width) < 1 or (first_length is not None and not 1 <= first_length <= length):
            raise InvalidOption(
                f"length={length}, outcomes={outcomes}, width={width}, first_length={first_length}: each must be 1 or "
                "more, and first_length at most length"
            )
        if fan_out not in FAN_OUTS:
            raise unknown("fan_out", fan_out, FAN_OUTS)
        if not exponent > 0 or not 0 < downscale <= 1:
            raise InvalidOption(
                f"exponent={exponent}, downscale={downscale}: exponent must be above 0, downscale above 0 and at most 1"
            )
        self.model, self.length, self.outcomes, self.width = model, length, outcomes, width
        self.fan_out, self.exponent, self.downscale = fan_out, exponent, downscale
        self.first_length = first_length or length
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = self.tries = self.hits = 0
        self._own = sampling

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model.begin(prompts, self._own or sampling, frozenset())
        self._rate = torch.full((len(prompts), 1), 0.7, dtype=torch.float64, device=self.model.device)
        # tokens [B, K] and distributions [B, K, S] prepared for the outcome that happened
        self._next: tuple[Tensor, Distribution] | None = None
        self._hit = torch.zeros(len(prompts), dtype=torch.bool, device=self.model.device)
        self._host_hit = [False] * len(prompts)  # the same on the host
        self._prepared: tuple[Tensor, Tensor, Tensor, Distribution] | None = None

    def _score(self, draft: Draft, since: int | None) -> Scores:
        self.bytes_read += self.model.weight_bytes
        return self.model.score(draft, since)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = upload(room, rng.device)
        self._open, self._drafting, self._going = left >= 0, left > 0, (room > 0).tolist()
        self._unfinished = (room >= 0).tolist()
        self._rng, self._prepared = rng.fork(_PREPARED), None
        rows = len(room)
        hits = [known and going for known, going in zip(self._host_hit, self._going, strict=True)]
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
        """A chain for every row; drawn only for rows without a prepared one."""
        longest = min(self.first_length, max(int(left.max()), 1)) if left.device.type == "cpu" else self.first_length
        needed = self._open & ~self._hit
        rng.reserve(longest)
        draft, tokens, distributions = Draft.empty(len(left), rng.device), list[Tensor](), list[Distribution]()
        for depth in range(longest):
            scores = self._score(draft, depth - 1 if depth else None)
            distribution = self._downscaled(scores.distributions(torch.full_like(left, depth)[:, None]))
            tokens.append(rng.sample(distribution.column(0), depth, Purpose.DRAW, needed & (left > depth)))
            distributions.append(distribution)
            live = torch.ones(len(left), depth + 1, dtype=torch.bool, device=rng.device)
            draft = Draft.guess(torch.stack(tokens, 1), Tree.chain(depth + 1, rng.device), live)
        return draft.tokens, concatenated(distributions)

    def _merge(
        self, tokens: Tensor, distributions: Distribution, lengths: Tensor
    ) -> tuple[Tensor, Distribution, Tensor]:
        """The prepared chains in rows with a hit, the others elsewhere."""
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
        shape = Tree.chain(draft.size, draft.tokens.device)  # its tensors are this stream's own
        chain = Draft.guess(draft.tokens, shape, torch.ones_like(draft.live))
        at, guess = self._likely(draft, self._score(chain, None).logits())
        rows, (count, size) = draft.rows, (at.shape[1], draft.size)
        rng, device = self._rng, draft.tokens.device
        rng.reserve(count * self.length)
        alive = self._drafting[:, None].expand(-1, count)
        tokens, parents, above = draft.tokens, shape.parents.expand(rows, -1), at - 1
        drawn, distributions = list[Tensor](), list[Distribution]()
        for level in range(self.length):
            tokens, parents = torch.cat([tokens, guess if not level else drawn[-1]], 1), torch.cat([parents, above], 1)
            first = size + level * count
            above = torch.arange(first, first + count, device=device).expand(rows, -1)
            tree = Tree(parents, size + level + 1, count + 1)
            grown = Draft.guess(tokens, tree, torch.ones_like(tokens, dtype=torch.bool))
            distribution = self._downscaled(self._score(grown, first).distributions(above + 1))  # [B, O, S]
            place = torch.arange(count, device=device).expand(rows, -1) + level * count
            drawn.append(rng.sample(distribution, place, Purpose.DRAW, alive))
            distributions.append(distribution)
        self._prepared = at, guess, torch.stack(drawn, 2), concatenated(distributions)
        self._foreseen = download(torch.stack([at, guess], 2))  # [B, O, 2], read with the verdict

    def _likely(self, draft: Draft, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The most probable outcomes: the numbers of accepted tokens and the tokens that follow, [B, O] each; from the
        model's logits [B, N + 1, V] along the draft."""
        size, device = draft.size, draft.tokens.device
        probs = torch.softmax(logits.double(), -1)
        accepted = torch.arange(size + 1, device=device)
        length = draft.live.sum(1, keepdim=True)
        rejected = torch.zeros_like(probs, dtype=torch.bool)
        rejected[:, :size].scatter_(2, draft.tokens[..., None], True)
        probs = probs.masked_fill(rejected & (accepted < length)[..., None], 0.0)
        probs = probs / probs.sum(-1, keepdim=True).clamp(min=1e-30)
        width = self.width if self.fan_out == "likely" else self.outcomes
        value, token = probs.topk(min(width, probs.shape[2]), -1)  # [B, N + 1, W]
        if self.fan_out == "geometric":  # those of a value P(k) F^-(1 + r) above a bound are F_k tokens of each k
            rank = torch.arange(1, value.shape[2] + 1, device=device, dtype=value.dtype)
            value = (value > 0) * rank ** -(1 + self.exponent)
        rate = self._rate.clamp(0.02, 0.98)
        probability = rate**accepted * torch.where(accepted < length, 1 - rate, 1.0)
        usable = accepted <= length
        value = (value * (probability * usable)[..., None]).flatten(1)
        best = value.topk(min(self.outcomes, value.shape[1])).indices
        return best // token.shape[2], token.flatten(1).gather(1, best)

    def _downscaled(self, distribution: Distribution) -> Distribution:
        """The distributions [B, K, S] with the likeliest tokens' probabilities reduced."""
        if self.downscale == 1:
            return distribution
        probs = distribution.probs
        best = probs.topk(min(self.width, probs.shape[-1]), -1)
        probs = probs.scatter(-1, best.indices, best.values * self.downscale)
        return replace(distribution, probs=probs / probs.sum(-1, keepdim=True).clamp(min=1e-30))

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self._next, self._hit = None, torch.zeros_like(self._hit)
        self._host_hit = [False] * len(self._host_hit)
        if self._prepared is not None:
            at, guess, tokens, distributions = self._prepared
            matches = (at == verdict.accepted[:, None]) & (guess == verdict.token[:, None])
            self._hit, which = matches.any(1) & self._open, matches.to(torch.uint8).argmax(1)
            ended = zip(verdict.results(), self._foreseen.tolist(), self._unfinished, strict=True)
            self._host_hit = [there and [*result] in foreseen for result, foreseen, there in ended]
            self.tries += sum(self._going)
            self.hits += sum(hit and going for hit, going in zip(self._host_hit, self._going, strict=True))
            index = torch.arange(self.length, device=tokens.device) * at.shape[1] + which[:, None]
            chosen = tokens.gather(1, which[:, None, None].expand(-1, 1, self.length))[:, 0]
            self._next = chosen, distributions.rows(index)
            drafted = draft.live.sum(1)
            seen = (verdict.accepted / drafted.clamp(min=1)).double()
            rate = torch.where(drafted > 0, 0.9 * self._rate[:, 0] + 0.1 * seen, self._rate[:, 0])
            self._rate = rate[:, None]
        self._prepared = None
        self.model.keep(draft, verdict, verdict.kept(self._open))

    def end(self) -> None:
        self._next = self._prepared = None
        self.model.end()
