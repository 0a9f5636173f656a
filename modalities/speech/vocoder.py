"""HiFi-GAN's generator (arXiv 2010.05646): mel frames to samples, for a whole utterance or as a stream.

Streaming gives the same samples, because each chunk is computed with all frames that the network's receptive field
covers, and the utterance is followed by silence. Independent of tokens and of weight files.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.functional import leaky_relu, pad

from outrider.core.errors import InvalidOption
from outrider.core.kernels.vocoder import Convolution, Generator, usable
from outrider.speech.conv1d import conv, rows
from outrider.speech.mel import BINS, HOP, SILENCE

_UPS = ((8, 16), (8, 16), (2, 4), (2, 4))  # stride, kernel
_KERNELS, _DILATIONS = (3, 7, 11), (1, 3, 5)
CONTEXT = 16  # frames on either side that a sample depends on, rounded up
_MULTIPLE = 32  # inputs are padded to multiples of this many frames: torch compiles convolutions for each new length


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
    """Log-mel frames [B, 80, T] -> samples [B, 256 T]. Published checkpoints have `width` 512."""

    def __init__(self, width: int = 512) -> None:
        super().__init__()
        self._kernels: Generator | None = None
        self.conv_pre = conv(BINS, width, 7)
        self.ups, self.resblocks = nn.ModuleList(), nn.ModuleList()
        for stride, kernel in _UPS:
            padding = (0, (kernel - stride) // 2)
            self.ups.append(nn.ConvTranspose2d(width, width // 2, (1, kernel), (1, stride), padding))
            width //= 2
            self.resblocks.extend(_Block(width, kernel) for kernel in _KERNELS)
        self.conv_post = conv(width, 1, 7)

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Vocoder:
        """A vocoder from a checkpoint's tensors, with or without weight normalisation (weight_g, weight_v)."""
        plain = {name: tensors[name] for name in tensors if not name.endswith(("weight_g", "weight_v"))}
        for name in tensors:
            if name.endswith("weight_v"):
                direction, norm = tensors[name], tensors[name[:-1] + "g"]
                plain[name[:-2]] = direction * (norm / direction.flatten(1).norm(dim=1)[:, None, None])
        if "conv_pre.weight" not in plain:
            raise InvalidOption("the checkpoint has no tensor conv_pre.weight; is it a HiFi-GAN generator?")
        vocoder = cls(plain["conv_pre.weight"].shape[0])
        vocoder.load_state_dict({name: x[:, :, None] if x.ndim == 3 else x for name, x in plain.items()})
        return vocoder.eval().requires_grad_(False)

    def forward(self, mel: Tensor) -> Tensor:
        dtype = self.conv_pre.weight.dtype
        if (compiled := self._compiled()) is not None:
            return torch.stack([compiled(frames.T) for frames in mel]).to(mel.dtype)
        x = self.conv_pre(rows(mel.to(dtype)))
        for stage, up in enumerate(self.ups):
            x = up(leaky_relu(x, 0.1))
            blocks = self.resblocks[stage * len(_KERNELS) : (stage + 1) * len(_KERNELS)]
            x = sum((block(x) for block in blocks[1:]), blocks[0](x)) / len(_KERNELS)
        sound: Tensor = self.conv_post(leaky_relu(x)).to(mel.dtype).tanh()[:, 0, 0]
        return sound

    @property
    def multiple(self) -> int:
        """The multiple of frames to which inputs are padded."""
        return _MULTIPLE if self._compiled() is None else 1

    def _compiled(self) -> Generator | None:
        """The kernels with these weights, in 16 bits on a CPU that has them."""
        weight = self.conv_pre.weight
        if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or torch.is_grad_enabled():
            return None
        if self._kernels is None and usable(len(weight), [stride for stride, _ in _UPS]):
            self._kernels = Generator(
                _of(self.conv_pre), list(zip(map(_of, self.ups), self._blocks(), strict=True)), _of(self.conv_post)
            )
        return self._kernels

    def _blocks(self) -> list[list[list[tuple[Convolution, Convolution]]]]:
        """The weights of the residual blocks, by stage."""
        kinds = [[block.get_submodule(name).children() for name in ("convs1", "convs2")] for block in self.resblocks]
        pairs = [[(_of(wide), _of(narrow)) for wide, narrow in zip(*kind, strict=True)] for kind in kinds]
        return [pairs[at : at + len(_KERNELS)] for at in range(0, len(pairs), len(_KERNELS))]


def _of(layer: nn.Module) -> Convolution:
    return layer.get_parameter("weight")[:, :, 0], layer.get_parameter("bias")


class VocoderStream:
    """Vocodes one utterance frame by frame. `push` returns samples that later frames cannot change, `finish` the
    rest."""

    def __init__(self, vocoder: nn.Module) -> None:
        self.vocoder = vocoder  # frames [1, 80, T] -> samples [1, 256 T]
        self._frames: Tensor | None = None  # [80, T] frames that later samples depend on
        self._done = 0  # of these, frames whose samples were returned

    def push(self, mel: Tensor) -> Tensor:
        """Frames [80, T] -> samples."""
        self._add(mel)
        return self._vocode(0)

    def finish(self, mel: Tensor | None = None) -> Tensor:
        """The last frames, if there are more -> samples."""
        if mel is not None:
            self._add(mel)
        return torch.zeros(0) if self._frames is None else self._vocode(CONTEXT)

    def _add(self, mel: Tensor) -> None:
        self._frames = mel if self._frames is None else torch.cat([self._frames, mel], 1)

    def _vocode(self, after: int) -> Tensor:
        """The samples not yet returned of the frames that have CONTEXT frames after them, `after` frames of silence
        included."""
        assert self._frames is not None
        count = self._frames.shape[1] + after
        end = count - CONTEXT
        if end <= self._done:
            return self._frames.new_zeros(0)
        with torch.no_grad():
            silence = after + -count % getattr(self.vocoder, "multiple", _MULTIPLE)
            sound: Tensor = self.vocoder(pad(self._frames, (0, silence), value=SILENCE)[None])[0]
        sound = sound[self._done * HOP : end * HOP]
        dropped = max(end - CONTEXT, 0)
        self._frames, self._done = self._frames[:, dropped:], end - dropped
        return sound
