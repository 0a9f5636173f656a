"""Speech metrics: word and letter errors of a recogniser's transcript (Whisper base), predicted opinion scores (DNSMOS
P.835), and speaker similarity (Resemblyzer).

The models are fetched through outrider.core.assets.store; the extra `judges` has the packages that run them.
Independent of tokens and decoding.
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

from outrider.core.assets.store import Checkpoint, convert_pickle, fetch
from outrider.core.errors import OutriderError, install_command
from outrider.speech.audio import Sound

_RATE = 16_000  # the sample rate of all models
_DNSMOS_WINDOW = 144_160  # samples: 9.01 seconds
_CURVES = (  # polynomials from DNSMOS's outputs to mean opinion scores: signal, background, overall
    (-0.08397278, 1.22083953, 0.0052439),
    (-0.13166888, 1.60915514, -0.39604546),
    (-0.06766283, 1.11546468, 0.04602535),
)


class MetricError(OutriderError):
    """A metric cannot be computed: a package is missing, or the sound is empty."""


@dataclass(frozen=True)
class Rating:
    """Predicted mean opinion scores, from 1 to 5."""

    signal: float
    background: float
    overall: float


@dataclass(frozen=True)
class Errors:
    """A transcript, and its edit distance from the reference text in words and in letters."""

    transcript: str
    words: int  # in the reference
    word_errors: int  # substitutions, deletions and insertions
    letters: int
    letter_errors: int


class SpeechMetrics:
    """All metrics; each model is loaded on first use. `workers` is the number of threads that transcribe in
    parallel."""

    def __init__(self, threads: int = 1, workers: int = 1) -> None:
        self.threads, self.workers = threads, workers

    def load(self) -> None:
        """Load all models, before several threads use them."""
        _ = self._whisper, self._mos, self._encoder

    def errors(self, sound: Sound, text: str) -> Errors:
        """The errors of Whisper's transcript against `text`, which Whisper does not see."""
        parts, _ = self._whisper.transcribe(
            sound.resample(_RATE).samples, language="en", beam_size=5, condition_on_previous_text=False
        )
        return compare(" ".join(part.text.strip() for part in parts), text)

    def rating(self, sound: Sound) -> Rating:
        """DNSMOS, averaged over windows one second apart. A shorter sound is repeated, as in the authors' code."""
        if not len(sound.samples):
            raise MetricError("the sound has no samples to rate")
        samples = sound.resample(_RATE).samples
        while len(samples) < _DNSMOS_WINDOW:
            samples = np.concatenate([samples, samples])
        scores = []
        for start in range(0, len(samples) - _DNSMOS_WINDOW + 1, _RATE):
            window = samples[None, start : start + _DNSMOS_WINDOW].astype(np.float32)
            outputs = self._mos.run(None, {self._mos.get_inputs()[0].name: window})[0][0]
            scores.append([np.polyval(curve, output) for curve, output in zip(_CURVES, outputs, strict=True)])
        return Rating(*(float(score) for score in np.mean(scores, 0)))

    def similarity(self, first: Sound, second: Sound) -> float:
        """The cosine similarity of two speakers, from -1 to 1."""
        with torch.no_grad():
            return float(self._encoder(first) @ self._encoder(second))

    @cached_property
    def _whisper(self) -> Any:
        try:
            from faster_whisper import WhisperModel
        except ImportError:
            raise MetricError(f"the recogniser needs faster-whisper: {install_command('judges')}") from None
        folder, parallel = str(fetch("whisper-base")), {"cpu_threads": self.threads, "num_workers": self.workers}
        return WhisperModel(folder, device="cpu", compute_type="int8", **parallel)

    @cached_property
    def _mos(self) -> Any:
        try:
            import onnxruntime
        except ImportError:
            raise MetricError(f"DNSMOS needs onnxruntime: {install_command('judges')}") from None
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = self.threads, 3
        file = str(fetch("dnsmos") / "sig_bak_ovr.onnx")
        return onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])

    @cached_property
    def _encoder(self) -> SpeakerEncoder:
        return SpeakerEncoder.from_tensors(Checkpoint(convert_pickle("resemblyzer")))


class SpeakerEncoder(nn.Module):
    """A sound -> the unit vector of its speaker: three LSTM layers over mel frames, trained with the generalised
    end-to-end loss (arXiv 1710.10467), in Resemblyzer's sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(40, 256, 3, batch_first=True)
        self.linear = nn.Linear(256, 256)

    @classmethod
    def from_tensors(cls, tensors: Checkpoint) -> SpeakerEncoder:
        encoder = cls()
        published = {name.removeprefix("model_state."): name for name in tensors}
        encoder.load_state_dict({name: tensors[published[name]] for name in encoder.state_dict()})
        return encoder.eval().requires_grad_(False)

    def forward(self, sound: Sound) -> Tensor:
        from torchaudio.transforms import MelSpectrogram

        samples = torch.from_numpy(sound.resample(_RATE).samples)
        loudness = samples.square().mean().sqrt().clamp(min=1e-6)
        samples = samples * (10 ** (-30 / 20) / loudness).clamp(min=1)  # raise quiet sounds to -30 dB
        mel = MelSpectrogram(
            _RATE, 400, hop_length=160, n_mels=40, norm="slaney", mel_scale="slaney", pad_mode="constant"
        )
        frames = mel(samples).T  # [T, 40]
        parts = [frames[start : start + 160] for start in range(0, max(len(frames) - 159, 1), 80)]
        states = [self.lstm(part[None])[1][0][-1, 0] for part in parts]
        vectors = nn.functional.normalize(self.linear(torch.stack(states)).relu(), dim=-1)
        return nn.functional.normalize(vectors.mean(0), dim=-1)


def normalised_words(text: str) -> list[str]:
    """The words of a text after Whisper's normaliser, which makes "nineteen sixty" and "1960" equal. Colons and hyphens
    between digits are removed first."""
    return _normaliser()(re.sub(r"(?<=\d)[:-](?=\d)", "", text.replace("’", "'"))).split()


@cache
def _normaliser() -> Callable[[str], str]:
    from transformers.models.whisper.english_normalizer import EnglishTextNormalizer

    normaliser: Callable[[str], str] = EnglishTextNormalizer({})  # no British spellings: both texts are American
    return normaliser


def compare(transcript: str, reference: str) -> Errors:
    """The errors of a transcript in normalised words and letters."""
    words, wanted = normalised_words(transcript), normalised_words(reference)
    letters, wanted_letters = " ".join(words), " ".join(wanted)
    return Errors(
        transcript,
        len(wanted),
        edit_distance(words, wanted),
        len(wanted_letters),
        edit_distance(letters, wanted_letters),
    )


def edit_distance(first: Sequence[str], second: Sequence[str]) -> int:
    """The Levenshtein distance."""
    row = list(range(len(second) + 1))
    for index, item in enumerate(first, 1):
        diagonal, row[0] = row[0], index
        for column, other in enumerate(second, 1):
            diagonal, row[column] = row[column], min(row[column] + 1, row[column - 1] + 1, diagonal + (item != other))
    return row[-1]
