"""Several draft models, or several samples of one, merged into a token tree (SpecInfer, arXiv 2305.09781).

Every sample is a chain of draws; samples with the same prefix share its nodes. Siblings are independent draws, each
from its own model's distribution, as the multi-step rule with replacement requires."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Distribution, Sampling, concatenated
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.tree import Tree


class SpecInfer:
    """`samples` chains of `depth` draws from each of `model` and `other_models`.

    A draw equal to an earlier sibling keeps its own node, without children: removing it would depend on the drawn token
    and bias the output. The paper also trains its models to complement each other (boosting), which ours does not.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Target,
        *,
        other_models: Sequence[Target] = (),
        samples: int = 2,
        depth: int = 4,
        sampling: Sampling | None = None,
    ) -> None:
        if samples < 1 or depth < 1:
            raise InvalidOption(f"samples={samples}, depth={depth}: each must be 1 or more")
        self.models, self.samples, self.depth = [model, *other_models], samples, depth
        sizes = {draft_model.vocabulary for draft_model in self.models}
        if len(sizes) > 1:
            raise Incompatible(f"the models have vocabularies of {sorted(sizes)}; all must have the target's")
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = 0
        self._own = sampling

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        for model in self.models:
            model.begin(prompts, self._own or sampling, frozenset())

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rows, device = len(room), rng.device
        left = upload(room, device)
        self._open = left >= 0
        chains = self.samples * len(self.models)
        depth = min(self.depth, max(int(room.max()), 0))
        rng.reserve(chains * depth)
        draft = Draft.empty(rows, device)
        distributions: list[Distribution] = []
        at = torch.full((rows, chains), -1, device=device)  # the node that each sample has reached
        for level in range(depth):
            here = self._distributions(draft, at, None if not level else draft.size - chains)
            nodes = torch.arange(level * chains, (level + 1) * chains, device=device).expand(rows, -1)
            alive = (left > level)[:, None].expand(-1, chains)
            tokens = rng.sample(here, nodes, Purpose.DRAW, alive)
            distributions.append(here)
            parents = torch.cat([draft.tree.parents.expand(rows, -1), at], 1)
            tree = Tree(parents, level + 1, chains)
            draft = Draft.guess(torch.cat([draft.tokens, tokens], 1), tree, torch.cat([draft.live, alive], 1))
            same = (at[:, :, None] == at[:, None, :]) & (tokens[:, :, None] == tokens[:, None, :])
            at = level * chains + same.to(torch.uint8).argmax(2)  # the first of equal siblings
        if not distributions:
            return draft
        source = torch.arange(draft.size, device=device).expand(rows, -1)
        return Draft(
            draft.tokens,
            draft.tree,
            draft.live,
            concatenated(distributions),
            source=source,
            replacement=True,
            mixed=False,
        )

    def _distributions(self, draft: Draft, at: Tensor, since: int | None) -> Distribution:
        """The next distribution of each sample [B, chains, S]; the first `samples` are the first model's."""
        parts = []
        for number, model in enumerate(self.models):
            self.bytes_read += model.weight_bytes
            part = at[:, number * self.samples : (number + 1) * self.samples]
            parts.append(model.score(draft, since).distributions(part + 1))
        return concatenated(parts)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        count = verdict.kept(self._open)
        for model in self.models:
            model.keep(draft, verdict, count)

    def end(self) -> None:
        for model in self.models:
            model.end()
