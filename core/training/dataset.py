"""Training examples of draft heads, batched by length and read by the teacher.

An example can be ordinary text, the teacher's own answer (sequence-level and supervised distillation), a draft head's
drafts (on-policy distillation, arXiv 2306.13649, 2310.08461) or the positions where drafts were rejected while serving
(online distillation, arXiv 2310.07177). Works on token ids alone."""

from __future__ import annotations

import random
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import PassLayout
from outrider.core.errors import InvalidOption
from outrider.core.trace import Step
from outrider.core.training.draft_head import Batch

_POOL = 32  # batches whose examples are sorted by length together


@dataclass(frozen=True)
class Lesson:
    """A prompt and an answer, as token ids. `counts` are the positions of the answer that count for the loss; None:
    all. `temperature` is that at which the answer was drawn; 0: it is the teacher's likeliest."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    kind: str = ""
    temperature: float = 0.0
    counts: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


class Teacher(Protocol):
    """The target, run on teacher-forced rows."""

    device: torch.device
    vocabulary: int

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]: ...
    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor: ...


class TargetTeacher:
    """A target as a teacher, of our own decoder or of transformers: one pass over whole rows."""

    def __init__(self, target: SharingTarget) -> None:
        self.target = target
        self.device, self.vocabulary = target.device, target.vocabulary
        self._heads: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """The states [B, T, D] of every token."""
        if self.device.type == "cpu" or not isinstance(self.target, Decoder):
            return self._prefill(rows, needs)
        return self._pass(rows, needs)

    def _prefill(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """By the target's prefill, which omits the last token's states: each row gets one more token."""
        try:
            return self.target.begin([[*row, 0] for row in rows], Sampling(), needs | {"last"}).hidden
        finally:
            self.target.end()

    @torch.no_grad()
    def _pass(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """By one pass, whose layers all write the same memory in place of a cache."""
        network, longest = self.target.network, max(map(len, rows))
        network.ensure_positions(longest)
        tokens = np.zeros((len(rows), longest), np.int64)
        for row, ids in enumerate(rows):
            tokens[row, : len(ids)] = ids
        place = torch.arange(longest, device=self.device)
        layout = PassLayout(place[None], longest, (place <= place[:, None])[None], 0)
        cfg, shape = network.config, (1, len(rows), 2 * network.config.kv_heads, longest, network.config.head_dim)
        store = torch.empty(shape, dtype=network.dtype, device=self.device).expand(cfg.layers, -1, -1, -1, -1)
        tapped: dict[str, list[Tensor]] = {tap: [] for tap in needs | {"last"}}
        x = network.embed(torch.from_numpy(tokens).to(self.device))
        network.final_norm(network.run(x, store, layout, tapped), len(rows), tapped)
        return {tap: states for tap, (states,) in tapped.items()}

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        """States [N, D] -> logits [N, V], or over a reduced vocabulary [N, R]."""
        if vocabulary is None:
            return self.target.network.logits(states)
        key = vocabulary.data_ptr()
        if key not in self._heads:
            self._heads[key] = vocabulary, self.target.network.head.weight[vocabulary]
        return torch.nn.functional.linear(states, self._heads[key][1])


def read(teacher: Teacher, lessons: Sequence[Lesson], needs: frozenset[str]) -> Batch:
    """A batch of examples, with the teacher's states."""
    rows = [[*lesson.prompt, *lesson.answer] for lesson in lessons]
    longest = max(map(len, rows))
    tokens, answer = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), bool)
    for row, (ids, lesson) in enumerate(zip(rows, lessons, strict=True)):
        tokens[row, : len(ids)] = ids
        before = len(lesson.prompt) - 1
        if lesson.counts is None:
            answer[row, before : len(ids) - 1] = True
        else:
            answer[row, [before + position for position in lesson.counts]] = True
    live = np.arange(longest) < np.array([len(row) for row in rows])[:, None]
    words, there, counted = (torch.from_numpy(part).to(teacher.device) for part in (tokens, live, answer))
    return Batch(words, there, counted, teacher.states(rows, needs), teacher.logits)


def batches(lessons: Sequence[Lesson], tokens: int, seed: int, *, max_length: int = 1024) -> list[list[Lesson]]:
    """Seeded batches of at most `tokens` tokens, padding included, of examples of similar length. Answers are cut at
    `max_length`; examples whose prompts leave no room for an answer are dropped."""
    if tokens < max_length:
        max_length = tokens
    if tokens < 2:
        raise InvalidOption(f"a batch of {tokens} tokens has nothing to predict; tokens must be 2 or more")
    rows = [cut for lesson in lessons if (cut := _cut(lesson, max_length)) is not None]
    rng = random.Random(seed)
    rng.shuffle(rows)
    groups = []
    pool = max(_POOL * tokens // max(sum(lesson.size for lesson in rows) // max(len(rows), 1), 1), 1)
    for start in range(0, len(rows), pool):
        group: list[Lesson] = []
        for lesson in sorted(rows[start : start + pool], key=lambda row: row.size):
            if group and (len(group) + 1) * lesson.size > tokens:
                groups.append(group)
                group = []
            group.append(lesson)
        groups.append(group)
    rng.shuffle(groups)
    return groups


def _cut(lesson: Lesson, max_length: int) -> Lesson | None:
    room = max_length - len(lesson.prompt)
    if room < 1 or not lesson.prompt or not lesson.answer:
        return None
    counts = None if lesson.counts is None else tuple(position for position in lesson.counts if position < room)
    if lesson.size <= max_length or counts == ():
        return lesson if counts != () else None
    return Lesson(lesson.prompt, lesson.answer[:room], lesson.kind, lesson.temperature, counts)


def split(lessons: Sequence[Lesson], every: int = 40) -> tuple[list[Lesson], list[Lesson]]:
    """Training examples, and one in `every` for validation: chosen by a hash of the prompt, so that added examples do
    not change the split."""
    held_out = [zlib.crc32(np.array(lesson.prompt, np.int64).tobytes()) % every == 0 for lesson in lessons]
    training = [lesson for lesson, held in zip(lessons, held_out, strict=True) if not held]
    return training, [lesson for lesson, held in zip(lessons, held_out, strict=True) if held]


def rejections(prompt: Sequence[int], steps: Sequence[Step], after: int = 0) -> Lesson | None:
    """An example from serving one row: the positions where a draft was rejected, and the `after` positions after each
    count for the loss; None if nothing was rejected."""
    answer: list[int] = []
    rejected: list[int] = []
    for step in steps:
        answer += step.emitted
        if step.sources and step.sources[-1] == "resampled":
            rejected.append(len(answer) - 1)
    counts = sorted({start + more for start in rejected for more in range(after + 1) if start + more < len(answer)})
    return Lesson(tuple(prompt), tuple(answer), "served", counts=tuple(counts)) if counts else None
