"""Guidance as a target: two streams, one with what was asked for and one without, scored as one batch.

Classifier-free guidance (arXiv 2207.12598) on logits: u + g (c - u), from which distributions are then made as from any
logits; so p in every rule, and q of a draft model that is guided alike, is the guided distribution. Both streams read
the same tokens and are cut back together. What was asked for stands before each row's prompt in the target alone: the
loop, drafters and rules see tokens of the output only. Hidden states are combined as logits are: what an output layer
without a bias says of the combined last state is then the guided distribution. Knows two streams of logits, nothing of
pictures or sound."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target, committed
from outrider.core.tree import Tree
from outrider.core.vocab_mask import Allowed


class Guided:
    """A target under guidance. `asked` holds one condition a row; `free` is the condition that asks for nothing, of the
    same length as all of them, or one for each row, of any length. At guidance 1 there is one stream, with what was
    asked for; at 0 one without.

    `instead`: a prompt's first token is not read; it stands for the condition's last, for models whose picture follows
    their prompt at once. `slots`: what may stand where behind the prompt.
    """

    def __init__(
        self,
        inner: Target,
        asked: Sequence[Sequence[int]],
        free: Sequence[int] | Sequence[Sequence[int]],
        guidance: float = 1.0,
        *,
        instead: bool = False,
        slots: Allowed | None = None,
    ) -> None:
        if not 0 <= guidance < math.inf:
            raise InvalidOption(f"guidance is {guidance}; it must be 0 (what was asked for is not looked at) or more")
        self._free: list[list[int]] | None = None  # one for each row
        if free and not isinstance(free[0], int):
            self._free = [list(one) for one in free if not isinstance(one, int)]
        self.free = [one for one in free if isinstance(one, int)]  # one for all
        if self._free is None and any(len(one) != len(free) for one in asked):
            raise InvalidOption("conditions differ in length; fill them up, so that both streams stand at one place")
        self.inner, self.asked, self.guidance = inner, asked, guidance
        self._instead, self._slots = int(instead), slots
        self.vocabulary, self.device, self.rollback = inner.vocabulary, inner.device, inner.rollback
        self.streams = 1 if guidance in (0, 1) else 2
        self.weight_bytes = inner.weight_bytes

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if len(prompts) != len(self.asked):
            raise InvalidOption(f"there are {len(self.asked)} conditions for {len(prompts)} prompts; give one each")
        free = [self.free] * len(prompts) if self._free is None else self._free
        wanted = [self.asked] * (self.guidance != 0) + [free] * (self.guidance != 1)
        given = [[*one, *prompt[self._instead :]] for some in wanted for one, prompt in zip(some, prompts, strict=True)]
        before = [len(one) - self._instead for some in wanted for one in some]
        self._rows, self._before = len(prompts), torch.tensor(before, device=self.device)
        self._prompted = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        hidden = self.inner.begin(given, Sampling(), needs).hidden
        longest = max(map(len, prompts)) - 1
        return Prefill({tap: self._combined(self._own(states, longest)) for tap, states in hidden.items()})

    def _own(self, states: Tensor, count: int) -> Tensor:
        """What was read of prompts, without the conditions: [B, L, D] -> [B, count, D]."""
        place = self._before[:, None] + torch.arange(count, device=self.device)
        place = place.clamp(max=max(states.shape[1] - 1, 0))
        return states.gather(1, place[..., None].expand(-1, -1, states.shape[2]))

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        found = self.inner.score(self._twice(draft), since)
        lengths = found.lengths[: self._rows] - self._before[: self._rows]

        def logits(rows: Tensor) -> Tensor:
            said = self._combined(found.logits(torch.cat([rows] * self.streams)))
            if self._slots is None:
                return said
            return self._slots.only(said, scores.position(rows) - self._prompted[:, None])

        hidden = {tap: self._combined(states) for tap, states in found.hidden.items()}
        scores = Scores(draft, self._pipeline, lengths, logits, hidden, found.first)
        return scores

    def _combined(self, both: Tensor) -> Tensor:
        """What both streams say [2 B, ...] -> [B, ...], in 32 bits or more."""
        if self.streams == 1:
            return both
        asked, free = (both if both.dtype == torch.float64 else both.float()).chunk(2)
        return free + self.guidance * (asked - free)

    def _twice(self, draft: Draft) -> Draft:
        if self.streams == 1:
            return draft
        tree = draft.tree
        if len(tree.parents) > 1:
            tree = Tree(_double(tree.parents), tree.depth, tree.width)
        positions, probe = draft.positions, draft.probe
        return replace(
            Draft.guess(_double(draft.tokens), tree, _double(draft.live)),
            positions=positions if positions is None or len(positions) == 1 else _double(positions),
            probe=None if probe is None else _double(probe),
        )

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self._pipeline.commit(committed(draft, verdict, count))
        if self.streams == 2:
            outcome = None if verdict.outcome is None else verdict.outcome + verdict.outcome
            verdict = Verdict.of([_double(part) for part in verdict.parts], outcome)
            count = _double(count)
        self.inner.keep(self._twice(draft), verdict, count)

    def mark(self) -> object:
        return self.inner.mark(), copy.copy(self._pipeline)

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self.inner.rewind(mark[0])
        self._pipeline = copy.copy(mark[1])

    def end(self) -> None:
        self.inner.end()


def _double(part: Tensor) -> Tensor:
    return torch.cat([part, part])
