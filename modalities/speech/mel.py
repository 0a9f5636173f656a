"""Log-mel frames in the format of HiFi-GAN's published checkpoints: 22.05 kHz, 80 Slaney bins up to 8 kHz, one frame
per 256 samples. Independent of codecs and vocoders."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption

RATE, WINDOW, HOP, BINS, TOP = 22_050, 1024, 256, 80, 8000.0
_FLOOR = 1e-5  # the smallest value of a bin
SILENCE = math.log(_FLOOR)
_LINEAR, _STEP = 1000.0, math.log(6.4) / 27  # Slaney's scale: 200/3 Hz per mel up to 1 kHz, then logarithmic


def mel_frames(sound: Tensor) -> Tensor:
    """Samples [..., N] in -1..1 -> [..., 80, N // 256]."""
    if sound.shape[-1] < WINDOW:
        raise InvalidOption(f"the sound has {sound.shape[-1]} samples; give at least one window of {WINDOW}")
    flat = sound.reshape(-1, 1, sound.shape[-1])
    edge = (WINDOW - HOP) // 2
    flat = torch.nn.functional.pad(flat, (edge, edge), mode="reflect")[:, 0]
    window = torch.hann_window(WINDOW, device=sound.device, dtype=sound.dtype)
    spectrum = torch.stft(flat, WINDOW, HOP, window=window, center=False, return_complex=True)
    magnitude = (spectrum.real**2 + spectrum.imag**2 + 1e-9).sqrt()
    mel = (_filter_bank().to(magnitude) @ magnitude).clamp(min=_FLOOR).log()
    return mel.reshape(*sound.shape[:-1], BINS, -1)


@cache
def _filter_bank() -> Tensor:
    """Triangular filters [80, 513] of equal area."""
    highest = _LINEAR * 3 / 200 + math.log(TOP / _LINEAR) / _STEP
    mels = torch.linspace(0, highest, BINS + 2, dtype=torch.float64)
    knee = _LINEAR * 3 / 200
    edges = torch.where(mels < knee, mels * 200 / 3, _LINEAR * torch.exp((mels - knee) * _STEP))
    lower, centre, upper = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    hertz = torch.linspace(0, RATE / 2, WINDOW // 2 + 1, dtype=torch.float64)
    rising, falling = (hertz - lower) / (centre - lower), (upper - hertz) / (upper - centre)
    return torch.minimum(rising, falling).clamp(min=0) * 2 / (upper - lower)
