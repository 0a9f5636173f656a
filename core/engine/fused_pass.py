"""A network's layers by the kernels in Triton: eight launches a layer for up to 64 tokens, where torch takes 21.

For layers as Llama's, with or without biases and norms of queries and keys. Other layers, 8-bit caches and offloaded
weights are left to torch. Independent of drafts and of what is cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.core.engine.linear import Dense
from outrider.core.engine.types import Config, Layer, PassLayout
from outrider.core.kernels import gpu

if TYPE_CHECKING:
    from types import ModuleType


class FusedPass:
    """The layers of a network and the counters of their attention. One pass runs at a time."""

    def __init__(self, config: Config, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device) -> None:
        from outrider.core.kernels.gpu import functions

        self.config, self.layers, self.dtype = config, layers, dtype
        self.kernels: ModuleType = functions
        self._done = functions.counters(device)

    def run(
        self,
        x: Tensor,
        store: Tensor,
        layout: PassLayout,
        angles: tuple[Tensor, Tensor],
        taps: dict[str, list[Tensor]] | None,
        span: tuple[int, int],
    ) -> Tensor:
        """Run the layers of `span` on states x [B Q, D], which are overwritten; see Network.run."""
        config, kernels, rows = self.config, self.kernels, layout.size(store)[0]
        normed = torch.empty(x.shape, dtype=self.dtype, device=x.device)
        delta: Tensor | None = None  # the last sublayer's output, which the next norm adds
        slots = layout.slots if layout.start is None else layout.start
        for index in range(*span):
            layer, past = self.layers[index], store[index]
            if layer.use_attention:
                kernels.add_norm_(x, delta, layer.attention_norm, config.norm_eps, normed)
                qkv = layer.qkv(normed)
                kernels.rotate_and_write_(
                    qkv, past, *angles, layout.positions, slots, layer.qk_norm, config.norm_eps, layout.table
                )
                attended = kernels.tree_attention(
                    qkv,
                    past,
                    self._done,
                    layout.columns,
                    layout.mask,
                    layout.entries,
                    layout.table,
                    scale=config.variant.attention_scale,
                )
                delta = layer.out(attended)
            if layer.use_mlp:
                kernels.add_norm_(x, delta, layer.mlp_norm, config.norm_eps, normed)
                delta = layer.down(self._gated(layer, normed))
            if taps and (tap := f"layer.{index}") in taps:
                if delta is not None:
                    x += delta
                    delta = None
                taps[tap].append(x.view(rows, len(x) // rows, -1).to(self.dtype, copy=True))
        if delta is not None:
            x += delta
        return x

    def _gated(self, layer: Layer, x: Tensor) -> Tensor:
        """Normed states [N, D] -> what the MLP's last product reads [N, M]."""
        if len(x) <= self.kernels.MAX_ROWS and type(layer.up_gate) is Dense:
            made: Tensor = self.kernels.swiglu_product(x, layer.up_gate.weight, layer.up_gate.bias)
        else:
            made = self.kernels.swiglu(layer.up_gate(x))
        return made


def fused_pass(config: Config, layers: Sequence[Layer], dtype: torch.dtype, device: torch.device) -> FusedPass | None:
    """The pass by kernels in Triton, where they are used and compute what this network does."""
    variant = config.variant
    other = variant.windows or variant.attention_softcap or variant.sinks or variant.post_norms or variant.mixture
    post = any(layer.attention_post_norm is not None or layer.experts is not None for layer in layers)
    if other or post or variant.activation != "silu" or not 8 <= config.head_dim <= 256:
        return None
    return FusedPass(config, layers, dtype, device) if gpu.usable(device, dtype) else None
