"""Sound as samples, and how tokens become it, a piece at a time.

Pieces are cut by how many tokens there are, not by when they came: the same tokens give the same samples, whoever
drafted them and whether they are heard as they come or all at once. Knows tokens, nothing of who says them.
"""

from __future__ import annotations

import base64
import io
import time
import wave
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InvalidOption
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.mel import HOP, RATE, mel_frames
from outrider.speech.vocoder import Vocoder, VocoderStream

_FIRST, _PIECE = 16, 48  # tokens of the first piece, and of those behind it


@dataclass(frozen=True, eq=False)
class Sound:
    """Mono sound."""

    samples: np.ndarray  # [N] float32 in -1..1
    rate: int = RATE

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.rate

    def save(self, path: str | Path) -> None:
        """As a WAV file of 16 bits."""
        place = Path(path)
        if place.suffix.lower() != ".wav":
            raise InvalidOption(f"{place.name} doesn't end in .wav, which is the form sound is saved in")
        place.write_bytes(self.wav())

    def wav(self) -> bytes:
        """The same as `save` writes."""
        held = io.BytesIO()
        with wave.open(held, "wb") as file:
            file.setparams((1, 2, self.rate, 0, "NONE", ""))
            file.writeframes((self.samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
        return held.getvalue()

    @classmethod
    def load(cls, path: str | Path) -> Sound:
        """A WAV file of 16 bits; several channels become one."""
        try:
            with wave.open(str(path), "rb") as file:
                if file.getsampwidth() != 2:
                    raise InvalidOption(f"{path} has {8 * file.getsampwidth()} bits a sample; 16 are read")
                held = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
                return cls((held.mean(1) / 32768).astype(np.float32), file.getframerate())
        except (wave.Error, EOFError) as error:
            raise InvalidOption(f"{path} is no WAV file of plain samples: {error}") from None

    def at(self, rate: int) -> Sound:
        """The same at another rate."""
        if rate == self.rate:
            return self
        from torchaudio.functional import resample

        return Sound(resample(torch.from_numpy(self.samples), self.rate, rate).numpy(), rate)

    def frames(self) -> Tensor:
        """Log-mel frames [80, T], for a codec: a whole number of tokens. Wants our rate."""
        if self.rate != RATE:
            raise InvalidOption(
                f"the sound has {self.rate:,} samples a second and {RATE:,} are wanted; take .at({RATE})"
            )
        step = HOP * FRAMES
        if len(self.samples) < 4 * step:
            raise InvalidOption(f"{len(self.samples)} samples are too few; give {4 * step} or more")
        return mel_frames(torch.from_numpy(self.samples[: len(self.samples) // step * step].copy()))

    def _repr_html_(self) -> str:
        """In a notebook, something to press play on."""
        return f'<audio controls src="data:audio/wav;base64,{base64.b64encode(self.wav()).decode()}"></audio>'


class Sounding:
    """One utterance's tokens on their way to sound. `push` takes tokens that are there to stay."""

    def __init__(self, codec: Codec, vocoder: Vocoder) -> None:
        self.codec = codec
        self.stream = VocoderStream(vocoder)
        self.seconds = {"codec": 0.0, "vocoder": 0.0}
        self._codes: list[int] = []
        self._given = 0  # tokens whose frames are out
        self._next = _FIRST

    def push(self, codes: list[int]) -> list[np.ndarray]:
        """The pieces of sound that are settled by now."""
        self._codes += codes
        found = []
        while len(self._codes) >= self._next + self.codec.context:
            found.append(self._until(self._next))
            self._next += _PIECE
        return [piece for piece in found if len(piece)]

    def finish(self) -> np.ndarray:
        """The rest."""
        sound = self._until(len(self._codes))
        start = time.perf_counter()
        rest = self.stream.finish().float().cpu().numpy()
        self.seconds["vocoder"] += time.perf_counter() - start
        return np.concatenate([sound, rest])

    @torch.no_grad()
    def _until(self, end: int) -> np.ndarray:
        """Sound from the tokens up to there that are not out yet; the codec hears as far around as it can."""
        start, around = time.perf_counter(), self.codec.context
        device = self.codec.mean.device
        first, last = max(self._given - around, 0), min(end + around, len(self._codes))
        if end <= self._given:
            return np.zeros(0, np.float32)
        mel = self.codec.decode(torch.tensor([self._codes[first:last]], device=device))[0]
        mel = mel[:, FRAMES * (self._given - first) : FRAMES * (end - first)]
        self._given = end
        middle = time.perf_counter()
        sound = self.stream.push(mel).float().cpu().numpy()
        self.seconds["codec"] += middle - start
        self.seconds["vocoder"] += time.perf_counter() - middle
        return np.asarray(sound)


def spoken(codes: list[int], codec: Codec, vocoder: Vocoder) -> np.ndarray:
    """All of an utterance's tokens as sound, cut in the same pieces."""
    way = Sounding(codec, vocoder)
    return np.concatenate([*way.push(codes), way.finish()])
