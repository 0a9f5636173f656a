"""The voice as a teacher of heads and feature drafters, and utterances as its lessons.

Rows are an utterance's tokens alone; what is to be said at each, the teacher keeps to itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.training.dataset import Lesson
from outrider.speech.training.data import Utterance
from outrider.speech.voice import AHEAD, Speaker, Voice


class VoiceTeacher:
    """A voice, read in rows of an end and an utterance's tokens."""

    def __init__(self, voice: Voice, utterances: Sequence[Utterance], device: torch.device) -> None:
        self.voice = voice.to(device).eval().requires_grad_(False)
        self.network = voice.network(torch.float32, device)
        self.device, self.vocabulary = device, voice.form.vocabulary
        self.lessons = [Lesson((voice.end,), (*one.codes.tolist(), voice.end), one.kind) for one in utterances]
        rows = zip(self.lessons, utterances, strict=True)
        self._said = {one.prompt + one.answer: utterance for one, utterance in rows}

    @property
    def target(self) -> Speaker:
        """What draft heads are made for: the decoder, of an utterance that says nothing."""
        return Speaker(self.network, self.voice.script([[0, 0]]))

    @torch.no_grad()
    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """States [B, T, D] behind every token, under the names of the decoder's taps."""
        said = [self._said[tuple(row)] for row in rows]
        script = self.voice.script(
            [one.phonemes.tolist() for one in said], shares=[one.shares.tolist() for one in said]
        )
        longest = max(map(len, rows))
        told = F.pad(script.told, (0, 0, 0, max(longest + AHEAD + 1 - script.told.shape[1], 0)), mode="replicate")
        read = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        found = self.voice.tapped(read, told[:, :longest], needs | {"last"})
        if "ahead" in needs:
            parts = [told[:, place : place + longest] for place in range(1, AHEAD + 1)]
            found["ahead"] = torch.cat(parts, -1)
        return found

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        """[N, D] -> [N, V], or over some ids alone [N, R]."""
        rows = self.voice.head if vocabulary is None else self.voice.head[vocabulary]
        return F.linear(states.float(), rows)
