"""A small draft model made from its target: some of its layers, its embedding, and the output rows of its most frequent
tokens, distilled from the target.

Knowledge distillation for speculative decoding (DistillSpec, arXiv 2310.08461); recovering a pruned model by
distillation is from Minitron (arXiv 2407.14679), the reduced vocabulary from EAGLE-3 and FR-Spec (arXiv 2502.14856).
Ours shares the target's rows instead of copying them. With a `rank` only low-rank corrections of the layers are learned
and shipped (LoRA, arXiv 2106.09685).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.core.drafters.trained.lora import correct
from outrider.core.engine.linear import Dense, Linear, Selected
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.quantize import fastest_for_drafting
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Layer
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess


class SmallModel(DraftHead):
    """Starts from the target's `layers` (a number n: the first n - 1 and the last). `rank` 0 trains whole layers, a
    larger one LoRA corrections of that rank."""

    def __init__(
        self,
        target: Decoder,
        *,
        layers: int | Sequence[int] = 3,
        vocabulary: int | Sequence[int] | Tensor = 0,
        rank: int = 0,
    ) -> None:
        super().__init__()
        network, depth = target.network, target.config.layers
        if isinstance(layers, int):
            layers = (*range(min(layers, depth) - 1), depth - 1) if layers > 0 else ()
        if not layers or any(not -depth <= layer < depth for layer in layers):
            raise InvalidOption(f"layers is {tuple(layers)}; give indices from 0 to {depth - 1}, or -1 for the last")
        if rank < 0:
            raise InvalidOption(f"rank is {rank}; it must be 0 (whole layers) or more")
        self.words = SharedEmbedding(network, vocabulary)
        self.config = {"layers": [layer % depth for layer in layers], "vocabulary": self.words.count, "rank": rank}
        if self.words.vocabulary is None:
            self.config["vocabulary"] = 0
        if not target.config.like_llama:
            raise Incompatible(
                f"a distilled draft model copies the target's layers, and those of '{target.config.architecture}' are "
                "not built as Llama's; use a small model of its family as the draft model, or train another head"
            )
        self.blocks = nn.ModuleList()
        for index, layer in enumerate(self.config["layers"]):
            block = Block(target.config, index=index)
            block.copy(network.layers[layer])
            if rank:
                correct(block, rank)
            self.blocks.append(block)
        self.norm = Norm(target.config.hidden_size, target.config.norm_eps)
        with torch.no_grad():
            self.norm.weight.copy_(network.norm)
        self._angles = Angles(target.config)
        self._network: Network | None = None

    def states(self, batch: Batch) -> Tensor:
        """The normed last state of every token [B, T, D]."""
        x = self.words.embed(batch.tokens).float()
        count = batch.tokens.shape[1]
        cos, sin = self._angles(batch.positions, count, torch.float32)
        near = torch.ones(count, count, dtype=torch.bool, device=x.device).tril()
        attn_mask = AttentionMask(cos, sin, near[None])
        for block in self.blocks:
            x = block(x, attn_mask)
        normed: Tensor = self.norm(x)
        return normed

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        yield Guess(self.words.logits(self.states(batch)[batch.loss_mask()]), 1, vocabulary=self.words.vocabulary)

    def drafts(self, target: Decoder) -> Decoder:
        """A decoder in the target's precision, with its own cache."""
        if self._network is None:
            self._network = self._assembled(target.network)
            if target.network.graphs is not None:
                target.network.graphs.attach(self._network)
        return Decoder(self._network)

    def shared(self, config: Mapping[str, Any]) -> dict[str, str]:
        """Each block starts from the other configuration's block of the same target layer."""
        had, names = config["layers"], super().shared({**config, "layers": self.config["layers"]})
        for at, layer in enumerate(self.config["layers"]):
            for rest in self.blocks[at].state_dict():
                name = names.pop(f"blocks.{at}.{rest}")
                if layer in had:
                    names[name] = f"blocks.{had.index(layer)}.{rest}"
        return names

    def train(self, mode: bool = True) -> Self:
        """Drop the network for drafting, which changed weights invalidate."""
        self._network = None
        return super().train(mode)

    @torch.no_grad()
    def _assembled(self, network: Network) -> Network:
        def laid(matrix: Matrix) -> Linear:
            bias = None if matrix.bias is None else matrix.bias.to(network.dtype)
            return fastest_for_drafting(Dense(matrix.weight.to(network.device, network.dtype), bias))

        def plain(norm: Norm) -> Tensor:
            return norm.weight.detach().to(network.device, network.dtype)

        def whole(block: nn.Module) -> Layer:
            assert isinstance(block, Block) and block.attention_norm is not None
            attention, mlp, qk_norm = block.attention, block.mlp, block.attention.qk_norm
            return Layer(
                attention_norm=plain(block.attention_norm),
                qkv=laid(attention.qkv),
                out=laid(attention.out),
                mlp_norm=plain(block.mlp_norm),
                up_gate=laid(mlp.up_gate),
                down=laid(mlp.down),
                qk_norm=None if qk_norm is None else qk_norm.detach().to(network.device, network.dtype),
            )

        layers = [whole(block) for block in self.blocks]
        vocabulary = self.words.vocabulary
        head = (
            network.head
            if vocabulary is None
            else Selected(
                fastest_for_drafting(Dense(network.head.weight[vocabulary].contiguous())),
                vocabulary.to(network.device),
                network.config.vocabulary,
            )
        )
        config = replace(network.config, layers=len(layers))
        return Network(config, network.embedding, layers, plain(self.norm), head)
