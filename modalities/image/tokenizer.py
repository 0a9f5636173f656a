"""The image tokenizer: a convolutional codec that turns images into a grid of codes and back.

Finite Scalar Quantization (arXiv 2309.15505), with one difference: latents are rounded to evenly spaced levels in [-1,
1] without a tanh, so that the codes equal those of a nearest-neighbour search in the codebook. For this reason, and
because the weights have the same names, diffusers loads it as a VQModel. Independent of text and token models.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.assets.files import read_json, write_atomically, write_tensors
from outrider.core.assets.store import Checkpoint

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class Layout:
    """The sizes of a tokenizer, as saved in layout.json."""

    levels: tuple[int, ...] = (8, 5, 5, 5)  # of each code dimension
    channels: tuple[int, ...] = (32, 64, 96)  # of each resolution; each but the first halves the image's side
    layers: int = 1  # residual layers at each resolution
    groups: int = 8

    @property
    def codes(self) -> int:
        return prod(self.levels)


class _Residual(nn.Module):
    def __init__(self, before: int, after: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, before, eps=1e-6)
        self.conv1 = nn.Conv2d(before, after, 3, padding=1)
        self.norm2 = nn.GroupNorm(groups, after, eps=1e-6)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1)
        self.conv_shortcut = nn.Conv2d(before, after, 1) if before != after else None

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return cast(Tensor, inner + (x if self.conv_shortcut is None else self.conv_shortcut(x)))


class _Down(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv(F.pad(x, (0, 1, 0, 1))))


class _Up(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest")))


class _Block(nn.Module):
    """Residual layers, then resampling if `resize` names it as diffusers does."""

    def __init__(self, before: int, after: int, layers: int, groups: int, resize: str = "") -> None:
        super().__init__()
        self.resnets = nn.ModuleList(_Residual(after if n else before, after, groups) for n in range(layers))
        if resize == "downsamplers":
            self.downsamplers = nn.ModuleList([_Down(after)])
        elif resize == "upsamplers":
            self.upsamplers = nn.ModuleList([_Up(after)])
        self._resize = resize

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.resnets:
            x = layer(x)
        return cast(Tensor, getattr(self, self._resize)[0](x)) if self._resize else x


class _Half(nn.Module):
    """The encoder (`down`) or the decoder."""

    def __init__(self, layout: Layout, *, down: bool) -> None:
        super().__init__()
        widths, groups, latent = layout.channels, layout.groups, len(layout.levels)
        path = widths if down else widths[::-1]
        layers = layout.layers + (not down)
        resize = "downsamplers" if down else "upsamplers"
        blocks = nn.ModuleList(
            _Block(path[max(n - 1, 0)], width, layers, groups, resize if n < len(path) - 1 else "")
            for n, width in enumerate(path)
        )
        self.conv_in = nn.Conv2d(3 if down else latent, path[0], 3, padding=1)
        if down:
            self.down_blocks = blocks
        else:
            self.up_blocks = blocks
        self.mid_block = _Block(widths[-1], widths[-1], 2, groups)
        self.conv_norm_out = nn.GroupNorm(groups, path[-1], eps=1e-6)
        self.conv_out = nn.Conv2d(path[-1], latent if down else 3, 3, padding=1)
        self._down = down

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        steps = [*self.down_blocks, self.mid_block] if self._down else [self.mid_block, *self.up_blocks]
        for step in steps:
            x = step(x)
        return cast(Tensor, self.conv_out(F.silu(self.conv_norm_out(x))))


class _Codebook(nn.Module):
    def __init__(self, levels: tuple[int, ...]) -> None:
        super().__init__()
        self.embedding = nn.Embedding(prod(levels), len(levels))
        steps = [torch.linspace(-1, 1, count) for count in levels]
        self.embedding.weight = nn.Parameter(torch.cartesian_prod(*steps), requires_grad=False)


class Tokenizer(nn.Module):
    """Images [B, 3, H, W] in [-1, 1] <-> codes [B, H/f, W/f]. An all-white patch always has the code `white`."""

    def __init__(self, layout: Layout | None = None) -> None:
        super().__init__()
        self.layout = layout = layout or Layout()
        if len(layout.levels) < 2 or min(layout.levels) < 2:
            raise ValueError(f"levels are {layout.levels}; a codec needs two or more dimensions of two or more levels")
        latent = len(layout.levels)
        self.encoder = _Half(layout, down=True)
        self.quant_conv = nn.Conv2d(latent, latent, 1)
        self.quantize = _Codebook(layout.levels)
        self.post_quant_conv = nn.Conv2d(latent, latent, 1)
        self.decoder = _Half(layout, down=False)
        self.factor = 2 ** (len(layout.channels) - 1)
        self.white = layout.codes - 1
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # a third faster on a CPU

    @property
    def codebook(self) -> Tensor:
        """[K, D]"""
        return self.quantize.embedding.weight

    def latents(self, pictures: Tensor) -> Tensor:
        return cast(Tensor, self.quant_conv(self.encoder(pictures)))

    def nearest(self, latents: Tensor) -> Tensor:
        """Latents [B, D, h, w] -> codes [B, h, w], by rounding each coordinate to its nearest level."""
        code = torch.zeros_like(latents[:, 0], dtype=torch.long)
        for n, count in enumerate(self.layout.levels):
            level = ((latents[:, n].float().clamp(-1, 1) + 1) * ((count - 1) / 2)).round().long()
            code = code * count + level
        return code

    def encode(self, pictures: Tensor) -> Tensor:
        return self._mask_white(pictures, self.nearest(self.latents(pictures)))

    def decode(self, codes: Tensor) -> Tensor:
        return cast(Tensor, self.decoder(self.post_quant_conv(self.codebook[codes].movedim(-1, 1))))

    def forward(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """The reconstruction, and the mean squared distance of latents from [-1, 1]; both with gradients."""
        latents = self.latents(pictures)
        clamped = latents.clamp(-1, 1)
        levels = self.codebook[self._mask_white(pictures, self.nearest(latents))].movedim(-1, 1)
        quantised = latents + (levels - latents).detach()
        return self.decoder(self.post_quant_conv(quantised)), (latents - clamped).square().mean()

    def _mask_white(self, pictures: Tensor, codes: Tensor) -> Tensor:
        """Replaces the codes of all-white patches by `white`."""
        darkest = -F.max_pool2d(-pictures.amin(1, keepdim=True), self.factor)[:, 0]
        return codes.masked_fill(darkest >= 1.0, self.white)

    def save(self, folder: Path, provenance: Mapping[str, Any] | None = None) -> None:
        """Write the files that `load` and diffusers' VQModel.from_pretrained read. All weights but the codebook are in
        16 bits."""
        layout, depth = self.layout, len(self.layout.channels)
        config = {
            "_class_name": "VQModel",
            "in_channels": 3,
            "out_channels": 3,
            "down_block_types": ["DownEncoderBlock2D"] * depth,
            "up_block_types": ["UpDecoderBlock2D"] * depth,
            "block_out_channels": list(layout.channels),
            "layers_per_block": layout.layers,
            "act_fn": "silu",
            "latent_channels": len(layout.levels),
            "num_vq_embeddings": layout.codes,
            "norm_num_groups": layout.groups,
            "vq_embed_dim": len(layout.levels),
            "mid_block_add_attention": False,
            "lookup_from_codebook": True,
        }
        write_atomically(folder / "config.json", json.dumps(config, indent=1))
        metadata = {**asdict(layout), "provenance": dict(provenance or {})}
        write_atomically(folder / "layout.json", json.dumps(metadata, indent=1))
        weights = {name: value.detach().half().cpu().contiguous() for name, value in self.state_dict().items()}
        weights["quantize.embedding.weight"] = self.codebook.detach().float().cpu().contiguous()
        write_tensors(folder / "diffusion_pytorch_model.safetensors", weights)

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        config = read_json(folder / "layout.json")
        layout = Layout(tuple(config["levels"]), tuple(config["channels"]), config["layers"], config["groups"])
        codec = cls(layout)
        codec.load_state_dict(dict(Checkpoint(folder / "diffusion_pytorch_model.safetensors")))
        return codec.eval()


def reconstruction_loss(reconstruction: Tensor, pictures: Tensor, out_of_range: Tensor) -> Tensor:
    """L1 and squared error, a quarter of the L1 error of edges (which keeps outlines sharp), and a tenth of the penalty
    on latents out of range."""
    error = reconstruction - pictures
    edges = error.diff(dim=-1).abs().mean() + error.diff(dim=-2).abs().mean()
    return error.abs().mean() + error.square().mean() + 0.25 * edges + 0.1 * out_of_range


def psnr(reconstruction: Tensor, pictures: Tensor) -> Tensor:
    """The peak signal-to-noise ratio [B] in dB, for images in [-1, 1]."""
    mse = (reconstruction.clamp(-1, 1) - pictures).square().mean((1, 2, 3)) / 4
    return -10 * mse.clamp(min=1e-10).log10()


def images(pixels: Tensor) -> list[Image]:
    """Pixels [B, 3, H, W] in [-1, 1] as PIL images."""
    from PIL import Image

    arrays = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(array) for array in arrays]


def most_frequent(codes: Tensor) -> int:
    """The code that occurs most often."""
    return int(codes.flatten().mode().values)
