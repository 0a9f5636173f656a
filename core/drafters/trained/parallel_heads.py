"""The base of draft heads that guess several positions in one pass, and three of them: Blockwise, Amphista and Llasa+.

All share the target's embedding and output rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.eagle import shaped
from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, causal, kept
from outrider.core.drafters.trained.lora import adapted
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead, Guess


class ParallelHeads(DraftHead):
    """Base of parallel draft heads. `trunk` computes states [B, T, D] of committed tokens, `future_from` the states [N,
    K, D] of the next K positions after some of them [N, D]; the first guess is about the token `first` positions
    ahead."""

    parallel, cached_layers, draft_kind, first = True, 0, "tree", 2
    taps: tuple[str, ...] = ("last",)
    needs = frozenset({"last"})
    depth: int

    def _begin(self, network: Network, vocabulary: PrefixCache, fade: float, **config: Any) -> None:
        for name, value in config.items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise InvalidOption(f"{name} is {value}; it must be 1 or more")
        self.words, self.fade = SharedEmbedding(network, vocabulary), fade
        self.form = network.config
        self.angles = Angles(network.config)
        self.config = {**config, "vocabulary": kept(self.words), "fade": fade}

    def trunk(self, batch: Batch) -> Tensor:
        return batch.taps["last"].to(next(self.parameters()).dtype)

    def future_from(self, x: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must implement future_from()")

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        masks = [batch.loss_mask(self.first + k) for k in range(self.depth)]
        any_mask = torch.stack(masks).any(0)
        states = self.future_from(self.trunk(batch)[any_mask])
        for k, mask in enumerate(masks):
            logits = self.words.logits(states[mask[any_mask], k])
            yield Guess(logits, self.first + k, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return features

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.future_from(state)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


class FutureStates(nn.Module):
    """A state [N, D] -> states [N, K, D] of K positions ahead: the state itself plus the output of a head each. The
    heads are one matrix, or with a `rank` the product of two."""

    def __init__(self, width: int, count: int, rank: int = 0) -> None:
        super().__init__()
        self.count = count
        self.inner = Matrix(width, rank, bias=True) if rank else None
        self.outer = Matrix(rank or width, count * width, bias=True, zero=True)
        self.place = nn.Parameter(torch.zeros(count, width))

    def forward(self, x: Tensor) -> Tensor:
        inner = x if self.inner is None else F.silu(self.inner(x))
        ahead = self.outer(inner).view(len(x), self.count, -1)
        return x[:, None] + (F.silu(ahead) if self.inner is None else ahead) + self.place


def mixing_form(form: Config, heads: int, hidden: int) -> Config:
    """The form of a small layer in which positions ahead attend to one another: `heads` of attention with keys of their
    own (0: as in the target) and an MLP of width `hidden` (0: the target's)."""
    inner = hidden or form.intermediate_size
    return replace(form, intermediate_size=inner, heads=heads or form.heads, kv_heads=heads or form.kv_heads)


class BlockwiseHeads(ParallelHeads):
    """Blockwise parallel decoding (arXiv 1811.03115): one hidden layer for all heads, then a residual output layer
    each. The pass that verifies a block also predicts the next; drafts are chains. The paper can also train the model;
    ours is frozen, and heads share its output rows."""

    draft_kind = "chain"

    def __init__(
        self, target: Any, *, heads: int = 4, hidden: int = 256, vocabulary: PrefixCache = 0, fade: float = 0.8
    ) -> None:
        super().__init__()
        self._begin(target.network, vocabulary, fade, heads=heads, hidden=hidden)
        self.depth = heads
        width = self.form.hidden_size
        self.up = Matrix(width, heads * hidden, bias=True)
        self.down: Any = nn.ModuleList(Matrix(hidden, width, bias=True, zero=True) for _ in range(heads))

    def future_from(self, x: Tensor) -> Tensor:
        inner = F.relu(self.up(x)).view(len(x), self.depth, -1).unbind(1)
        return torch.stack([x + down(hidden) for down, hidden in zip(self.down, inner, strict=True)], 1)


class AmphistaHeads(ParallelHeads):
    """Amphista (arXiv 2406.13170): two adaptation layers read the committed tokens' states, the second also the last
    token's embedding; the heads' states then attend to one another in both directions. Ours shares the target's output
    rows; the adaptation layers start as copies of the target's last two, or are those with LoRA corrections of rank
    `lora`; the drafting heads have rank `rank` (0: full), and the layer in which they attend `mixing` attention heads
    and an MLP of width `hidden` (0: the target's)."""

    cached_layers, first = 2, 1

    def __init__(
        self,
        target: Any,
        *,
        heads: int = 4,
        hidden: int = 0,
        rank: int = 0,
        mixing: int = 0,
        lora: int = 0,
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        network = target.network
        self._begin(network, vocabulary, fade, heads=heads)
        self.config = {**self.config, "hidden": hidden, "rank": rank, "mixing": mixing, "lora": lora}
        self.depth = heads
        width = self.form.hidden_size
        adapt = [Block(self.form, index=index) for index in range(2)]
        self.adapt: Any = nn.ModuleList(adapt)
        self.fuse = Matrix(2 * width, width)
        self.embedded = Norm(width, self.form.norm_eps)
        self.heads = FutureStates(width, heads, rank)
        self.mixer = Block(mixing_form(self.form, mixing, hidden))
        self.norm = Norm(width, self.form.norm_eps)
        for own, layer in zip(reversed(adapt), reversed(network.layers), strict=False):
            own.copy(layer)
            adapted(own, lora, known=width)
        with torch.no_grad():
            self.fuse.weight[:, width:] = torch.eye(width)
            self.mixer.attention.out.weight.mul_(0.1)
            self.norm.weight.copy_(network.norm)

    def _adapted(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self.adapt[0](features, attn_mask)
        x = self.fuse(torch.cat([self.embedded(self.words.embed(tokens)).to(x.dtype), x], -1))
        adapted: Tensor = self.adapt[1](x, attn_mask)
        return adapted

    def trunk(self, batch: Batch) -> Tensor:
        x = before(super().trunk(batch))
        return self._adapted(x, batch.tokens, causal(self.angles, batch, x))

    def future_from(self, x: Tensor) -> Tensor:
        states = self.heads(x)
        order = torch.arange(self.depth, device=x.device)[None]
        mixed: Tensor = self.norm(
            self.mixer(states, AttentionMask(*self.angles(order, self.depth, states.dtype), None))
        )
        return mixed

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self._adapted(features, tokens, attn_mask)


class PlugIn(nn.Module):
    """A norm, a matrix with a bias, and one layer of the target's kind."""

    def __init__(self, form: Config, index: int) -> None:
        super().__init__()
        self.norm = Norm(form.hidden_size, form.norm_eps)
        self.project = Matrix(form.hidden_size, form.hidden_size, bias=True)
        self.block = Block(form, index=index)

    def forward(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        states: Tensor = self.block(self.project(self.norm(x)), attn_mask)
        return states


class CascadedModules(ParallelHeads):
    """Llasa+ (arXiv 2508.06262), the plug-in modules of its multi-token prediction: module 1 reads the frozen target's
    last states, module 2 module 1's, each over all committed tokens; their states go through the target's output rows.
    Unlike DeepSeek's modules they read no tokens, which the paper found to be worse: one pass guesses all positions,
    each independent of the guesses before it. Their losses weigh the same; drafts are drawn chains. Ours start as the
    identity. The paper's acceptance rule is `top-k-membership`."""

    draft_kind, first = "chain", 1

    def __init__(
        self,
        target: Any,
        *,
        modules: int = 2,
        hidden: int = 0,
        form: Mapping[str, Any] | None = None,
        vocabulary: PrefixCache = 0,
        fade: float = 1.0,
    ) -> None:
        super().__init__()
        network = target.network
        self._begin(network, vocabulary, fade, modules=modules)
        self.config = {**self.config, "hidden": hidden, "form": dict(form or {})}
        self.form = shaped(network.config, hidden, form)
        self.angles = Angles(self.form)
        self.depth = self.cached_layers = modules
        chain = [PlugIn(self.form, index) for index in range(modules)]
        self.chain: Any = nn.ModuleList(chain)
        scale = float(network.norm.detach().float().square().mean().sqrt())  # of normed states, which modules read
        for module in chain:
            for last in network.layers[-1:]:
                module.block.copy(last)
            with torch.no_grad():
                module.norm.weight.fill_(scale)
                module.project.weight.copy_(torch.eye(self.form.hidden_size))
                module.block.attention.out.weight.zero_()
                module.block.mlp.down.weight.zero_()

    def _cascade(self, x: Tensor, attn_mask: AttentionMask) -> list[Tensor]:
        """Each module's states [B, T, D]."""
        states = []
        for module in self.chain:
            x = module(x, attn_mask)
            states.append(x)
        return states

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        x = before(self.trunk(batch))
        for k, states in enumerate(self._cascade(x, causal(self.angles, batch, x))):
            logits = self.words.logits(states[batch.loss_mask(self.first + k)])
            yield Guess(logits, self.first + k, self.fade**k, self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return torch.cat(self._cascade(features, attn_mask), -1)

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        return state.view(len(state), self.depth, -1)
