"""Classifier-free guidance (arXiv 2207.12598) as a target: conditional and unconditional stream scored as one batch.

The logits are u + g (c - u), and distributions are computed from them as from any logits; so p in every rule, and q of
a draft model with the same guidance, are guided distributions. Both streams read the same tokens. Conditions precede
each row's prompt inside this target only: the loop, drafters and rules see output tokens. Hidden states are combined
like logits, so an output layer without bias gives the guided logits for the combined last state. Independent of images
and sound."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.core.engine.network import Network
from outrider.core.errors import InvalidOption
from outrider.core.protocol import ArrangeableRows, Prefill, Prompts, Scores, Target, committed
from outrider.core.tree import Tree
from outrider.core.vocab_mask import VocabMask


class Guided:
    """A target with guidance. `conditions`: one per row. `unconditional`: the empty condition, of the same length as
    all conditions, or one per row, of any length. With guidance 1 only the conditional stream is run, with 0 only the
    other.

    `skip_first`: the prompt's first token is not read; it stands for the condition's last token, for models whose
    output follows their prompt without a start token. `allowed`: which tokens are valid at which output position.
    """

    def __init__(
        self,
        inner: Target,
        conditions: Sequence[Sequence[int]],
        unconditional: Sequence[int] | Sequence[Sequence[int]],
        guidance: float = 1.0,
        *,
        skip_first: bool = False,
        allowed: VocabMask | None = None,
    ) -> None:
        if not 0 <= guidance < math.inf:
            raise InvalidOption(f"guidance is {guidance}; it must be 0 (the condition is ignored) or more")
        self._shared = [token for token in unconditional if isinstance(token, int)]  # for all rows
        self.unconditional: list[list[int]] | None = None  # one per row
        if unconditional and not isinstance(unconditional[0], int):
            self.unconditional = [list(ids) for ids in unconditional if not isinstance(ids, int)]
        elif any(len(condition) != len(unconditional) for condition in conditions):
            raise InvalidOption(
                f"conditions have {sorted({*map(len, conditions)})} tokens and the unconditional one has "
                f"{len(unconditional)}; pad all to the same length, or give an unconditional one per row"
            )
        self.inner, self.conditions, self.guidance = inner, conditions, guidance
        self._skipped, self._allowed = int(skip_first), allowed
        self.vocabulary, self.device, self.rollback = inner.vocabulary, inner.device, inner.rollback
        self.streams = 1 if guidance in (0, 1) else 2
        self.weight_bytes = inner.weight_bytes
        if isinstance(inner, ArrangeableRows):
            self.arrange = partial(self._arrange, inner)  # which only then makes this one ArrangeableRows

    @property
    def network(self) -> Network:
        """What draft heads share with the inner target, if it has something to share."""
        return cast(SharingTarget, self.inner).network

    @property
    def taps(self) -> Sequence[str]:
        return cast(SharingTarget, self.inner).taps

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if len(prompts) != len(self.conditions):
            raise InvalidOption(
                f"there are {len(self.conditions)} conditions for {len(prompts)} prompts; give one for each prompt"
            )
        unconditional = [self._shared] * len(prompts) if self.unconditional is None else self.unconditional
        streams = [self.conditions] * (self.guidance != 0) + [unconditional] * (self.guidance != 1)
        skipped = self._skipped
        inputs = [[*ids, *prompt[skipped:]] for stream in streams for ids, prompt in zip(stream, prompts, strict=True)]
        offsets = [len(ids) - skipped for stream in streams for ids in stream]
        self._rows, self._offsets = len(prompts), torch.tensor(offsets, device=self.device)
        self._prompt_lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        hidden = self.inner.begin(inputs, Sampling(), needs).hidden
        longest = max(map(len, prompts)) - 1
        return Prefill({tap: self._combine(self._of_prompts(states, longest)) for tap, states in hidden.items()})

    def _of_prompts(self, states: Tensor, count: int) -> Tensor:
        """The states of the prompts without the conditions: [B, L, D] -> [B, count, D]."""
        index = self._offsets[:, None] + torch.arange(count, device=self.device)
        index = index.clamp(max=max(states.shape[1] - 1, 0))
        return states.gather(1, index[..., None].expand(-1, -1, states.shape[2]))

    def score(self, draft: Draft, since: int | None = None) -> Scores:
        inner = self.inner.score(self._for_streams(draft), since)
        lengths = inner.lengths[: self._rows] - self._offsets[: self._rows]

        def logits(rows: Tensor) -> Tensor:
            guided = self._combine(inner.logits(torch.cat([rows] * self.streams)))
            if self._allowed is None:
                return guided
            return self._allowed.apply(guided, scores.position(rows) - self._prompt_lengths[:, None])

        hidden = {tap: self._combine(states) for tap, states in inner.hidden.items()}
        scores = Scores(draft, self._pipeline, lengths, logits, hidden, inner.first)
        return scores

    def _combine(self, both: Tensor) -> Tensor:
        """Logits or states of the streams [2 B, ...] -> guided ones [B, ...], in 32 bits or more."""
        if self.streams == 1:
            return both
        conditional, unconditional = (both if both.dtype == torch.float64 else both.float()).chunk(2)
        return unconditional + self.guidance * (conditional - unconditional)

    def _for_streams(self, draft: Draft) -> Draft:
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
        self._pipeline.commit(committed(draft, verdict, count), verdict.known(count))
        if self.streams == 2:
            outcome = None if verdict.outcome is None else verdict.outcome + verdict.outcome
            verdict = Verdict.of([_double(part) for part in verdict.parts], outcome)
            count = _double(count)
        self.inner.keep(self._for_streams(draft), verdict, count)

    def _arrange(self, inner: ArrangeableRows, order: Sequence[int], width: int) -> None:
        """Let rows leave; the others keep their order."""
        rows = [row + self._rows * stream for stream in range(self.streams) for row in order]
        inner.arrange(rows, width + max(map(len, self.conditions)))
        self._pipeline.arrange(order)
        self._offsets, self._prompt_lengths = self._offsets[rows], self._prompt_lengths[list(order)]
        self._rows = len(order)

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
