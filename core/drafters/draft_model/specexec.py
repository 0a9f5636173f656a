"""The most probable tree of a thousand nodes or more, found best first (SpecExec, arXiv 2406.02532).

Each pass of the draft model expands the most probable candidates, wherever they are in the tree; the search ends when
no unexpanded candidate can have a child among the `nodes` best. For targets whose passes cost the same at any width,
such as those streamed from slower memory. Independent of the target.
"""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import softened
from outrider.core.drafters.tree_shapes import rerank
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG
from outrider.core.tree import Tree


class SpecExec:
    """A tree of the `nodes` most probable paths under the model. At most `passes` passes expand `batch` nodes each,
    with their `width` likeliest successors.

    The paper caches the target's distributions at all nodes and samples along the tree until a token leaves it; ours
    does the same in one verdict. The paper's acceptance rule is `sample-match`; `exact` is the same for fixed guesses.
    """

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Target,
        *,
        nodes: int = 256,
        batch: int = 16,
        width: int = 16,
        passes: int = 24,
        sampling: Sampling | None = None,
    ) -> None:
        if min(nodes, batch, width, passes) < 1:
            raise InvalidOption(f"nodes={nodes}, batch={batch}, width={width}, passes={passes}: each must be 1 or more")
        self.model, self.nodes, self.batch, self.width, self.passes = model, nodes, batch, width, passes
        self.vocabulary: int | None = model.vocabulary
        self.bytes_read = 0
        self._own = sampling

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self.model.begin(prompts, self._own or softened(sampling), frozenset())

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rows, device = len(room), rng.device
        left = upload(room, device)
        self._open = left >= 0
        deepest = int(room.max())
        if deepest < 1:
            return Draft.empty(rows, device)
        committed = self.model.mark()
        search = _Search(rows, self.width, device)
        for number in range(self.passes):
            before = search.grown.size if number else -1
            if number and not search.expand(self.batch, self.nodes, left, deepest):
                break
            self.bytes_read += self.model.weight_bytes
            scores = self.model.score(search.grown, None if before < 0 else before)
            ids, probs = scores.distributions().top(self.width)
            search.add(ids, probs.double().log(), left)
        self.model.rewind(committed)  # accepted tokens are read again in one pass with the next root
        return search.draft(self.nodes, min(deepest, self.passes))

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        self.model.keep(draft, verdict, verdict.kept(self._open))

    def end(self) -> None:
        self.model.end()


class _Search:
    """The candidates of all rows: tokens, parents, depths, log-probabilities of their paths, and their index among the
    expanded nodes, -1 for the others."""

    def __init__(self, rows: int, width: int, device: torch.device) -> None:
        self.width = width
        self.grown = Draft.empty(rows, device)  # the expanded nodes, the only ones that the model reads
        empty = torch.zeros(rows, 0, dtype=torch.long, device=device)
        self.tokens, self.parents, self.depths, self.index = empty, empty, empty, empty
        self.values = empty.double()
        self._latest = torch.full((rows, 1), -1, device=device)  # the candidates expanded last; -1: the root
        self._real = torch.ones_like(self._latest, dtype=torch.bool)  # the others are padding
        self._levels = 0

    def add(self, ids: Tensor, logs: Tensor, left: Tensor) -> None:
        """Add the successors [B, E, W] of the nodes expanded last, with their log-probabilities."""
        above = self._latest[..., None].expand_as(ids)
        rooted = above < 0
        if self.values.shape[1]:
            flat = above.clamp(min=0).flatten(1)
            over = self.values.gather(1, flat).view(above.shape)
            depth = self.depths.gather(1, flat).view(above.shape)
            value, depth = torch.where(rooted, 0.0, over) + logs, torch.where(rooted, 0, depth + 1)
        else:
            value, depth = logs, torch.zeros_like(ids)
        fits = (depth < left[:, None, None]) & (ids >= 0) & self._real[..., None]
        value = torch.where(fits, value, -torch.inf)
        parts = (ids, above, depth, torch.full_like(ids, -1))
        self.tokens, self.parents, self.depths, self.index = (
            torch.cat([old, new.flatten(1)], 1)
            for old, new in zip((self.tokens, self.parents, self.depths, self.index), parts, strict=True)
        )
        self.values = torch.cat([self.values, value.flatten(1)], 1)

    def expand(self, batch: int, nodes: int, left: Tensor, deepest: int) -> bool:
        """Expand the most probable leaves; False if none can have a child among the `nodes` best."""
        leaf = (self.index < 0) & (self.depths + 1 < left[:, None])
        value = torch.where(leaf, self.values, -torch.inf)
        if self.values.shape[1] > nodes:
            threshold = self.values.topk(nodes).values[:, -1:]
            value = torch.where(value > threshold, value, -torch.inf)
        value, best = value.topk(min(batch, value.shape[1]))
        if value.device.type == "cpu":
            useful = int((value > -torch.inf).sum(1).max())
            if not useful:
                return False
            value, best = value[:, :useful], best[:, :useful]
        start, count = self.grown.size, best.shape[1]
        above = self.parents.gather(1, best)
        parents = torch.where(above < 0, -1, self.index.gather(1, above.clamp(min=0)))
        self._real = value > -torch.inf
        new = torch.arange(start, start + count, device=best.device)
        self.index = self.index.scatter(1, best, torch.where(self._real, new, self.index.gather(1, best)))
        self._levels += 1
        self.grown = Draft.guess(
            torch.cat([self.grown.tokens, self.tokens.gather(1, best).clamp(min=0)], 1),
            Tree(torch.cat([self.grown.tree.parents.expand(len(best), -1), parents], 1), self._levels, self.width),
            torch.cat([self.grown.live, self._real], 1),
        )
        self._latest = best
        return True

    def draft(self, nodes: int, depth: int) -> Draft:
        kept, shape = rerank(self.values, self.parents, nodes)
        value = self.values.gather(1, kept)
        tokens = self.tokens.gather(1, kept).clamp(min=0)
        return Draft.guess(tokens, Tree(shape, depth, self.width), value > -torch.inf, value.exp())
