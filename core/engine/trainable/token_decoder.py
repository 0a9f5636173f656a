"""A decoder that learns without a teacher: its shape, its blocks as they begin, and the network that it then speaks as.

What the token models of pictures and of speech share. What each reads, and what is left out while it learns, is its own
affair.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.core.engine.linear import Dense, fastest
from outrider.core.engine.network import Network, with_graphs
from outrider.core.engine.trainable.block import Block, Norm
from outrider.core.engine.types import Config


def shape(vocabulary: int, *, width: int, layers: int, heads: int, hidden: int) -> Config:
    """For some thousand tokens at most, the words that are read not being those that are said."""
    return Config(
        vocabulary=vocabulary,
        hidden_size=width,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=width // heads,
        intermediate_size=hidden,
        rope_theta=1000.0,
        tied=False,
        qk_norm=True,
        context=4096,
    )


@torch.no_grad()
def beginning(form: Config) -> nn.ModuleList:
    """Blocks, each of which adds little at first."""
    blocks = [Block(form) for _ in range(form.layers)]
    for block in blocks:
        for matrix in (block.attention.out, block.mlp.down):
            matrix.weight.mul_((2 * form.layers) ** -0.5)
    return nn.ModuleList(blocks)


@torch.no_grad()
def spoken(
    form: Config,
    blocks: nn.ModuleList,
    embedding: Tensor,
    norm: Norm,
    head: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Network:
    """The same weights, laid out to be run."""
    layers = []
    for block in blocks:
        assert isinstance(block, Block)
        layers.append(block.layer(dtype, device))
    read, last, said = (one.detach().to(device, dtype) for one in (embedding, norm.weight, head))
    return with_graphs(Network(form, read, layers, last, fastest(Dense(said))))
