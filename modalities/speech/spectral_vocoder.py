"""A vocoder in the frequency domain, after Vocos (arXiv 2306.00814): it computes the short-time spectrum of the sound
from mel frames, and an inverse transform gives the samples. It has one position a frame where HiFi-GAN has up to one a
sample, and takes a hundredth of its products. Independent of tokens and of weight files."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import DraftHead
from outrider.speech.mel import BINS, HOP, SILENCE, WINDOW

_KERNEL = 5
_GAIN = 1.5  # the sum of the squares of overlapping windows
_LOUDEST = 6.0  # log magnitude
_LAYERS = 6  # at most: they depend on the frames that a stream waits for


class _Block(nn.Module):
    """Mixes neighbouring frames of each channel, then the channels of each frame (ConvNeXt)."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mix = nn.Conv1d(width, width, _KERNEL, padding=_KERNEL // 2, groups=width)
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.gain = nn.Parameter(torch.full((width,), 0.2))

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.norm(self.mix(x.transpose(1, 2)).transpose(1, 2))
        change: Tensor = self.gain * self.down(F.gelu(self.up(mixed)))
        return x + change


class SpectralVocoder(DraftHead):
    """Log-mel frames [B, 80, T] -> samples [B, 256 T], each from the frames up to CONTEXT away (see VocoderStream). A
    DraftHead for its weight files only: `target` is unused."""

    mean: Tensor
    scale: Tensor
    window: Tensor

    def __init__(self, target: Any = None, *, width: int = 256, hidden: int = 768, layers: int = 6) -> None:
        super().__init__()
        if not 1 <= layers <= _LAYERS:
            raise InvalidOption(f"layers is {layers}; it must be 1 to {_LAYERS}")
        self.config = {"width": width, "hidden": hidden, "layers": layers}
        self.register_buffer("mean", torch.full((BINS, 1), -5.0))  # of log-mel frames; set from the training data
        self.register_buffer("scale", torch.full((BINS, 1), 2.0))
        self.register_buffer("window", torch.hann_window(WINDOW), persistent=False)
        self._reach = _KERNEL // 2 * (1 + layers) + WINDOW // HOP // 2  # frames on either side that a sample depends on
        self.read = nn.Conv1d(BINS, width, _KERNEL, padding=_KERNEL // 2)
        self.first_norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(_Block(width, hidden) for _ in range(layers))
        self.spectrum = nn.Linear(width, WINDOW + 2)  # log magnitudes, then phases
        nn.init.normal_(self.spectrum.weight, std=0.01)

    def forward(self, mel: Tensor) -> Tensor:  # type: ignore[override]  # heads have a loss there
        mel = F.pad(mel, (self._reach, 0), value=SILENCE)  # before an utterance, as in training
        x = self.first_norm(self.read((mel - self.mean) / self.scale).transpose(1, 2))
        for block in self.blocks:
            x = block(x)
        found = self.spectrum(self.last_norm(x)).to(mel.dtype)  # training may compute products in 16 bits
        magnitude, phase = found.transpose(1, 2).chunk(2, 1)
        spectrum = torch.polar(magnitude.clamp(max=_LOUDEST).exp(), phase)
        sound = _overlapped(torch.fft.irfft(spectrum, n=WINDOW, dim=1) * self.window[:, None])
        return sound[:, self._reach * HOP :]


def _overlapped(frames: Tensor) -> Tensor:
    """The sum [B, 256 T] of windowed frames [B, 1024, T], each centred on its 256 samples."""
    rows, _, count = frames.shape
    overlap = WINDOW // HOP
    parts = frames.view(rows, overlap, HOP, count).transpose(2, 3)
    total = sum(F.pad(parts[:, part], (0, 0, part, overlap - 1 - part)) for part in range(overlap))
    assert isinstance(total, Tensor)
    edge = (WINDOW - HOP) // 2
    return total.flatten(1)[:, edge : edge + count * HOP] / _GAIN
