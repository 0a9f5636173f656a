"""HiFi-GAN's generator (arXiv 2010.05646), mel frames to samples, whole or as they come.

Streamed sound is that of the whole utterance: every piece is computed with as many frames around it as the network can
see, and behind the end there is silence. Knows nothing of tokens, nor of where its weights lie.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, pad

from outrider.core.errors import InvalidOption
from outrider.speech.conv1d import conv, rows
from outrider.speech.mel import BINS, HOP, SILENCE

_UPS = ((8, 16), (8, 16), (2, 4), (2, 4))  # stride, kernel
_KERNELS, _DILATIONS = (3, 7, 11), (1, 3, 5)
CONTEXT = 16  # frames on either side that a sample depends on, rounded up
_STEP = 64  # frames are given in multiples of so many: a new length costs seconds, for every convolution is made for it


class _Block(nn.Module):
    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convs1 = nn.ModuleList(conv(width, width, kernel, step) for step in _DILATIONS)
        self.convs2 = nn.ModuleList(conv(width, width, kernel) for _ in _DILATIONS)

    def forward(self, x: Tensor) -> Tensor:
        for wide, narrow in zip(self.convs1, self.convs2, strict=True):
            x = narrow(leaky_relu(wide(leaky_relu(x, 0.1)), 0.1)) + x
        return x


class Vocoder(nn.Module):
    """Log-mel frames [B, 80, T] -> samples [B, 256 T]. `width` 512 is that of the published checkpoints."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self.conv_pre = conv(BINS, width, 7)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for stride, kernel in _UPS:
            padding = (0, (kernel - stride) // 2)
            self.ups.append(nn.ConvTranspose2d(width, width // 2, (1, kernel), (1, stride), padding))
            width //= 2
            self.resblocks.extend(_Block(width, kernel) for kernel in _KERNELS)
        self.conv_post = conv(width, 1, 7)

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> Vocoder:
        """From a checkpoint's tensors, with weights still split into size and direction (weight_g, weight_v) or not."""
        plain = {name: tensors[name] for name in tensors if not name.endswith(("weight_g", "weight_v"))}
        for name in tensors:
            if name.endswith("weight_v"):
                way, size = tensors[name], tensors[name[:-1] + "g"]
                plain[name[:-2]] = way * (size / way.flatten(1).norm(dim=1)[:, None, None])
        if "conv_pre.weight" not in plain:
            raise InvalidOption("these are not a HiFi-GAN generator's tensors: there is no conv_pre.weight")
        made = cls(plain["conv_pre.weight"].shape[0])
        made.load_state_dict({name: one[:, :, None] if one.ndim == 3 else one for name, one in plain.items()})
        return made.eval().requires_grad_(False)

    def forward(self, mel: Tensor) -> Tensor:
        dtype = self.conv_pre.weight.dtype
        x = self.conv_pre(rows(mel.to(dtype)))
        for place, up in enumerate(self.ups):
            x = up(leaky_relu(x, 0.1))
            blocks = self.resblocks[place * len(_KERNELS) : (place + 1) * len(_KERNELS)]
            x = sum((block(x) for block in blocks[1:]), blocks[0](x)) / len(_KERNELS)
        sound: Tensor = self.conv_post(leaky_relu(x)).to(mel.dtype).tanh()[:, 0, 0]
        return sound


class VocoderStream:
    """One utterance, a few frames at a time: `push` gives the samples that are settled, `finish` the rest."""

    def __init__(self, vocoder: Vocoder) -> None:
        self.vocoder = vocoder
        self._kept: Tensor | None = None  # [80, T] frames that are still seen
        self._given = 0  # frames of `_kept` whose samples are out

    def push(self, mel: Tensor) -> Tensor:
        """Frames [80, T] -> samples."""
        self._kept = mel if self._kept is None else torch.cat([self._kept, mel], 1)
        return self._until(self._kept.shape[1] - CONTEXT)

    def finish(self) -> Tensor:
        if self._kept is None:
            return torch.zeros(0)
        return self._until(self._kept.shape[1])

    def _until(self, end: int) -> Tensor:
        assert self._kept is not None
        if end <= self._given:
            return self._kept.new_zeros(0)
        silent = -(self._kept.shape[1] + CONTEXT) % _STEP + CONTEXT
        with torch.no_grad():
            sound: Tensor = self.vocoder(pad(self._kept, (0, silent), value=SILENCE)[None])[0]
        sound = sound[self._given * HOP : end * HOP]
        behind = max(end - CONTEXT, 0)
        self._kept, self._given = self._kept[:, behind:], end - behind
        return sound
