"""Plain decoding that keeps the target's hidden states of every token that it reads: what training would compute again.

Independent of where they are stored."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Plain, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG


class StateRecorder(Plain):
    """Drafts nothing, and gathers the states at the taps `needs` and at "last"."""

    def __init__(self, needs: frozenset[str]) -> None:
        self.needs = needs | {"last"}
        self._pieces: list[list[Tensor]] = []  # of each prompt, [taps, tokens, D]
        self._rows: list[int] = []  # the prompt that each row continues

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        states = torch.stack([prefill.hidden[tap] for tap in sorted(self.needs)])
        self._pieces = [[states[:, row, : len(prompt) - 1]] for row, prompt in enumerate(prompts)]
        self._rows = list(range(len(prompts)))

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        roots = torch.stack([scores.hidden[tap][:, :1] for tap in sorted(self.needs)])
        for row, prompt in enumerate(self._rows):
            self._pieces[prompt].append(roots[:, row])

    def arrange(self, order: Sequence[int], width: int) -> None:
        self._rows = [self._rows[row] for row in order]

    def states(self, prompt: int, length: int) -> Tensor:
        """The states [taps, length, D] of a prompt and its continuation, together `length` tokens; of the last token,
        which was not read, they are 0."""
        read = torch.cat(self._pieces[prompt], 1)[:, : length - 1]
        return torch.nn.functional.pad(read, (0, 0, 0, length - read.shape[1]))
