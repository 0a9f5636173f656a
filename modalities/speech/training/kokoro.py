"""The teacher: Kokoro (82 million parameters), which reads phonemes aloud and says how long each one took.

What to say, and how, runs in onnxruntime (the extra `teacher`); where a phoneme ends is a tensor inside that graph,
which is made an output. Making it heard is done by outrider.speech.training.kokoro_vocoder. Knows sounds and
phonemes, nothing of tokens; our own voice does not need it once its training speech is there.
"""

from __future__ import annotations

import tarfile
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.core.assets.store import fetch
from outrider.core.errors import OutriderError, unknown
from outrider.speech.mel import HOP, RATE
from outrider.speech.phonemes import EDGE, SYMBOLS
from outrider.speech.training.kokoro_vocoder import FRAMES, SOURCE, KokoroVocoder

VOICE = "af_heart"
_ITS_IDS = dict(  # of our symbols, in its vocabulary
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
_ITS_RATE, _UNIT = 24_000, 600  # samples a second; samples of one unit of its durations
_LENGTHS = "/encoder/Clip_output_0"  # the tensor of durations
_MOST = 500  # phonemes in one go
_FLOOR, _MARGIN, _GRAIN = 10 ** (-45 / 20), 0.05, 240  # of the loudest; seconds left around; samples looked at together


class TeacherError(OutriderError):
    """The teacher can't be had."""


@dataclass(frozen=True)
class Reading:
    """An utterance read aloud."""

    sound: np.ndarray  # [N] float32 at 22,050 a second, silence at both ends cut off
    lengths: np.ndarray  # [P] frames of 256 samples that each phoneme takes, the edges included


class Teacher:
    """Kokoro with one of its English voices."""

    def __init__(self, voice: str = VOICE, *, threads: int = 1) -> None:
        try:
            import onnx
            import onnxruntime
            from onnx.utils import Extractor
        except ImportError:
            raise TeacherError("the teacher runs in onnxruntime: pip install 'outrider[teacher]'") from None
        folder = fetch("kokoro")
        whole = onnx.load(str(folder / "kokoro.int8.onnx"))
        graph = Extractor(whole).extract_model([one.name for one in whole.graph.input], [FRAMES, SOURCE, _LENGTHS])
        self._loud = KokoroVocoder(whole.graph)
        wanted = onnxruntime.SessionOptions()
        wanted.intra_op_num_threads = wanted.inter_op_num_threads = threads
        wanted.log_severity_level = 3
        self._session: Any = onnxruntime.InferenceSession(
            graph.SerializeToString(), wanted, providers=["CPUExecutionProvider"]
        )
        self._style = self._styles(voice)

    def _styles(self, voice: str) -> np.ndarray:
        """[510, 1, 256] how a voice sounds, by the number of phonemes."""
        with tarfile.open(fetch("kokoro") / "voices.tgz") as archive:
            names = {one.name.rsplit("/", 1)[-1].removesuffix(".bin"): one for one in archive if ".bin" in one.name}
            if voice not in names:
                raise unknown("voice", voice, names)
            file = archive.extractfile(names[voice])
            assert file is not None
            return np.frombuffer(file.read(), np.float32).reshape(-1, 1, 256)

    def read(self, said: str, speed: float = 1.0) -> Reading:
        """Read phonemes aloud."""
        if not 0 < len(said) <= _MOST:
            raise TeacherError(f"there are {len(said)} phonemes; 1 to {_MOST} are read in one go")
        tokens = np.array([[EDGE, *(_ITS_IDS[sign] for sign in said), EDGE]], np.int64)
        style = self._style[len(said)]
        given = {"tokens": tokens, "style": style, "speed": np.array([speed], np.float32)}
        frames, source, lengths = self._session.run([FRAMES, SOURCE, _LENGTHS], given)
        sound = self._loud(frames, source, style[:, : style.shape[1] // 2])
        return trimmed(sound, np.asarray(lengths).reshape(-1))


def trimmed(sound: np.ndarray, units: np.ndarray) -> Reading:
    """What was said at 24 kHz, and how many units each phoneme took, without the silence around it, at our rate."""
    from torchaudio.functional import resample

    grains = sound[: len(sound) // _GRAIN * _GRAIN].reshape(-1, _GRAIN)
    loud = np.sqrt((grains**2).mean(1))
    heard = np.flatnonzero(loud > loud.max() * _FLOOR)
    margin = int(_MARGIN * _ITS_RATE)
    start = max(int(heard[0]) * _GRAIN - margin, 0)
    stop = min((int(heard[-1]) + 1) * _GRAIN + margin, len(sound))
    ends = np.clip(np.round(units).astype(np.int64).cumsum() * _UNIT - start, 0, stop - start)
    ends[-1] = stop - start
    ours = resample(torch.from_numpy(sound[start:stop].copy()), _ITS_RATE, RATE).numpy()
    frames = np.round(ends * (RATE / _ITS_RATE) / HOP).astype(np.int64)
    return Reading(ours, np.diff(frames, prepend=0))
