"""The guided model as a teacher of heads and feature drafters, and pictures as its lessons.

What a draft head reads are the combined states of both streams, and what it learns is the guided distribution: just
what it meets when it drafts. Rows are a picture's codes alone; what each was asked for by, the teacher keeps to itself.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.network import Network
from outrider.core.training.dataset import Lesson
from outrider.image.layout_planner import decoder
from outrider.image.prompt_encoder import PromptEncoder
from outrider.image.training.objectives import TokensTask

_EPOCH = 1024  # pictures that are drawn anew and read again


class GuidedTeacher:
    """A token model under guidance, read in rows of a root and codes."""

    def __init__(self, network: Network, names: PromptEncoder, guidance: float) -> None:
        self.network, self.names, self.guidance = network, names, guidance
        self.device, self.vocabulary = network.device, network.config.vocabulary
        self.asked: dict[tuple[int, ...], list[int]] = {}  # of a row, what it was asked for by

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """States [B, T, D] behind every token; a prefill leaves out the last one, so each row gets one more."""
        asked = [self.asked[tuple(row)] for row in rows]
        target = Guided(decoder(self.network), asked, self.names.unconditional, self.guidance)
        try:
            return target.begin([[*row, 0] for row in rows], Sampling(), needs | {"last"}).hidden
        finally:
            target.end()

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        """[N, D] -> [N, V], or over some ids alone [N, R]."""
        states = states.to(self.network.dtype)
        if vocabulary is None:
            return self.network.logits(states)
        return torch.nn.functional.linear(states, self.network.head.weight[vocabulary])


class Lessons:
    """Pictures as they are learned from, moved anew in every epoch; and, as they are, those that judge."""

    def __init__(self, teacher: GuidedTeacher, course: TokensTask, judges: int) -> None:
        self.teacher, self.course = teacher, course
        self._judging: dict[tuple[int, ...], list[int]] = {}
        held = np.concatenate([course.held["held-out pairs"], course.held["held-out names"]])
        asked = [course.named(int(one)) for one in held[:judges]]
        self.held = self._lessons(course.encode(course.draws.read(held[:judges])), asked, self._judging)
        teacher.asked = dict(self._judging)

    def _lessons(
        self, codes: Tensor, asked: Sequence[list[int]], told: dict[tuple[int, ...], list[int]]
    ) -> list[Lesson]:
        root = self.course.codec.white
        found = []
        for row, ids in zip(codes.tolist(), asked, strict=True):
            told[(root, *row)] = ids
            found.append(Lesson((root,), tuple(row), "picture"))
        return found

    def __call__(self, epoch: int, share: float) -> Sequence[Lesson]:
        course, told, found = self.course, dict(self._judging), list[Lesson]()
        draw = random.Random(f"{course.draws.seed}/taught/{epoch}")
        size = course.draws.size
        for number in range(-(-_EPOCH // size)):
            at = epoch * (-(-_EPOCH // size)) + number
            places, generator = course.draws.places(at), course.draws.generator(at)
            still = torch.zeros(len(places), dtype=torch.bool)
            pictures = course.draws.moved(course.draws.read(places), generator, still)
            asked = [course.asked(int(place), draw) for place in places]
            found += self._lessons(course.encode(pictures), asked, told)
        self.teacher.asked = told
        return found
