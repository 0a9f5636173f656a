"""What describes a decoder and one pass through it: its shape, the weights of a layer, the positions of tokens.

Data only; the computation is in outrider.core.engine.network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from outrider.core.engine.linear import Linear
from outrider.core.errors import InvalidOption


@dataclass(frozen=True, kw_only=True)
class Config:
    """The shape of a decoder."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int  # heads of keys and values; each serves heads / kv_heads of the queries
    head_dim: int
    hidden: int  # width within the MLP
    rope_theta: float = 10_000.0
    rope_scaling: tuple[str, Mapping[str, float]] | None = None  # ("linear" | "llama3" | "grid", its numbers)
    norm_eps: float = 1e-6
    tied: bool = True  # the output layer is the embedding
    attention_bias: bool = False  # of queries, keys and values
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    context: int = 2048

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "layers", "heads", "kv_heads", "head_dim", "hidden", "context"):
            if getattr(self, name) < 1:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be 1 or more")
        if self.heads % self.kv_heads:
            raise InvalidOption(f"{self.heads} heads cannot share {self.kv_heads} of keys and values; take a divisor")
        if self.rope_scaling is not None and self.rope_scaling[0] == "grid" and self.head_dim % 4:
            raise InvalidOption(
                f"head_dim is {self.head_dim}; on a grid half of its pairs turn by the row: it must divide by 4"
            )
        if self.head_dim % 2:
            raise InvalidOption(f"head_dim is {self.head_dim}; rotary positions turn pairs, so it must be even")


@dataclass(frozen=True, eq=False)
class Layer:
    """One block: attention, then the MLP, each behind its norm and beside the residual stream."""

    attention_norm: Tensor  # [D]
    qkv: Linear  # D -> (H + 2 K) d: all queries, then keys, then values
    out: Linear  # H d -> D
    mlp_norm: Tensor  # [D]
    up_gate: Linear  # D -> 2 M: what the gate lets through, then the gate
    down: Linear  # M -> D
    attends: bool = True  # a view may leave either half out
    thinks: bool = True
    qk_norm: Tensor | None = None  # [H + K, d]

    def changed(self, change: Callable[[Linear], Linear]) -> Layer:
        """The same with every matrix product exchanged."""
        qkv, out = change(self.qkv), change(self.out)
        return replace(self, qkv=qkv, out=out, up_gate=change(self.up_gate), down=change(self.down))

    @property
    def weight_bytes(self) -> int:
        attention, mlp = (self.qkv, self.out) * self.attends, (self.up_gate, self.down) * self.thinks
        return sum(one.weight_bytes for one in (*attention, *mlp))


@dataclass(frozen=True, eq=False)
class Places:
    """Where the tokens of one pass stand, and what they may look at."""

    positions: Tensor  # [B|1, Q] for the rotary angles
    columns: int  # how much of the store is read
    mask: Tensor | None  # [B|1, Q, columns] bool: may look; None: all may look at all
    start: int | None  # the first slot written, where that is the same for all rows
    slots: Tensor | None = None  # [B, Q] the slots written, where it is not

    def behind(self, count: int) -> Places:
        """The same without the first tokens."""
        return Places(
            self.positions[:, count:],
            self.columns,
            None if self.mask is None else self.mask[:, count:],
            None if self.start is None else self.start + count,
            None if self.slots is None else self.slots[:, count:],
        )
