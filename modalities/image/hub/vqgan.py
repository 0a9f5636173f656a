"""The convolutional image tokenizer of LlamaGen (arXiv 2406.06525), a VQGAN with a codebook of unit vectors.

Runs directly on the published tensors; their names and shapes give the width and depth. Each block but the last halves
the image's side. Independent of the model that generates the codes.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.errors import Incompatible

_GROUPS, _EPS = 32, 1e-6


class Vqgan:
    """The encoder and decoder, in 32 bits."""

    def __init__(self, tensors: Mapping[str, Tensor], device: torch.device | str = "cpu") -> None:
        needed = ("quantize.embedding.weight", "post_quant_conv.weight", "decoder.conv_out.weight", "quant_conv.weight")
        for name in needed:
            if name not in tensors:
                raise Incompatible(f"the image tokenizer has no tensor '{name}'; is it LlamaGen's VQ model?")
        self._tensors = {name: tensors[name].to(device, torch.float32) for name in tensors}
        self.device = torch.device(device)
        self.codes = F.normalize(self._tensors["quantize.embedding.weight"], dim=-1)  # [K, D]
        self.factor = 2 ** (self._count("decoder.conv_blocks") - 1)  # a code covers factor x factor pixels

    def _count(self, name: str) -> int:
        """The number of modules in a list of modules."""
        return len({key[len(name) + 1 :].split(".")[0] for key in self._tensors if key.startswith(name + ".")})

    @torch.no_grad()
    def decode(self, grids: Tensor) -> Tensor:
        """Codes [B, H, W] -> pixels [B, 3, H f, W f] in about [-1, 1]."""
        x = self.codes[grids.to(self.device)].permute(0, 3, 1, 2)
        x = self._middle(self._conv(self._conv(x, "post_quant_conv"), "decoder.conv_in"), "decoder")
        last = self._count("decoder.conv_blocks") - 1
        for block in range(last + 1):
            x = self._block(x, f"decoder.conv_blocks.{block}")
            if block != last:
                x = F.interpolate(x, scale_factor=2.0, mode="nearest")
                x = self._conv(x, f"decoder.conv_blocks.{block}.upsample.conv")
        return self._conv(F.silu(self._norm(x, "decoder.norm_out")), "decoder.conv_out")

    @torch.no_grad()
    def encode(self, pixels: Tensor) -> Tensor:
        """Pixels [B, 3, H f, W f] -> codes [B, H, W]."""
        x = self._conv(pixels.to(self.device, torch.float32), "encoder.conv_in")
        last = self._count("encoder.conv_blocks") - 1
        for block in range(last + 1):
            x = self._block(x, f"encoder.conv_blocks.{block}")
            if block != last:
                x = self._conv(F.pad(x, (0, 1, 0, 1)), f"encoder.conv_blocks.{block}.downsample.conv", stride=2, pad=0)
        x = F.silu(self._norm(self._middle(x, "encoder"), "encoder.norm_out"))
        x = self._conv(self._conv(x, "encoder.conv_out"), "quant_conv").permute(0, 2, 3, 1)
        return (F.normalize(x, dim=-1) @ self.codes.T).argmax(-1)  # the nearest of unit vectors

    def _conv(self, x: Tensor, name: str, stride: int = 1, pad: int | None = None) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        pad = weight.shape[-1] // 2 if pad is None else pad
        return F.conv2d(x, weight, self._tensors[f"{name}.bias"], stride, pad)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.group_norm(x, _GROUPS, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"], _EPS)

    def _block(self, x: Tensor, name: str) -> Tensor:
        for layer in range(self._count(f"{name}.res")):
            x = self._residual(x, f"{name}.res.{layer}")
            if f"{name}.attn.{layer}.q.weight" in self._tensors:
                x = self._attention(x, f"{name}.attn.{layer}")
        return x

    def _middle(self, x: Tensor, name: str) -> Tensor:
        x = self._attention(self._residual(x, f"{name}.mid.0"), f"{name}.mid.1")
        return self._residual(x, f"{name}.mid.2")

    def _residual(self, x: Tensor, name: str) -> Tensor:
        y = self._conv(F.silu(self._norm(x, f"{name}.norm1")), f"{name}.conv1")
        y = self._conv(F.silu(self._norm(y, f"{name}.norm2")), f"{name}.conv2")
        return y + (self._conv(x, f"{name}.nin_shortcut") if f"{name}.nin_shortcut.weight" in self._tensors else x)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        y = self._norm(x, f"{name}.norm")
        q, k, v = (self._conv(y, f"{name}.{part}").flatten(2).transpose(1, 2)[:, None] for part in "qkv")
        y = F.scaled_dot_product_attention(q, k, v)[:, 0].transpose(1, 2).reshape(x.shape)
        return x + self._conv(y, f"{name}.proj_out")
