"""What the token models of images and speech share: their configuration, initial blocks, and conversion to a network.

They are trained from scratch, without a teacher. Independent of inputs and objectives.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.linear import Dense, fastest
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import Block, Norm
from outrider.core.engine.types import Config


def decoder_config(vocabulary: int, *, width: int, layers: int, heads: int, hidden: int) -> Config:
    """The configuration of a token model for contexts of up to 4096 tokens, with an untied output layer."""
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
def initial_blocks(config: Config) -> nn.ModuleList:
    """Blocks whose contributions to the residual stream are scaled down by sqrt(2 L), as in GPT-2."""
    blocks = [Block(config) for _ in range(config.layers)]
    for block in blocks:
        for matrix in (block.attention.out, block.mlp.down):
            matrix.weight.mul_((2 * config.layers) ** -0.5)
    return nn.ModuleList(blocks)


@torch.no_grad()
def to_network(
    config: Config,
    blocks: nn.ModuleList,
    embedding: Tensor,
    norm: Norm,
    head: Tensor,
    dtype: torch.dtype,
    device: torch.device | str,
) -> Network:
    """The trained weights as a network for inference."""
    layers = []
    for block in blocks:
        assert isinstance(block, Block)
        layers.append(block.layer(dtype, device))
    weights = (part.detach().to(device, dtype) for part in (embedding, norm.weight, head))
    embedding, norm_weight, head = weights
    return with_graphs(Network(config, embedding, layers, norm_weight, fastest(Dense(head))))
