"""The exact rules: whatever was drafted, the output has the target's distribution.

Pure functions of draft, scores and random generator. `exact` chooses what is best for the draft at hand; the others can
be asked for by name. Greedy decoding falls out of distributions one entry wide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import Incompatible
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules import small_batch
from outrider.core.rules.rejection import rejection
from outrider.core.rules.walk import matching


@dataclass(frozen=True)
class Token:
    """Token-by-token rejection down a chain or tree; siblings as they were drawn, fixed guesses as point masses.

    Speculative sampling (arXiv 2211.17192, 2302.01318); with several siblings SpecInfer's multi-step rule (arXiv
    2305.09781) if they were drawn with replacement, recursive rejection (arXiv 2402.14160) if without. One walk
    serves them all because `q` is always the distribution a node was really drawn from.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return rejection(draft, scores, rng)


@dataclass(frozen=True)
class SampleMatch:
    """The target draws its own token behind every node; the draft is followed while it agrees. Needs no q.

    For fixed guesses this is the one-hot tree rule in a single draw a level: a child is met with the chance p gives it,
    and a miss is already distributed like p without the children.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return matching(
            draft, scores, lambda distribution, row, where: rng.sample(distribution, row, Purpose.MATCH, where)
        )


@dataclass(frozen=True)
class GumbelMatch:
    """Like `sample-match`, with noise that belongs to the position in the sequence: emit argmax(log p + g).

    Plain and speculative output are then the same tokens at any temperature and seed, not only the same distribution.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        return matching(
            draft, scores, lambda distribution, row, where: rng.gumbel_argmax(distribution, scores.position(row), where)
        )


@dataclass(frozen=True)
class Block:
    """Block verification (Sun et al., "Block verification accelerates speculative decoding", arXiv 2403.10444):
    the chain is judged as a whole, which accepts at least as many tokens as token-by-token rejection.

    Only for chains drawn whole in this step; with drafts that survive from an earlier step it would be biased.
    """

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        if draft.size and (draft.fresh is None or not draft.tree.is_chain):
            raise Incompatible(
                "the rule 'block' needs a chain drawn whole in the same step, which this drafter does not make; "
                "take rule='exact', which uses block verification where it is sound"
            )
        return block(draft, scores, rng)


@dataclass(frozen=True)
class Exact:
    """The lossless default: block verification for rows that are a chain drawn whole in this step, rejection for
    other drawn nodes, one draw a level where all guesses are fixed. For greedy distributions all of these accept the
    same tokens, so that the cheapest serves."""

    lossless = True

    def __call__(self, draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
        if draft.distributions is None or scores.sampling.greedy:
            # by the numbers that rejection uses where nothing was drafted: a row may have batch mates for whom it was
            return matching(
                draft, scores, lambda distribution, row, where: rng.sample(distribution, row, Purpose.NEXT, where)
            )
        if draft.fresh is None:
            return rejection(draft, scores, rng)
        if not draft.mixed:
            return block(draft, scores, rng)
        return _merge(draft.fresh, block(draft, scores, rng), rejection(draft, scores, rng))


def block(draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
    """Block verification of every row; rows that are no fresh chain get nonsense, and are the caller's to replace."""
    if not draft.size or draft.distributions is None or draft.source is None:
        return rejection(draft, scores, rng)
    distributions = scores.distributions()  # [B, N + 1, S]
    if not draft.mixed and small_batch.fits(rng, distributions, draft.distributions):
        return _block_few(draft, distributions, draft.distributions, rng)
    rows, size = draft.tokens.shape
    here = distributions.first(size)
    guesses = draft.distributions.rows(draft.source.clamp(min=0)) if draft.mixed else draft.distributions
    p, q = (distribution.at(draft.tokens[..., None])[..., 0] for distribution in (here, guesses))  # [B, N]
    ratio = p / q.clamp(min=torch.finfo(q.dtype).tiny)
    live = draft.tried
    joint = [torch.ones_like(p[:, 0])]  # P_i = min(1, P_{i-1} p_i / q_i)
    for i in range(size):
        joint.append((joint[-1] * ratio[:, i]).clamp(max=1))
    weight = torch.stack(joint, 1)  # [B, N + 1]
    overshoot = (weight[:, :-1, None] * here.probs - guesses.on(here)).clamp(min=0).sum(-1)  # [B, N], for P_0..P_{N-1}
    after = torch.nn.functional.pad(overshoot[:, 1:], (0, 1))
    reach = weight[:, 1:]
    last = live & ~torch.nn.functional.pad(live[:, 1:], (0, 1))
    chance = torch.where(last, reach, after / (after + 1 - reach).clamp(min=torch.finfo(p.dtype).tiny))
    # reach 1 and nothing over: p equals q behind this node, so what follows is always accepted and so is this
    chance = torch.where(~last & (reach >= 1) & (after <= 0), 1.0, chance) * live
    nodes = torch.arange(size, device=p.device).expand(rows, -1)
    passed = live & rng.accept(chance, nodes)
    accepted = (passed * (nodes + 1)).amax(1)  # the last that passed, whatever came before it
    ended = accepted == live.sum(1)
    bonus = distributions.row(accepted)
    guess = (
        Distribution(guesses.on(here), here.tokens, distributions.vocabulary).row(accepted.clamp(max=size - 1)).probs
    )
    share = weight.gather(1, accepted[:, None])
    rest = (share * bonus.probs - guess * ~ended[:, None]).clamp(min=0)
    total = rest.sum(-1, keepdim=True)
    distribution = Distribution(
        torch.where(ended[:, None] | (total <= 0), bonus.probs, rest / total), bonus.tokens, distributions.vocabulary
    )
    return Verdict(
        path=torch.where(nodes < accepted[:, None], nodes, -1),
        accepted=accepted,
        token=rng.sample(distribution, accepted, Purpose.NEXT),
        resampled=~ended,
        tried=live,
        chance=chance.double(),
        p=p.double(),
        q=q.double(),
    )


def _block_few(draft: Draft, distributions: Distribution, guesses: Distribution, rng: CounterRNG) -> Verdict:
    """The same for a few rows, on the host."""
    tokens, live, nodes = small_batch.table(draft.tokens), small_batch.table(draft.tried), np.arange(draft.size)
    rows, size = tokens.shape
    every = nodes[None].repeat(rows, 0)
    p, q = small_batch.at(distributions, every, tokens), small_batch.at(guesses, every, tokens)
    ratio = p / np.maximum(q, np.finfo(q.dtype).tiny)
    weight = np.ones((rows, size + 1), p.dtype)  # P_i = min(1, P_{i-1} p_i / q_i)
    for level in range(size):
        weight[:, level + 1] = np.minimum(weight[:, level] * ratio[:, level], 1)
    over = (
        weight[:, 1:-1, None] * small_batch.table(distributions.probs)[:, 1:size]
        - small_batch.table(guesses.probs)[:, 1:]
    )
    after = np.zeros_like(p)
    np.maximum(over, 0, out=over).sum(-1, out=after[:, :-1])
    reach, last = weight[:, 1:], live.copy()
    last[:, :-1] &= ~live[:, 1:]
    chance = np.where(last, reach, after / np.maximum(after + 1 - reach, np.finfo(p.dtype).tiny))
    chance = np.where(~last & (reach >= 1) & (after <= 0), 1, chance) * live
    passed = live & (small_batch.table(rng.table(Purpose.ACCEPT))[:, :size] < chance)
    accepted = (passed * (nodes + 1)).max(1)
    ended = accepted == live.sum(1)
    follows = []
    for row, level in enumerate(accepted.tolist()):
        distribution, without = small_batch.table(distributions.probs[row, level]), None
        number = float(rng.table(Purpose.NEXT)[row, level])
        if not ended[row]:
            distribution, without = weight[row, level] * distribution, small_batch.table(guesses.probs[row, level])
        follows.append(small_batch.drawn(distribution, number, without=without))
    return Verdict(
        path=torch.from_numpy(np.where(nodes < accepted[:, None], nodes, -1)),
        accepted=torch.from_numpy(accepted),
        token=torch.tensor(follows),
        resampled=torch.from_numpy(~ended),
        tried=draft.tried,
        chance=torch.from_numpy(chance.astype(np.float64)),
        p=torch.from_numpy(p.astype(np.float64)),
        q=torch.from_numpy(q.astype(np.float64)),
    )


def _merge(first: Tensor, one: Verdict, other: Verdict) -> Verdict:
    """Row by row, one verdict or the other."""

    def pick(yes: Tensor, no: Tensor) -> Tensor:
        return torch.where(first.view(-1, *[1] * (yes.dim() - 1)), yes, no)

    return Verdict(
        path=pick(one.path, other.path),
        accepted=pick(one.accepted, other.accepted),
        token=pick(one.token, other.token),
        resampled=pick(one.resampled, other.resampled),
        tried=pick(one.tried, other.tried),
        chance=pick(one.chance, other.chance),
        p=pick(one.p, other.p),
        q=pick(one.q, other.q),
    )
