"""A draft model with another tokenizer than the target's, lossless ("Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202).

Two methods. `retokenise`: the model continues the text in its own tokens, and its output is tokenised for the target as
fixed guesses. `shared`: q is the model's distribution restricted to the tokens of both vocabularies and renormalised.
Independent of text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Sampling, to_distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.draft_model.vocab_bridge import Bridge, Reading, Renamed, Translated
from outrider.core.drafters.length_policies import Policy, make_policy
from outrider.core.drafters.lookup.prompt_lookup import chain_draft
from outrider.core.errors import unknown
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree

METHODS = ("retokenise", "shared")


def cross_vocabulary(
    model: Target,
    *,
    bridge: Bridge | None = None,
    method: str = "retokenise",
    length: int = 5,
    policy: Policy | str = "fixed",
) -> Drafter:
    """A drafter that runs a model with another vocabulary; `length` counts the model's tokens. Without a bridge both
    vocabularies must be the same. `policy` decides the length, as in DraftModel."""
    if method not in METHODS:
        raise unknown("cross-vocabulary method", method, METHODS)
    bridge = bridge or Renamed({token: token for token in range(model.vocabulary)})
    if method == "shared":
        return DraftModel(Translated(model, bridge), length=length, policy=policy)
    return Retokenised(model, bridge, make_policy(policy, length) if isinstance(policy, str) else policy)


class Retokenised:
    """Drafts the model's likeliest continuation, tokenised for the target, as fixed guesses."""

    vocabulary: int | None = None  # any: the bridge checks it
    needs: frozenset[str] = frozenset()

    def __init__(self, model: Target, bridge: Bridge, policy: Policy) -> None:
        self.model, self.policy = model, policy
        self._reading = Reading(model, bridge)
        self.bytes_read = 0

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._reading.begin(prompts)
        self.policy.begin(len(prompts), self.model.device)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        self._open = (room >= 0).tolist()
        left = upload(room, rng.device)
        wanted = torch.minimum(self.policy.start(), left)  # may give more target tokens than `left`: cut below
        going = wanted > 0
        tokens = torch.zeros(len(left), 0, dtype=torch.long, device=rng.device)
        live = tokens.bool()
        for depth in range(self.policy.max_length):
            going = going & (wanted > depth)
            if rng.device.type == "cpu" and not bool(going.any()):
                break
            distribution = to_distribution(self._scores(tokens, live, depth).logits()[:, -1], Sampling())
            going = going & self.policy.more(distribution, depth)
            tokens = torch.cat([tokens, distribution.top(1)[0]], 1)
            live = torch.cat([live, going[:, None]], 1)
        counts, rows = live.sum(1).tolist(), tokens.tolist()
        chains = [
            passage.back(row[:count])[: max(room_left, 0)] if count else []
            for passage, row, count, room_left in zip(self._reading.passages, rows, counts, left.tolist(), strict=True)
        ]
        draft = chain_draft(chains, rng.device)
        self._drafted = draft.live.sum(1)
        return draft

    def _scores(self, tokens: Tensor, live: Tensor, depth: int) -> Scores:
        self.bytes_read += self.model.weight_bytes
        draft = Draft.guess(tokens, Tree.chain(depth, tokens.device), live)
        return self.model.score(draft, depth - 1 if depth else None)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        rows = zip(verdict.rows(draft), self._open, strict=True)
        self._reading.add([tokens if going else [] for tokens, going in rows])
        self.policy.learn(self._drafted, verdict.accepted)

    def end(self) -> None:
        self._reading.end()
