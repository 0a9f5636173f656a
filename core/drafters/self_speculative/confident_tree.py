"""SWIFT's draft tree (arXiv 2410.06916): the drafter's likeliest chain, with runners-up beside each of its tokens.

The chain goes on while its latest token is likely enough; the surer the drafter is, the fewer runners-up stand beside
it. The paper's code draws the candidates above temperature 0, ours are always the likeliest tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import _ModelDrafter
from outrider.core.drafters.tree_shapes import rerank
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Target
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree

_SURE = (0.95, 0.8, 0.5)  # above these probabilities of the likeliest token stand candidates[0], [1] and [2]


class ConfidentTree(_ModelDrafter):
    """Up to `depth` levels of candidates[0] to candidates[3] tokens, the surer the fewer; a level follows a token whose
    probability reaches `threshold`. The `nodes` most probable ones are kept."""

    def __init__(
        self,
        model: Target,
        *,
        nodes: int = 24,
        depth: int = 8,
        threshold: float = 0.8,
        candidates: Sequence[int] = (3, 5, 8, 10),
    ) -> None:
        super().__init__(model, None)
        self.candidates = tuple(candidates)
        if min(nodes, depth) < 1 or not 0 <= threshold <= 1 or len(self.candidates) != 4 or min(self.candidates) < 1:
            raise InvalidOption(
                f"nodes={nodes}, depth={depth}, threshold={threshold}, candidates={self.candidates}: nodes and depth "
                "must be 1 or more, threshold from 0 to 1, candidates four numbers of 1 or more"
            )
        self.nodes, self.depth, self.threshold = nodes, depth, threshold

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        super().begin(prefill, prompts, sampling.unscaled)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        depth = self._depth(self.depth, room, rng)
        settings, growth = (self.nodes, self.threshold, self.candidates), partial(self._grown, depth)
        if (draft := self._recorded(room, rng, max(depth - 1, 0), settings, depth, growth)) is not None:
            return draft
        return self._grown(depth, self._start(room, rng), rng)

    def _grown(self, depth: int, left: Tensor, rng: CounterRNG) -> Draft:
        """The tree of at most `depth` levels, and of `left` [B] in each row."""
        committed, rows = self.model.mark(), len(left)
        width = min(max(self.candidates), self.model.vocabulary)
        ranks = torch.arange(width, device=rng.device)
        chain = Draft.empty(rows, rng.device)
        value = torch.zeros(rows, 1, dtype=torch.float64, device=rng.device)
        going = left > 0
        tokens, values = list[Tensor](), list[Tensor]()
        for level in range(depth):
            scores = self.score(chain, level - 1 if level else None)
            row = torch.full((rows, 1), level, device=rng.device)
            ids, probs = (part[:, 0] for part in scores.distributions(row).top(width))  # [B, width]
            first = probs[:, :1]
            count = torch.full_like(first, self.candidates[3])
            for bound, fewer in zip(reversed(_SURE), reversed(self.candidates[:3]), strict=True):
                count = torch.where(first > bound, fewer, count)
            total = value + probs.double().log()
            tokens.append(ids.clamp(min=0))
            values.append(torch.where(going[:, None] & (ranks < count), total, -torch.inf))
            value, going = total[:, :1], going & (first[:, 0] >= self.threshold) & (left > level + 1)
            if rng.device.type == "cpu" and not bool(going.any()):
                break
            live = torch.cat([chain.live, going[:, None]], 1)
            grown = torch.cat([chain.tokens, tokens[-1][:, :1]], 1)
            chain = Draft.guess(grown, Tree.chain(level + 1, rng.device), live)
        self.model.rewind(committed)  # accepted tokens are read again in one pass with the next root
        if not tokens:
            return chain
        first_above = (torch.arange(-1, len(tokens) - 1, device=rng.device) * width).clamp(min=-1)
        above = first_above[:, None].expand(-1, width).flatten().expand(rows, -1)
        kept, shape = rerank(torch.cat(values, 1), above, self.nodes)
        score = torch.cat(values, 1).gather(1, kept)
        tree = Tree(shape, len(tokens), width)
        return Draft.guess(torch.cat(tokens, 1).gather(1, kept), tree, score > -torch.inf, score.exp())
