"""Multi-token prediction: small modules one after another, each of which takes the state before it and the next token
and gives the state from which the target's own output layer speaks.

DeepSeek-V3's modules (arXiv 2412.19437) are trained together with the model, one for each token ahead; ours are trained
behind a frozen target. With a single module used again and again it is the recursive kind (FastMTP).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.drafters.trained.eagle import said, shaped, unrolled
from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, kept
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess, agreement


class Module(nn.Module):
    """Norms of both inputs, a matrix that puts them together, a block."""

    def __init__(self, form: Config, index: int) -> None:
        super().__init__()
        self.embedded, self.entered = (Norm(form.hidden_size, form.norm_eps) for _ in range(2))
        self.fuse = Matrix(2 * form.hidden_size, form.hidden_size)
        self.block = Block(form, index=index)
        with torch.no_grad():
            self.fuse.weight[:, form.hidden_size :] += torch.eye(form.hidden_size)

    def forward(self, x: Tensor, embedded: Tensor, attn_mask: AttentionMask) -> Tensor:
        result: Tensor = self.block(self._fused(x, embedded), attn_mask)
        return result

    def _fused(self, x: Tensor, embedded: Tensor) -> Tensor:
        fused: Tensor = self.fuse(torch.cat([self.embedded(embedded), self.entered(x)], -1))
        return fused

    def listen(self, x: Tensor, embedded: Tensor, attn_mask: AttentionMask) -> None:
        """Only remember the token, for when this module's turn comes."""
        fused = self._fused(x, embedded)
        assert self.block.attention_norm is not None
        both = self.block.attention.read(self.block.attention_norm(fused), attn_mask)
        if attn_mask.rounds is not None:
            attn_mask.rounds.setdefault(self.block.attention.index, []).append(both)


class MtpModules(DraftHead):
    """Module k guesses the token k places on, from module k - 1's states; the last module is used again behind itself.
    Each attends to what it read: of committed tokens with the target's states, of drafted ones with those of the module
    whose turn it was. In the paper module k reads all tokens with module k - 1's states."""

    parallel, draft_kind, taps, depth = False, "chain", ("last",), None
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        modules: int = 1,
        rounds: int = 4,
        hidden: int = 0,
        form: Mapping[str, Any] | None = None,
        vocabulary: PrefixCache = 0,
        fade: float = 0.6,
    ) -> None:
        super().__init__()
        if min(modules, rounds) < 1:
            raise InvalidOption(f"modules={modules}, rounds={rounds}: each must be 1 or more")
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form = shaped(network.config, hidden, form)
        self.rounds, self.fade, self.cached_layers = max(rounds, modules), fade, modules
        self.config = {
            "modules": modules,
            "rounds": rounds,
            "hidden": hidden,
            "form": dict(form or {}),
            "vocabulary": kept(self.words),
            "fade": fade,
        }
        chain = [Module(self.form, index) for index in range(modules)]
        for one in chain:
            one.block.copy(network.layers[-1])
        self.chain: Any = nn.ModuleList(chain)
        self.norm = Norm(self.form.hidden_size, self.form.norm_eps)
        self.angles = Angles(self.form)
        with torch.no_grad():
            self.norm.weight.copy_(network.norm)

    def advance(self, x: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        """States [B, Q, D] behind tokens that are `level` places on from the last committed one."""
        turn, embedded = min(level, self.cached_layers - 1), self.words.embed(tokens)
        for one in self.chain[turn + 1 :]:
            one.listen(x, embedded, attn_mask)
        states: Tensor = self.chain[turn](x, embedded, attn_mask)
        return states

    def _rounds(self, batch: Batch) -> Iterator[Tensor]:
        def advance(x: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
            assert attn_mask.rounds is not None
            return self.advance(x, tokens, attn_mask, len(attn_mask.rounds.get(self.cached_layers - 1, ())))

        x = before(batch.taps["last"].to(self.norm.weight.dtype))
        return unrolled(self.angles, batch, x, advance)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        return said(self, self._rounds(batch), self.rounds)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return agreement(list(said(self, self._rounds(batch), depth)), batch, depth)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.advance(features, tokens, attn_mask, 0)

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        return self.advance(states, tokens, attn_mask, level + 1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(self.norm(states))

    @property
    def pass_bytes(self) -> int:
        """Of the output rows and one module."""
        return self.words.weight_bytes + (weight_bytes(self) - self.words.weight_bytes) // self.cached_layers

    def drafts(self, target: Any) -> Any:
        return ready(self, target)
