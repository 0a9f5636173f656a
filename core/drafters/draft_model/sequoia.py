"""Sequoia (arXiv 2402.12374): the static tree that is best for measured acceptance, by dynamic programming.

`measure` runs a wide tree on some prompts and counts how often each sibling is accepted; a `Calibration` holds these
counts and the cost of passes, and can be saved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from outrider.core.assets.files import write_atomically
from outrider.core.cost.theory import fit_pass_cost
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import SampledTree, TopKTree
from outrider.core.drafters.tree_shapes import AcceptanceCounter, Choice, Shape, comb, sequoia
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target
from outrider.core.rng import CounterRNG
from outrider.core.rules.exact import Exact

_TYPICAL = (0.6, 0.12, 0.06, 0.035, 0.02, 0.015)


@dataclass(frozen=True)
class Calibration:
    """Measured acceptance and costs; costs are in target passes over one token."""

    counts: AcceptanceCounter
    draft: float = 0.0  # cost of drafting one level
    passes: tuple[tuple[int, float], ...] = ()  # (tokens, cost of a target pass over them)

    @property
    def acceptance(self) -> tuple[float, ...]:
        return self.counts.vector()

    def best(self, nodes: int, depth: int) -> Choice:
        """The tree of up to `nodes` nodes and `depth` levels with the most tokens per cost."""
        trees = sequoia(self.acceptance, nodes, depth)
        verify = fit_pass_cost(self.passes) if len(self.passes) > 1 else lambda tokens: 1.0
        return trees.best(verify, self.draft * verify(1))

    def save(self, path: Path) -> None:
        data = {
            "acceptance": self.counts.to_dict(),
            "draft": self.draft,
            "passes": [list(pair) for pair in self.passes],
        }
        write_atomically(path, json.dumps(data, indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> Calibration:
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            passes = tuple((int(tokens), float(cost)) for tokens, cost in data["passes"])
            return cls(AcceptanceCounter.from_dict(data["acceptance"]), float(data["draft"]), passes)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InvalidOption(
                f"{path} is not a calibration ({type(error).__name__}); give a file that Calibration.save wrote"
            ) from None


class Sequoia:
    """The best tree of up to `nodes` nodes and `depth` levels for `acceptance`: a Calibration or its file, whose costs
    also determine the size, or the probability that sibling j is the accepted one (the tree then uses all nodes), or
    None for typical values. Siblings are drawn without replacement; at temperature 0 they are the likeliest tokens."""

    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Target,
        *,
        acceptance: Sequence[float] | Calibration | str | Path | None = None,
        nodes: int = 16,
        depth: int = 6,
        sampling: Sampling | None = None,
    ) -> None:
        if nodes < 1 or depth < 1:
            raise InvalidOption(f"nodes={nodes}, depth={depth}: each must be 1 or more")
        if isinstance(acceptance, str | Path):
            acceptance = Calibration.load(Path(acceptance))
        self.shape: Shape
        if isinstance(acceptance, Calibration):
            self.shape = acceptance.best(nodes, depth).shape
        else:
            self.shape = sequoia(_TYPICAL if acceptance is None else acceptance, nodes, depth).shape(nodes, depth)
        self.shape = self.shape or (-1,)  # the smallest tree, if no tree is faster than plain decoding
        self.model, self._own = model, sampling
        self.vocabulary: int | None = model.vocabulary
        self._tree: SampledTree | TopKTree | None = None
        self._read = 0

    @property
    def bytes_read(self) -> int:
        return self._read + (self._tree.bytes_read if self._tree else 0)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._read = self.bytes_read
        kind = TopKTree if (self._own or sampling).greedy else SampledTree
        self._tree = kind(self.model, tree=self.shape, sampling=self._own)
        self._tree.begin(prefill, prompts, sampling)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        assert self._tree is not None
        return self._tree.propose(room, rng)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        assert self._tree is not None
        self._tree.observe(draft, scores, verdict, rng)

    def discard_draft(self) -> None:
        if self._tree is not None:
            self._tree.discard_draft()

    def end(self) -> None:
        self.model.end()


def measure(
    target: Target,
    model: Target,
    prompts: Prompts,
    *,
    sampling: Sampling,
    width: int = 6,
    depth: int = 4,
    tokens: int = 64,
    seed: int = 0,
) -> Iterator[AcceptanceCounter]:
    """Count which sibling is accepted, on trees with `width` siblings per level; yields the counts after each prompt,
    so that callers can show progress."""
    counter = AcceptanceCounter()
    shape = comb(depth, width)
    for number, prompt in enumerate(prompts):
        drafter = TopKTree(model, tree=shape) if sampling.greedy else SampledTree(model, tree=shape)
        for step in decode(
            target, drafter, Exact(), [prompt], sampling=sampling, max_new_tokens=tokens, seed=seed + number
        ):
            counter.add_step(step.parents, step.tried, step.path)
        yield counter
