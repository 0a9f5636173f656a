"""Sound as samples, and the synthesis of sound from codes in chunks.

Chunks end at fixed numbers of tokens, whenever the tokens arrive, so the same tokens always give the same samples.
Independent of the model that generates them.
"""

from __future__ import annotations

import base64
import io
import time
import wave
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.assets.files import replacing
from outrider.core.errors import InvalidOption
from outrider.speech.codec import FRAMES, Codec
from outrider.speech.mel import BINS, HOP, RATE, mel_frames
from outrider.speech.vocoder import VocoderStream

# Tokens of the chunks; the last number repeats. With the frames around it that it depends on, none needs padding in the
# vocoder.
_CHUNKS = (16, 48, 112, 240)
_RATES = 1_000, 1_000_000  # samples per second of sounds that are read
_FINEST = 2_000  # ratios of rates with a larger denominator are rounded, since the filter's memory grows with it


@dataclass(frozen=True, eq=False)
class Sound:
    """Mono sound."""

    samples: np.ndarray  # [N] float32 in -1..1
    sample_rate: int = RATE

    @property
    def seconds(self) -> float:
        return len(self.samples) / self.sample_rate

    def save(self, path: str | Path) -> None:
        """Write a 16-bit WAV file."""
        path = Path(path)
        if path.suffix.lower() != ".wav":
            raise InvalidOption(f"the file is {path.name}; sound is saved as WAV, so its name must end in .wav")
        with replacing(path) as temporary:
            temporary.write_bytes(self.wav())

    def wav(self) -> bytes:
        """The bytes of a 16-bit WAV file."""
        buffer = io.BytesIO()
        with wave.open(buffer, "wb") as file:
            file.setparams((1, 2, self.sample_rate, 0, "NONE", ""))
            file.writeframes((self.samples.clip(-1, 1) * 32767).round().astype("<i2").tobytes())
        return buffer.getvalue()

    @classmethod
    def load(cls, path: str | Path | IO[bytes]) -> Sound:
        """Read a 16-bit WAV file; channels are averaged."""
        source = str(path) if isinstance(path, str | Path) else path
        path = path if isinstance(path, str | Path) else "the sound"
        try:
            with wave.open(source, "rb") as file:
                if file.getsampwidth() != 2:
                    raise InvalidOption(f"{path} has {8 * file.getsampwidth()} bits per sample; it must have 16")
                if not _RATES[0] <= (rate := file.getframerate()) <= _RATES[1]:
                    raise InvalidOption(
                        f"{path} has {rate:,} samples per second; it must have {_RATES[0]:,} to {_RATES[1]:,}"
                    )
                samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").reshape(-1, file.getnchannels())
                return cls((samples.mean(1) / 32768).astype(np.float32), file.getframerate())
        except (wave.Error, EOFError, ValueError, RuntimeError) as error:
            raise InvalidOption(f"{path} is not an uncompressed WAV file: {str(error) or 'it is cut short'}") from None

    def resample(self, sample_rate: int) -> Sound:
        """The sound at another sample rate."""
        if sample_rate == self.sample_rate:
            return self
        if not len(self.samples):
            return Sound(self.samples, sample_rate)
        from torchaudio.functional import resample

        ratio = Fraction(sample_rate, self.sample_rate).limit_denominator(_FINEST)  # exact for all usual rates
        changed = resample(torch.from_numpy(self.samples), ratio.denominator, ratio.numerator)
        return Sound(changed.numpy(), sample_rate)

    def mel(self) -> Tensor:
        """Log-mel frames [80, T] of a whole number of tokens, for a codec. The sound must be at RATE."""
        if self.sample_rate != RATE:
            raise InvalidOption(
                f"the sound has {self.sample_rate:,} samples per second and must have {RATE:,}; use .resample({RATE})"
            )
        step = HOP * FRAMES
        if len(self.samples) < 4 * step:
            raise InvalidOption(f"the sound has {len(self.samples)} samples; give {4 * step} or more")
        return mel_frames(torch.from_numpy(self.samples[: len(self.samples) // step * step].copy()))

    def _repr_html_(self) -> str:
        """A player, shown by notebooks."""
        return f'<audio controls src="data:audio/wav;base64,{base64.b64encode(self.wav()).decode()}"></audio>'


class SoundStream:
    """Synthesises the codes of one utterance in chunks, as they are committed."""

    def __init__(self, codec: Codec, vocoder: nn.Module) -> None:
        self.codec = codec
        self.stream = VocoderStream(vocoder)
        self.seconds = {"codec": 0.0, "vocoder": 0.0}
        self._codes: list[int] = []
        self._decoded = 0  # tokens already passed to the vocoder
        self._chunk, self._next = 0, _CHUNKS[0]

    def push(self, codes: list[int]) -> list[np.ndarray]:
        """Add committed codes; return the chunks of sound that later codes cannot change."""
        self._codes += codes
        chunks = []
        while len(self._codes) >= self._next + self.codec.context:
            chunks.append(self._decode(self._next, self.stream.push))
            self._chunk = min(self._chunk + 1, len(_CHUNKS) - 1)
            self._next += _CHUNKS[self._chunk]
        return [chunk for chunk in chunks if len(chunk)]

    def finish(self) -> np.ndarray:
        """The sound not yet returned."""
        return self._decode(len(self._codes), self.stream.finish)

    @torch.no_grad()
    def _decode(self, end: int, vocode: Callable[[Tensor], Tensor]) -> np.ndarray:
        """Sound from the tokens up to `end`, decoded with as many tokens around them as the codec's context."""
        start, context = time.perf_counter(), self.codec.context
        device = self.codec.mean.device
        first, last = max(self._decoded - context, 0), min(end + context, len(self._codes))
        mel = torch.zeros(BINS, 0, device=device)
        if end > self._decoded:
            mel = self.codec.decode(torch.tensor([self._codes[first:last]], device=device))[0]
            mel = mel[:, FRAMES * (self._decoded - first) : FRAMES * (end - first)]
        self._decoded = end
        middle = time.perf_counter()
        sound = vocode(mel).float().cpu().numpy()
        self.seconds["codec"] += middle - start
        self.seconds["vocoder"] += time.perf_counter() - middle
        return np.asarray(sound)


def synthesise(codes: list[int], codec: Codec, vocoder: nn.Module) -> np.ndarray:
    """The sound of an utterance's codes, equal to that of SoundStream."""
    stream = SoundStream(codec, vocoder)
    return np.concatenate([*stream.push(codes), stream.finish()])
