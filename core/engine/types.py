"""Data classes of the decoder: its configuration, the weights of a layer, the layout of one pass.

Data only; the computation is in outrider.core.engine.network.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from outrider.core.engine.experts import Experts, Mixture
from outrider.core.engine.linear import Linear
from outrider.core.errors import InvalidOption


@dataclass(frozen=True, kw_only=True)
class Variant:
    """How a decoder's layers differ from Llama's. The compiled CPU kernels compute the default only."""

    windows: tuple[int | None, ...] = ()  # for each layer how many keys a query attends to; None or empty: all
    local_rope_theta: float | None = None  # the rotary base of layers with a window, unscaled; None: the same as others
    activation: Literal["silu", "gelu"] = "silu"  # of the gate; gelu in the tanh approximation
    embedding_scale: float = 1.0
    attention_scale: float | None = None  # of the scores; None: 1 / sqrt(head size)
    attention_softcap: float | None = None  # scores become cap tanh(score / cap)
    logit_softcap: float | None = None
    post_norms: bool = False  # norms after attention and MLP too
    sinks: bool = False  # each head has a learned score that takes weight from its keys (arXiv 2309.17453)
    mixture: Mixture | None = None


@dataclass(frozen=True, kw_only=True)
class Config:
    """The architecture of a decoder."""

    vocabulary: int
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int  # key/value heads; each serves heads / kv_heads query heads
    head_dim: int
    intermediate_size: int  # of the MLP
    rope_theta: float = 10_000.0
    rope_scaling: tuple[str, Mapping[str, Any]] | None = None  # a kind of rotary.SCALINGS or "grid"; its parameters
    rotary_dim: int | None = None  # how many dimensions of a head are rotated; None: all
    norm_eps: float = 1e-6
    tied: bool = True  # the output layer shares the embedding's weights
    attention_bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    context: int = 2048
    variant: Variant = Variant()
    architecture: str = "llama"  # the row of architectures.ARCHITECTURES by which a checkpoint's tensors are named

    @property
    def like_llama(self) -> bool:
        """Whether layers are built as Llama's, so that the compiled kernels and trainable blocks compute the same."""
        return self.variant == Variant()

    @property
    def parameters(self) -> int:
        """The number of weights, without norms, biases and routers."""
        mixture, width = self.variant.mixture, self.hidden_size
        attention = width * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        dense = 3 * width * self.intermediate_size
        total = self.vocabulary * width * (1 if self.tied else 2) + self.layers * attention
        if mixture is None:
            return total + self.layers * dense
        sparse = sum(mixture.layers)
        experts = 3 * width * mixture.intermediate_size * mixture.experts
        return total + sparse * experts + (self.layers - sparse) * dense

    @property
    def original_context(self) -> int | None:
        """The length beyond which other rotary factors apply (LongRoPE); None: the same factors at all lengths."""
        if self.rope_scaling is None or self.rope_scaling[0] != "longrope":
            return None
        original = int(self.rope_scaling[1]["original_max_position_embeddings"])
        return original if original < self.context else None

    def __post_init__(self) -> None:
        counts = (
            "vocabulary",
            "hidden_size",
            "layers",
            "heads",
            "kv_heads",
            "head_dim",
            "intermediate_size",
            "context",
        )
        for name in counts:
            if not isinstance(getattr(self, name), int) or getattr(self, name) < 1:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be a whole number of 1 or more")
        for name in ("rope_theta", "norm_eps"):
            if not isinstance(getattr(self, name), int | float) or not 0 < getattr(self, name) < math.inf:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be a number above 0")
        if self.heads % self.kv_heads:
            raise InvalidOption(f"kv_heads is {self.kv_heads}; it must divide heads, which is {self.heads}")
        if self.rope_scaling is not None and self.rope_scaling[0] == "grid" and self.head_dim % 4:
            raise InvalidOption(f"head_dim is {self.head_dim}; rotary positions on a grid need a multiple of 4")
        if self.rotary_dim is not None and (self.rotary_dim % 2 or not 0 < self.rotary_dim <= self.head_dim):
            raise InvalidOption(f"rotary_dim is {self.rotary_dim}; it must be even and at most {self.head_dim}")
        if self.head_dim % 2:
            raise InvalidOption(f"head_dim is {self.head_dim}; rotary positions rotate pairs, so it must be even")


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: attention, then the MLP, each with its norm before it and its residual connection."""

    attention_norm: Tensor  # [D]
    qkv: Linear  # D -> (H + 2 K) d: all queries, then keys, then values
    out: Linear  # H d -> D
    mlp_norm: Tensor  # [D]
    up_gate: Linear  # D -> 2 M: up, then gate; unused and empty, as is `down`, if there are experts
    down: Linear  # M -> D
    use_attention: bool = True  # a view may skip either sublayer
    use_mlp: bool = True
    qk_norm: Tensor | None = None  # [H + K, d]
    attention_post_norm: Tensor | None = None  # [D] of the attention's output, before it is added
    mlp_post_norm: Tensor | None = None
    sinks: Tensor | None = None  # [H] in 32 bits
    experts: Experts | None = None  # in place of the MLP

    def map_linears(self, change: Callable[[Linear], Linear]) -> Layer:
        """A copy with `change` applied to every linear layer but the routers of experts."""
        qkv, out = change(self.qkv), change(self.out)
        if self.experts is not None:
            return replace(self, qkv=qkv, out=out, experts=self.experts.map_linears(change))
        return replace(self, qkv=qkv, out=out, up_gate=change(self.up_gate), down=change(self.down))

    @property
    def linears(self) -> list[Linear]:
        """The linear layers, in the order in which `map_linears` changes them."""
        mlp = [self.up_gate, self.down] if self.experts is None else self.experts.linears
        return [self.qkv, self.out, *mlp]

    @property
    def weight_bytes(self) -> int:
        """Of the sublayers in use; of experts, those that one token reads."""
        attention, mlp = (self.qkv, self.out) * self.use_attention, (self.up_gate, self.down) * self.use_mlp
        experts = self.experts.weight_bytes if self.experts is not None and self.use_mlp else 0
        return sum(linear.weight_bytes for linear in (*attention, *mlp)) + experts


@dataclass(frozen=True, eq=False)
class PassLayout:
    """Positions, attention mask and cache slots of the tokens of one pass."""

    positions: Tensor  # [B|1, Q] for the rotary angles
    columns: int  # slots of the KV store that are read
    mask: Tensor | None  # [B|1, Q, columns] bool: true where attended; None: everything is
    start: int | None  # the first slot written, if it is the same in all rows
    slots: Tensor | None = None  # [B, Q] the slots written, if they differ between rows
    keys: Tensor | None = None  # [B|1, columns] the positions of the slots, for windows; None: slot i has position i
    # [B] where attention reads them: a row's entries are attended to, and the mask [B, Q, T] is that of the slots after
    entries: Tensor | None = None
    table: Tensor | None = None  # [B, N] the pages of each row, if the store [L, P, 2 K, PAGE, d] is of pages
    live: Tensor | None = None  # [B, Q] bool: of other tokens nothing is read, and a pass may skip them; None: all
    reading: bool = False  # whether these are tokens of a prompt, of which no guess is judged

    def size(self, store: Tensor) -> tuple[int, int]:
        """The number of rows, and of slots in each."""
        if self.table is None:
            return store.shape[1], store.shape[3]
        return len(self.table), self.table.shape[1] * store.shape[3]

    def skip(self, count: int) -> PassLayout:
        """The layout without the first `count` tokens."""
        return PassLayout(
            self.positions[:, count:],
            self.columns,
            None if self.mask is None else self.mask[:, count:],
            None if self.start is None else self.start + count,
            None if self.slots is None else self.slots[:, count:],
            self.keys,
            self.entries,
            self.table,
            None if self.live is None else self.live[:, count:],
        )
