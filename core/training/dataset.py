"""What is learned from, a row at a time: rows made into batches of about the same length, and read by the teacher.

Ordinary text, the teacher's own answers (sequence-level and supervised distillation), a draft head's own drafts
(on-policy distillation, arXiv 2306.13649, 2310.08461) and the places where drafts were rejected while serving (online
distillation, arXiv 2310.07177) are all lessons; they differ in where they come from. Knows token ids alone."""

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
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.trace import Step
from outrider.core.training.draft_head import Batch

_POOL = 32  # batches that are sorted by length together


@dataclass(frozen=True)
class Lesson:
    """A prompt and what followed it, as token ids. `counts`: the places of the answer that the loss is about; None:
    all of them. `drawn`: at which temperature; 0 is the teacher's own choice."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    kind: str = ""
    temperature: float = 0.0
    counts: tuple[int, ...] | None = None

    @property
    def size(self) -> int:
        return len(self.prompt) + len(self.answer)


class Teacher(Protocol):
    """The target, read in teacher-forced rows."""

    device: torch.device
    vocabulary: int

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]: ...
    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor: ...


class DecoderTeacher:
    """Our own decoder as a teacher: the prefill of whole rows."""

    def __init__(self, decoder: Decoder) -> None:
        self.decoder = decoder
        self.device, self.vocabulary = decoder.device, decoder.vocabulary
        self._heads: dict[int, tuple[Tensor, Tensor]] = {}

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """States [B, T, D] behind every token; a prefill leaves out the last one, so each row gets one more."""
        try:
            return self.decoder.begin([[*row, 0] for row in rows], Sampling(), needs | {"last"}).hidden
        finally:
            self.decoder.end()

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        """[N, D] -> [N, V], or over some ids alone [N, R]."""
        if vocabulary is None:
            return self.decoder.network.logits(states)
        key = vocabulary.data_ptr()
        if key not in self._heads:
            self._heads[key] = vocabulary, self.decoder.network.head.weight[vocabulary]
        return torch.nn.functional.linear(states, self._heads[key][1])


def read(teacher: Teacher, lessons: Sequence[Lesson], needs: frozenset[str]) -> Batch:
    """Some lessons, read by the teacher."""
    rows = [[*one.prompt, *one.answer] for one in lessons]
    longest = max(map(len, rows))
    tokens, answer = np.zeros((len(rows), longest), np.int64), np.zeros((len(rows), longest), bool)
    for row, (ids, one) in enumerate(zip(rows, lessons, strict=True)):
        tokens[row, : len(ids)] = ids
        before = len(one.prompt) - 1
        if one.counts is None:
            answer[row, before : len(ids) - 1] = True
        else:
            answer[row, [before + place for place in one.counts]] = True
    live = np.arange(longest) < np.array([len(row) for row in rows])[:, None]
    words, there, counted = (torch.from_numpy(part).to(teacher.device) for part in (tokens, live, answer))
    return Batch(words, there, counted, teacher.states(rows, needs), teacher.logits)


def batches(lessons: Sequence[Lesson], tokens: int, seed: int, *, max_length: int = 1024) -> list[list[Lesson]]:
    """Seeded batches of at most so many tokens, padding included; rows of similar length share one. Longer answers are
    cut, and prompts that leave no room for one are left out."""
    if tokens < max_length:
        max_length = tokens
    if tokens < 2:
        raise InvalidOption(f"a batch of {tokens} tokens holds nothing to learn; it must be 2 or more")
    rows = [cut for one in lessons if (cut := _cut(one, max_length)) is not None]
    draw = random.Random(seed)
    draw.shuffle(rows)
    found = []
    pool = max(_POOL * tokens // max(sum(one.size for one in rows) // max(len(rows), 1), 1), 1)
    for start in range(0, len(rows), pool):
        group: list[Lesson] = []
        for one in sorted(rows[start : start + pool], key=lambda row: row.size):
            if group and (len(group) + 1) * one.size > tokens:
                found.append(group)
                group = []
            group.append(one)
        found.append(group)
    draw.shuffle(found)
    return found


def _cut(one: Lesson, max_length: int) -> Lesson | None:
    room = max_length - len(one.prompt)
    if room < 1 or not one.prompt or not one.answer:
        return None
    counts = None if one.counts is None else tuple(place for place in one.counts if place < room)
    if one.size <= max_length or counts == ():
        return one if counts != () else None
    return Lesson(one.prompt, one.answer[:room], one.kind, one.temperature, counts)


def split(lessons: Sequence[Lesson], every: int = 40) -> tuple[list[Lesson], list[Lesson]]:
    """Those to learn from, and one in so many to judge by: by their prompts, so that it stays the same as lessons are
    added."""
    held = [zlib.crc32(np.array(one.prompt, np.int64).tobytes()) % every == 0 for one in lessons]
    learned = [one for one, kept in zip(lessons, held, strict=True) if not kept]
    return learned, [one for one, kept in zip(lessons, held, strict=True) if kept]


def rejections(prompt: Sequence[int], steps: Sequence[Step], behind: int = 0) -> Lesson | None:
    """What serving one row teaches: the places where a draft was rejected, and as many `behind` each; None if all was
    accepted."""
    answer: list[int] = []
    places: list[int] = []
    for step in steps:
        answer += step.emitted
        if step.sources and step.sources[-1] == "resampled":
            places.append(len(answer) - 1)
    counts = sorted({place + more for place in places for more in range(behind + 1) if place + more < len(answer)})
    return Lesson(tuple(prompt), tuple(answer), "served", counts=tuple(counts)) if counts else None
