"""Block verification of chains that were drawn whole (Sun et al., "Block verification accelerates speculative
decoding", arXiv 2403.10444): the longest prefix that passes is accepted, whatever failed before its end."""

from __future__ import annotations

from functools import partial

import torch

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules import native_walk
from outrider.core.rules.rejection import rejection


def block(draft: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
    """The verdict on every row; for a row that is no fresh chain it is meaningless. Compiled on a CPU."""
    if not draft.size or draft.distributions is None or draft.source is None:
        return rejection(draft, scores, rng)
    distributions = scores.distributions()  # [B, N + 1, S]
    reference = partial(_block, draft, distributions)
    if native_walk.usable(rng, draft.tokens.device):
        return native_walk.block(draft, distributions, rng, reference)
    return reference(rng)


def _block(draft: Draft, distributions: Distribution, rng: CounterRNG) -> Verdict:
    """The reference: all rows and levels side by side."""
    assert draft.distributions is not None and draft.source is not None
    rows, size = draft.tokens.shape
    here = distributions.span(slice(size))
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
    # reach 1 and no overshoot: p equals q after this node, so what follows is always accepted, and so is this
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
    residual = (share * bonus.probs - guess * ~ended[:, None]).clamp(min=0)
    total = residual.sum(-1, keepdim=True)
    distribution = Distribution(
        torch.where(ended[:, None] | (total <= 0), bonus.probs, residual / total),
        bonus.tokens,
        distributions.vocabulary,
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
