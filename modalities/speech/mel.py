"""Log-mel frames as HiFi-GAN's published checkpoints want them: 22.05 kHz, 80 Slaney bins up to 8 kHz, a frame every
256 samples. Pure torch; knows nothing of what the frames are for."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption

RATE, WINDOW, HOP, BINS, TOP = 22_050, 1024, 256, 80, 8000.0
_LEAST = 1e-5  # of a bin
SILENCE = math.log(_LEAST)
_LINEAR, _STEP = 1000.0, math.log(6.4) / 27  # Slaney's scale: 200/3 Hz a mel up to 1 kHz, then logarithmic


def mel_frames(sound: Tensor) -> Tensor:
    """Samples [..., N] in -1..1 -> [..., 80, N // 256]."""
    if sound.shape[-1] < WINDOW:
        raise InvalidOption(f"{sound.shape[-1]} samples are fewer than one window of {WINDOW}")
    flat = sound.reshape(-1, 1, sound.shape[-1])
    edge = (WINDOW - HOP) // 2
    flat = torch.nn.functional.pad(flat, (edge, edge), mode="reflect")[:, 0]
    window = torch.hann_window(WINDOW, device=sound.device, dtype=sound.dtype)
    spectrum = torch.stft(flat, WINDOW, HOP, window=window, center=False, return_complex=True)
    size = (spectrum.real**2 + spectrum.imag**2 + 1e-9).sqrt()
    mel = (_bank().to(size) @ size).clamp(min=_LEAST).log()
    return mel.reshape(*sound.shape[:-1], BINS, -1)


@cache
def _bank() -> Tensor:
    """[80, 513] triangles of equal area."""
    highest = _LINEAR * 3 / 200 + math.log(TOP / _LINEAR) / _STEP
    mels = torch.linspace(0, highest, BINS + 2, dtype=torch.float64)
    knee = _LINEAR * 3 / 200
    edges = torch.where(mels < knee, mels * 200 / 3, _LINEAR * torch.exp((mels - knee) * _STEP))
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    hertz = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    rising, falling = (hertz - lower) / (centre - lower), (upper - hertz) / (upper - centre)
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (upper - lower)
