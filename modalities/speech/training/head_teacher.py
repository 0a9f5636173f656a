"""The voice as the teacher of draft heads, and utterances as its lessons.

Rows hold an utterance's tokens only; the teacher looks up the utterance of each row for its phonemes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.training.dataset import Lesson
from outrider.speech.training.data import Utterance
from outrider.speech.voice import LOOKAHEAD, Voice, VoiceDecoder


class VoiceTeacher:
    """A voice, evaluated on rows of the end token and an utterance's codes."""

    def __init__(self, voice: Voice, utterances: Sequence[Utterance], device: torch.device) -> None:
        self.voice = voice.to(device).eval().requires_grad_(False)
        self.network = voice.network(torch.float32, device)
        self.device, self.vocabulary = device, voice.form.vocabulary
        self.lessons = [Lesson((voice.end,), (*each.codes.tolist(), voice.end), each.kind) for each in utterances]
        rows = zip(self.lessons, utterances, strict=True)
        self._utterances = {lesson.prompt + lesson.answer: utterance for lesson, utterance in rows}

    @property
    def target(self) -> VoiceDecoder:
        """The target to construct draft heads with: a decoder for an empty utterance."""
        return VoiceDecoder(self.network, self.voice.script([[0, 0]]))

    @torch.no_grad()
    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        """Hidden states [B, T, D] after each token, by tap."""
        utterances = [self._utterances[tuple(row)] for row in rows]
        script = self.voice.script(
            [utterance.phonemes.tolist() for utterance in utterances],
            durations=[utterance.durations.tolist() for utterance in utterances],
        )
        longest = max(map(len, rows))
        missing = max(longest + LOOKAHEAD + 1 - script.conditioning.shape[1], 0)
        conditioning = F.pad(script.conditioning, (0, 0, 0, missing), mode="replicate")
        ids = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows], device=self.device)
        taps = self.voice.hidden_states(ids, conditioning[:, :longest], needs | {"last"})
        if "ahead" in needs:
            later = [conditioning[:, offset : offset + longest] for offset in range(1, LOOKAHEAD + 1)]
            taps["ahead"] = torch.cat(later, -1)
        return taps

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        """[N, D] -> logits [N, V], or [N, R] of the ids in `vocabulary`."""
        rows = self.voice.head if vocabulary is None else self.voice.head[vocabulary]
        return F.linear(states.float(), rows)
