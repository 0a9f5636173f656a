"""The teacher of the voice: Kokoro (82 million parameters), a synthesiser that also gives each phoneme's duration.

Its acoustic model runs in onnxruntime (the extra `teacher`), with the durations, an inner tensor of the graph, as a
further output. Its vocoder is outrider.speech.training.kokoro_vocoder. Independent of codes; used only to make training
speech.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.core.assets.store import fetch
from outrider.core.errors import OutriderError, install_command, unknown
from outrider.speech.mel import HOP, RATE
from outrider.speech.phonemes import EDGE, SYMBOLS
from outrider.speech.training.kokoro_vocoder import FRAMES, SOURCE, KokoroVocoder

VOICE = "af_heart"
_KOKORO_IDS = dict(  # our phoneme symbols -> ids of Kokoro's vocabulary
    zip(
        SYMBOLS,
        (
            *(16, 4, 3, 5, 6, 1, 2, 9, 10, 11, 12, 13, 14, 15, 44, 46, 48, 50, 52, 53, 54, 55, 56, 58, 61, 62, 64, 65),
            *(68, 92, 112, 123, 131, 147, 81, 119, 82, 133, 83, 51, 63, 69, 76, 86, 87, 102, 135, 138, 72, 70, 125, 42),
            *(177, 148, 36, 24, 25, 39, 41, 31, 33, 43, 57, 47, 71, 158, 156, 157),
        ),
        strict=True,
    )
)
_KOKORO_RATE, _UNIT = 24_000, 600  # samples per second; samples per unit of duration
_DURATIONS = "/encoder/Clip_output_0"  # the name of the durations' tensor
_MAX_PHONEMES = 500
# Trimming: silence is 45 dB below the loudest of windows of 240 samples, and 0.05 seconds of it are left at both ends.
_FLOOR, _MARGIN, _WINDOW = 10 ** (-45 / 20), 0.05, 240


class TeacherError(OutriderError):
    """The teacher is not installed, or the text is too long for it."""


@dataclass(frozen=True)
class Reading:
    """A synthesised utterance and its alignment."""

    sound: np.ndarray  # [N] float32, 22,050 samples per second, trimmed of silence
    lengths: np.ndarray  # [P] mel frames of 256 samples per phoneme, edge symbols included


class Kokoro:
    """Kokoro with one of its English voices."""

    def __init__(self, voice: str = VOICE, *, threads: int = 1) -> None:
        try:
            import onnx
            import onnxruntime
            from onnx.utils import Extractor
        except ImportError:
            raise TeacherError(f"the teacher needs onnx and onnxruntime: {install_command('teacher')}") from None
        folder = fetch("kokoro")
        whole = onnx.load(str(folder / "kokoro.int8.onnx"))
        inputs = [tensor.name for tensor in whole.graph.input]
        graph = Extractor(whole).extract_model(inputs, [FRAMES, SOURCE, _DURATIONS])
        self._vocoder = KokoroVocoder(whole.graph)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = threads
        options.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(
            graph.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self._style = self._styles(voice)

    def _styles(self, voice: str) -> np.ndarray:
        """The voice's style vectors [510, 1, 256], one for each number of phonemes."""
        with tarfile.open(fetch("kokoro") / "voices.tgz") as archive:
            members = [member for member in archive if ".bin" in member.name]
            voices = {member.name.rsplit("/", 1)[-1].removesuffix(".bin"): member for member in members}
            if voice not in voices:
                raise unknown("voice", voice, voices)
            file = archive.extractfile(voices[voice])
            assert file is not None
            return np.frombuffer(file.read(), np.float32).reshape(-1, 1, 256)

    def read(self, phonemes: str, speed: float = 1.0) -> Reading:
        """Synthesise phonemes."""
        if not 0 < len(phonemes) <= _MAX_PHONEMES:
            raise TeacherError(f"there are {len(phonemes)} phonemes; give 1 to {_MAX_PHONEMES}")
        tokens = np.array([[EDGE, *(_KOKORO_IDS[symbol] for symbol in phonemes), EDGE]], np.int64)
        style = self._style[len(phonemes)]
        inputs = {"tokens": tokens, "style": style, "speed": np.array([speed], np.float32)}
        frames, source, durations = self._session.run([FRAMES, SOURCE, _DURATIONS], inputs)
        sound = self._vocoder(frames, source, style[:, : style.shape[1] // 2])
        return trim(sound, np.asarray(durations).reshape(-1))


def trim(sound: np.ndarray, durations: np.ndarray) -> Reading:
    """A sound at 24 kHz with the phonemes' durations in units -> the reading at our rate without outer silence."""
    from torchaudio.functional import resample

    windows = sound[: len(sound) // _WINDOW * _WINDOW].reshape(-1, _WINDOW)
    loudness = np.sqrt((windows**2).mean(1))
    audible = np.flatnonzero(loudness > loudness.max() * _FLOOR)
    margin = int(_MARGIN * _KOKORO_RATE)
    start = max(int(audible[0]) * _WINDOW - margin, 0)
    stop = min((int(audible[-1]) + 1) * _WINDOW + margin, len(sound))
    ends = np.clip(np.round(durations).astype(np.int64).cumsum() * _UNIT - start, 0, stop - start)
    ends[-1] = stop - start
    samples = resample(torch.from_numpy(sound[start:stop].copy()), _KOKORO_RATE, RATE).numpy()
    frames = np.round(ends * (RATE / _KOKORO_RATE) / HOP).astype(np.int64)
    return Reading(samples, np.diff(frames, prepend=0))
