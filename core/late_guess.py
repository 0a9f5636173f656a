"""A guess that arrives too late for the target pass, and is verified all the same: it follows the whole draft, so the
target's distribution after the draft's last token, which the pass computes anyway, decides on it.

PEARL (arXiv 2408.11850) drafts it while the target verifies. If it is accepted, it takes the place of the target's own
token; if not, the target's own token is drawn as after any rejection. Independent of drafters and rules."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.distribution import concatenated
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Rule, Scores
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


def decide(rule: Rule, draft: Draft, late: Draft, scores: Scores, rng: CounterRNG) -> Verdict:
    """The rule's verdict on a chain that each row's late guess, a draft of one node, follows; in terms of the chain."""
    last = draft.live.sum(1)  # the late guess's place in each row
    longer = extended(draft, late, last)
    rng.reserve(longer.size + 1)
    return _shortened(rule(longer, scores.followed_by(longer), rng), draft, late, last)


def extended(draft: Draft, late: Draft, last: Tensor) -> Draft:
    """The chain [B, N] with the late guess after each row's last token [B], of N + 1 nodes."""
    size, place = draft.size, last[:, None]
    drawn = late.distributions
    assert drawn is not None and late.size == 1 and draft.tree.is_chain

    def put(part: Tensor, value: Tensor) -> Tensor:
        return torch.nn.functional.pad(part, (0, 1)).scatter(1, place, value)

    slots = torch.arange(size + 1, device=last.device).expand(draft.rows, -1)
    distributions = drawn.rows(torch.zeros_like(slots))
    source = torch.where(slots == place, slots, -1)
    if draft.distributions is not None and draft.source is not None:
        known = concatenated([draft.distributions, drawn])
        own = torch.nn.functional.pad(draft.source, (0, 1), value=-1)
        count = draft.distributions.probs.shape[1]
        distributions = known.rows(torch.where(slots == place, count, own.clamp(min=0)))
        source = torch.where((own >= 0) | (slots == place), slots, -1)
    return replace(
        draft,
        tokens=put(draft.tokens, late.tokens),
        tree=Tree.chain(size + 1, draft.tokens.device),
        live=put(draft.live, late.live),
        distributions=distributions,
        source=source,
        fresh=late.fresh if draft.fresh is None else draft.fresh,
        mixed=draft.mixed and size > 0,
        note=None,
        host=None,
    )


def _shortened(verdict: Verdict, draft: Draft, late: Draft, last: Tensor) -> Verdict:
    """The verdict on the longer chain as one on the draft: an accepted late guess is the token that follows."""
    size, nodes = draft.size, torch.arange(draft.size, device=last.device)
    taken = verdict.accepted > last
    accepted = torch.where(taken, last, verdict.accepted)
    return Verdict(
        path=torch.where(nodes < accepted[:, None], nodes, -1),
        accepted=accepted,
        token=torch.where(taken, late.tokens[:, 0], verdict.token),
        resampled=verdict.resampled & ~taken,
        tried=verdict.tried[:, :size] & draft.live,
        chance=verdict.chance[:, :size] * draft.live,
        p=verdict.p[:, :size] * draft.live,
        q=verdict.q[:, :size] * draft.live,
        total_variation=None if verdict.total_variation is None else verdict.total_variation[:, : size + 1],
        relaxed=None if verdict.relaxed is None else verdict.relaxed[:, :size] & draft.live,
    )
