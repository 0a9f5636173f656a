"""Judges of speech: whether it says what it should (Whisper base), how it would be rated (DNSMOS P.835), and who
speaks (Resemblyzer). All are fetched through outrider.core.assets.store; the extra `judges` has what they run in.

Knows sound and words, nothing of tokens or decoding.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.assets.store import Checkpoint, fetch, unpickled
from outrider.core.errors import OutriderError
from outrider.speech.audio import Sound

_RATE = 16_000  # what all of them hear
_RATED = 144_160  # samples that DNSMOS hears at a time: 9.01 seconds
_CURVES = (  # from what its network says to a mean opinion: of the signal, of the background, overall
    (-0.08397278, 1.22083953, 0.0052439),
    (-0.13166888, 1.60915514, -0.39604546),
    (-0.06766283, 1.11546468, 0.04602535),
)


class JudgeError(OutriderError):
    """A judge that can't be had."""


@dataclass(frozen=True)
class Rating:
    """Predicted mean opinions, from 1 to 5."""

    signal: float
    background: float
    overall: float


@dataclass(frozen=True)
class Errors:
    """How far what was heard is from what was meant."""

    heard: str
    words: int  # that were meant
    wrong: int  # words to be changed, left out or put in
    letters: int
    off: int

    @property
    def word_rate(self) -> float:
        return self.wrong / max(self.words, 1)

    @property
    def letter_rate(self) -> float:
        return self.off / max(self.letters, 1)


class Judges:
    """All of them, each made when it is first asked. So many `listeners` may ask at once."""

    def __init__(self, threads: int = 1, listeners: int = 1) -> None:
        self.threads, self.listeners = threads, listeners

    def ready(self) -> None:
        """Make them all now, before several threads ask at once."""
        _ = self._whisper, self._mos, self._encoder

    def errors(self, sound: Sound, meant: str) -> Errors:
        """Have Whisper write down what it hears, without telling it what to expect."""
        parts, _ = self._whisper.transcribe(
            sound.at(_RATE).samples, language="en", beam_size=5, condition_on_previous_text=False
        )
        return compared(" ".join(part.text.strip() for part in parts), meant)

    def rating(self, sound: Sound) -> Rating:
        """DNSMOS, averaged over a window that moves by a second; what is shorter is repeated, as its authors do."""
        if not len(sound.samples):
            raise JudgeError("there is no sound to rate")
        heard = sound.at(_RATE).samples
        while len(heard) < _RATED:
            heard = np.concatenate([heard, heard])
        found = []
        for start in range(0, len(heard) - _RATED + 1, _RATE):
            part = heard[None, start : start + _RATED].astype(np.float32)
            found.append(self._mos.run(None, {self._mos.get_inputs()[0].name: part})[0][0])
        raw = np.mean([[np.polyval(curve, one) for curve, one in zip(_CURVES, each, strict=True)] for each in found], 0)
        return Rating(*(float(one) for one in raw))

    def alike(self, one: Sound, other: Sound) -> float:
        """Cosine of two voices, from -1 to 1."""
        with torch.no_grad():
            return float(self._encoder(one) @ self._encoder(other))

    @cached_property
    def _whisper(self) -> Any:
        try:
            from faster_whisper import WhisperModel
        except ImportError:
            raise JudgeError("the recogniser runs in faster-whisper: pip install 'outrider[judges]'") from None
        folder, sides = str(fetch("whisper-base")), {"cpu_threads": self.threads, "num_workers": self.listeners}
        return WhisperModel(folder, device="cpu", compute_type="int8", **sides)

    @cached_property
    def _mos(self) -> Any:
        try:
            import onnxruntime
        except ImportError:
            raise JudgeError("DNSMOS runs in onnxruntime: pip install 'outrider[judges]'") from None
        wanted = onnxruntime.SessionOptions()
        wanted.intra_op_num_threads, wanted.log_severity_level = self.threads, 3
        file = str(fetch("dnsmos") / "sig_bak_ovr.onnx")
        return onnxruntime.InferenceSession(file, wanted, providers=["CPUExecutionProvider"])

    @cached_property
    def _encoder(self) -> SpeakerEncoder:
        return SpeakerEncoder.of(Checkpoint(unpickled("resemblyzer")))


class SpeakerEncoder(nn.Module):
    """Three recurrent layers over mel frames: a unit vector for a voice (generalised end-to-end loss, arXiv
    1710.10467, in Resemblyzer's sizes)."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    @classmethod
    def of(cls, tensors: Checkpoint) -> SpeakerEncoder:
        made = cls()
        own = made.state_dict()
        named = {name.removeprefix("model_state."): name for name in tensors}
        made.load_state_dict({name: tensors[named[name]] for name in own})
        return made.eval().requires_grad_(False)

    def forward(self, sound: Sound) -> Tensor:
        from torchaudio.transforms import MelSpectrogram

        heard = torch.from_numpy(sound.at(_RATE).samples)
        loudness = heard.square().mean().sqrt().clamp(min=1e-6)
        heard = heard * (10 ** (-30 / 20) / loudness).clamp(min=1)  # what is quiet is raised to -30 dB
        seen = MelSpectrogram(
            _RATE, 400, hop_length=160, n_mels=40, norm="slaney", mel_scale="slaney", pad_mode="constant"
        )
        frames = seen(heard).T  # [T, 40]
        parts = [frames[start : start + 160] for start in range(0, max(len(frames) - 159, 1), 80)]
        states = [self.lstm(part[None])[1][0][-1, 0] for part in parts]
        each = nn.functional.normalize(self.linear(torch.stack(states)).relu(), dim=-1)
        return nn.functional.normalize(each.mean(0), dim=-1)


def plain_words(text: str) -> list[str]:
    """A text as recognisers are judged by: Whisper's own normaliser, so that "nineteen sixty" and "1960" are the same,
    and digits belong together however they are parted."""
    return _normaliser()(re.sub(r"(?<=\d)[:-](?=\d)", "", text.replace("’", "'"))).split()


@cache
def _normaliser() -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    made: Callable[[str], str] = EnglishTextNormalizer({})  # no table of British spellings: both texts are American
    return made


def compared(heard: str, meant: str) -> Errors:
    """Words and letters to be changed."""
    said, wanted = plain_words(heard), plain_words(meant)
    letters, off = " ".join(wanted), distance(" ".join(said), " ".join(wanted))
    return Errors(heard, len(wanted), distance(said, wanted), len(letters), off)


def distance(one: Sequence[str], other: Sequence[str]) -> int:
    """The least number of changes, insertions and deletions that make one the other."""
    row = list(range(len(other) + 1))
    for place, sign in enumerate(one, 1):
        before, row[0] = row[0], place
        for column, wanted in enumerate(other, 1):
            before, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, before + (sign != wanted))
    return row[-1]
