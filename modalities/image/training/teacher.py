"""A guided model of codes as the teacher of draft heads, and images as its lessons.

A draft head reads the combined hidden states of the conditional and the unconditional stream and learns the guided
distribution, as in drafting. Rows hold an image's codes only; the teacher looks up the prompt of each row.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.engine.network import Network
from outrider.core.protocol import Target
from outrider.core.training.dataset import Lesson
from outrider.image.training.objectives import TokensTask

_EPOCH = 1024  # images per epoch; each epoch shifts them again


class GuidedTeacher:
    """A model under guidance, evaluated on rows of a root and codes. `target` makes a target for prompts; `network`
    has its output rows."""

    def __init__(self, network: Network, target: Callable[[Sequence[Sequence[int]]], Target]) -> None:
        self.network, self.target = network, target
        self.device, self.vocabulary = network.device, network.config.vocabulary
        self.prompts: dict[tuple[int, ...], list[int]] = {}  # row -> its prompt

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """Hidden states [B, T, D] after each token but the last, by tap."""
        prompts = [self.prompts[tuple(row)] for row in rows]
        lengths = [len(prompt) for prompt in prompts]
        order = sorted(range(len(rows)), key=lengths.__getitem__)
        parts = list[Mapping[str, Tensor]]()
        for _, group in groupby(order, lengths.__getitem__):  # some models take prompts of one length only
            some = list(group)
            target = self.target([prompts[index] for index in some])
            try:
                parts.append(target.begin([list(rows[index]) for index in some], Sampling(), needs | {"last"}).hidden)
            finally:
                target.end()
        back = torch.tensor(order).argsort().to(self.device)
        states = {tap: torch.cat([part[tap] for part in parts])[back] for tap in parts[0]}
        # a prefill omits the last token's state, after which nothing is guessed
        return {tap: torch.nn.functional.pad(each, (0, 0, 0, 1)) for tap, each in states.items()}

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        """[N, D] -> logits [N, V], or [N, R] of the ids in `vocabulary`."""
        states = states.to(self.network.dtype)
        if vocabulary is None:
            return self.network.logits(states)
        return torch.nn.functional.linear(states, self.network.head.weight[vocabulary])


class Lessons:
    """The training lessons of each epoch, with images shifted at random, and `size` fixed validation lessons. Both
    register their prompts with the teacher."""

    def __init__(self, teacher: GuidedTeacher, task: TokensTask, size: int) -> None:
        self.teacher, self.task = teacher, task
        self._validation_prompts: dict[tuple[int, ...], list[int]] = {}
        indices = np.concatenate([task.validation["held-out pairs"], task.validation["held-out names"]])[:size]
        prompts = [task.full_prompt(int(index)) for index in indices]
        codes = task.encode(task.batches.pixels(indices))
        self.validation = self._lessons(codes, prompts, self._validation_prompts)
        teacher.prompts = dict(self._validation_prompts)

    def _lessons(
        self, codes: Tensor, prompts: Sequence[list[int]], by_row: dict[tuple[int, ...], list[int]]
    ) -> list[Lesson]:
        """Codes [B, N] as lessons; their prompts are added to `by_row`."""
        root = self.task.codec.white
        lessons = []
        for row, prompt in zip(codes.tolist(), prompts, strict=True):
            by_row[(root, *row)] = prompt
            lessons.append(Lesson((root,), tuple(row), "image"))
        return lessons

    def __call__(self, epoch: int, share: float) -> Sequence[Lesson]:
        task, batches = self.task, self.task.batches
        by_row, lessons = dict(self._validation_prompts), list[Lesson]()
        rng = random.Random(f"{batches.seed}/taught/{epoch}")
        count = -(-_EPOCH // batches.size)
        for number in range(epoch * count, (epoch + 1) * count):
            indices, generator = batches.indices(number), batches.generator(number)
            flip = torch.zeros(len(indices), dtype=torch.bool)
            pictures = batches.augment(batches.pixels(indices), generator, flip)
            prompts = [task.random_prompt(int(index), rng) for index in indices]
            lessons += self._lessons(task.encode(pictures), prompts, by_row)
        self.teacher.prompts = by_row
        return lessons
