"""Parts of a transformer that learn: norms, rotary attention with any mask, SwiGLU, a block of them.

The same code trains (plain products and a softmax, which on a CPU run backward several times as fast as the fused
kernel) and, once settled (see `words`), drafts with weights laid out for the machine. Knows nothing of drafts,
distributions or losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.linear import Dense, Linear, fastest, size
from outrider.core.engine.native import training_block
from outrider.core.engine.native.native_pass import NativePass, native_pass
from outrider.core.engine.quantization.quantize import leanest
from outrider.core.engine.rotary import rope_table
from outrider.core.engine.types import Config, Layer, PassLayout
from outrider.core.kernels import native

Rounds = dict[int, list[tuple[Tensor, Tensor]]]  # attention -> the keys and values [B, K, Q, d] of each round


class Matrix(nn.Module):
    """x W^T + b."""

    def __init__(self, columns: int, rows: int, *, bias: bool = False, zero: bool = False) -> None:
        super().__init__()
        weight = torch.zeros(rows, columns) if zero else torch.randn(rows, columns) / math.sqrt(columns)
        self.weight = nn.Parameter(weight)
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None
        self.fast: Linear | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.fast is None:
            return F.linear(x, self.weight, self.bias)
        return self.fast(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)

    @property
    def weight_bytes(self) -> int:
        return size(self.weight, self.bias) if self.fast is None else self.fast.weight_bytes

    def settle(self) -> None:
        """Lay the weights out for this machine, where that pays, for drafting; they can't be trained any more."""
        laid = leanest(Dense(self.weight.detach(), None if self.bias is None else self.bias.detach()))
        if not isinstance(laid, Dense):
            self.fast, self.weight = laid, nn.Parameter(torch.empty(0), requires_grad=False)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467)."""

    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


@dataclass(eq=False)
class AttentionMask:
    """What the attention of one pass shares: rotary angles, who may look at whom, and where keys are kept."""

    cos: Tensor  # [B|1, Q, 1, d]
    sin: Tensor
    mask: Tensor | None  # [B|1, Q, C] bool: may look; None: all may look at all
    store: Tensor | None = None  # [L, B, 2 K, C, d] of a cache, and the places in it; None: only what is fed
    places: PassLayout | None = None
    rounds: Rounds | None = None  # unrolled training: the columns are those of the first round
    context: Sequence[tuple[Tensor, Tensor]] | None = None  # of each layer keys and values [B, K, C, d] before its own
    bound: int = 0  # all positions in `places` are below it
    causal: bool = False  # is the mask but that each token sees itself and those before it?
    added: dict[int, Tensor] = field(default_factory=dict, init=False)

    def bias(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """The mask to be added to scores [B, K, Q G, C]; made once a pass."""
        if self.mask is None:
            return None
        if group not in self.added:
            zero = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self.added[group] = zero.masked_fill_(~self.mask, -math.inf).repeat_interleave(group, 1)[:, None]
        return self.added[group]

    def keep(self, index: int, fresh: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Q, 2 K, d] into a layer of the store -> all that can be seen, [B, K, C, d] each."""
        kv = fresh.shape[2] // 2
        if self.store is None or self.places is None:
            both = fresh.transpose(1, 2)
            return both[:, :kv], both[:, kv:]
        layer, places = self.store[index], self.places
        if places.start is None:
            rows = torch.arange(len(fresh), device=fresh.device)[:, None]
            layer.transpose(1, 2).index_put_((rows, places.slots), fresh)
        else:
            layer[:, :, places.start : places.start + fresh.shape[1]].copy_(fresh.transpose(1, 2))
        seen = layer[:, :, : places.columns]
        return seen[:, :kv], seen[:, kv:]


def each_before(count: int, cos: Tensor, sin: Tensor) -> AttentionMask:
    """Of a text that is learned as it stands: each of its tokens sees itself and those before it."""
    mask = torch.ones(1, count, count, dtype=torch.bool, device=cos.device).tril()
    return AttentionMask(cos, sin, mask, causal=True)


class Angles:
    """Rotary cosines and sines, as many as positions were asked for."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tables = torch.zeros(0), torch.zeros(0)

    def __call__(self, positions: Tensor, furthest: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Positions [B|1, Q], all below `furthest` -> [B|1, Q, 1, d] each."""
        cos, sin = self._tables
        if len(cos) < furthest or cos.dtype != dtype or cos.device != positions.device:
            count = max(2 * furthest, min(self.config.context, 1024))
            cos, sin = self._tables = rope_table(self.config, count, dtype, positions.device)
        where = positions.clamp(0, len(cos) - 1)
        return cos[where][:, :, None], sin[where][:, :, None]


class Attention(nn.Module):
    """Rotary attention with grouped queries. Reads `into` wide states, gives `width` wide ones."""

    def __init__(self, config: Config, *, into: int | None = None, index: int = 0) -> None:
        super().__init__()
        cfg, self.index = config, index
        self.heads, self.kv, self.dim, self.eps = cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.norm_eps
        spread = self.heads * self.dim
        self.qkv = Matrix(into or cfg.hidden_size, spread + 2 * self.kv * self.dim, bias=cfg.attention_bias)
        self.out = Matrix(spread, cfg.hidden_size, bias=cfg.out_bias)
        self.qk_norm = nn.Parameter(torch.ones(self.heads + self.kv, self.dim)) if cfg.qk_norm else None

    def forward(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        """[B, Q, into] -> [B, Q, D]."""
        rows, count = x.shape[:2]
        every = self.qkv(x).view(rows, count, self.heads + 2 * self.kv, self.dim)
        turning = every[:, :, : self.heads + self.kv]
        if self.qk_norm is not None:
            turning = F.rms_norm(turning, (self.dim,), None, self.eps) * self.qk_norm
        turned = turning * attn_mask.cos + turning.roll(self.dim // 2, -1) * attn_mask.sin
        query = turned[:, :, : self.heads].reshape(rows, count, self.kv, -1, self.dim)
        query = query.transpose(1, 2).flatten(2, 3)  # [B, K, Q G, d]
        fresh = torch.cat([turned[:, :, self.heads :], every[:, :, self.heads + self.kv :]], 2).to(query.dtype)
        keys, values = attn_mask.keep(self.index, fresh)
        if attn_mask.context is not None:
            old = attn_mask.context[self.index]
            keys, values = torch.cat([old[0], keys], 2), torch.cat([old[1], values], 2)
        bias = attn_mask.bias(self.heads // self.kv, query.dtype)
        if attn_mask.rounds is not None:
            found = _unrolled(query, attn_mask.rounds.setdefault(self.index, []), keys, values, bias)
        elif torch.is_grad_enabled():
            found = _plain(query, keys, values, bias)
        else:
            found = F.scaled_dot_product_attention(query, keys, values, bias)
        found = found.view(rows, self.kv, count, -1, self.dim).transpose(1, 2).reshape(rows, count, -1)
        result: Tensor = self.out(found)
        return result

    def read(self, x: Tensor, attn_mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Only the keys and values of states [B, Q, into], kept where the attn_mask keeps them: [B, K, C, d] each."""
        rows, count = x.shape[:2]
        every = self.qkv(x).view(rows, count, self.heads + 2 * self.kv, self.dim)[:, :, self.heads :]
        keys, values = every.split([self.kv, self.kv], 2)
        if self.qk_norm is not None:
            keys = F.rms_norm(keys, (self.dim,), None, self.eps) * self.qk_norm[self.heads :]
        keys = keys * attn_mask.cos + keys.roll(self.dim // 2, -1) * attn_mask.sin
        return attn_mask.keep(self.index, torch.cat([keys, values], 2).to(values.dtype))


def _scores(query: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    scores = (query / math.sqrt(query.shape[-1])) @ keys.transpose(-1, -2)
    return scores if bias is None else scores + bias


def _plain(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return _scores(query, keys, bias).softmax(-1).to(values.dtype) @ values


def _unrolled(
    query: Tensor, past: list[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor, bias: Tensor | None
) -> Tensor:
    """Attention of one round of unrolled drafting. Columns are those of the first round, where the teacher's states
    were read; of every later round a query sees but one key: that of the token which its own draft had there."""
    past.append((keys, values))
    first = _scores(query, past[0][0], bias)
    if len(past) == 1:
        return first.softmax(-1).to(values.dtype) @ values
    rows, kv, count, dim = keys.shape
    split = query.view(rows, kv, count, -1, dim) / math.sqrt(dim)
    beside = [
        (_later(k, len(past) - 2 - i)[:, :, :, None], _later(v, len(past) - 2 - i)[:, :, :, None])
        for i, (k, v) in enumerate(past[1:])
    ]
    own = torch.stack([(split * k).sum(-1) for k, _ in beside], -1)  # [B, K, Q, G, rounds - 1]
    weights = torch.cat([first, own.flatten(2, 3)], -1).softmax(-1).to(values.dtype)
    found = weights[..., :count] @ past[0][1]
    shares = weights[..., count:].view(*own.shape)
    drawn = sum((shares[..., i : i + 1] * v for i, (_, v) in enumerate(beside)), torch.zeros_like(split))
    return found + drawn.flatten(2, 3)


def _later(x: Tensor, count: int) -> Tensor:
    """[B, K, Q, d] moved along Q, so that place t holds what stood at t - count."""
    return F.pad(x, (0, 0, count, 0))[:, :, : x.shape[2]] if count else x


class Mlp(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.up_gate = Matrix(config.hidden_size, 2 * config.intermediate_size, bias=config.mlp_bias)
        self.down = Matrix(config.intermediate_size, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        up, gate = self.up_gate(x).chunk(2, -1)
        result: Tensor = self.down(up * F.silu(gate))
        return result


class Block(nn.Module):
    """Attention, then the MLP, each behind its norm and beside the residual stream. Not `normed`: whoever calls norms
    what attention reads."""

    def __init__(self, config: Config, *, into: int | None = None, index: int = 0, normed: bool = True) -> None:
        super().__init__()
        self.config, self._max_position = config, 0
        self.runner: NativePass | None = None
        self.attention_norm = Norm(config.hidden_size, config.norm_eps) if normed else None
        self.attention = Attention(config, into=into, index=index)
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, attn_mask: AttentionMask, read: Tensor | None = None) -> Tensor:
        """[B, Q, D] -> [B, Q, D]; `read` [B, Q, into] is what attention reads instead of the normed stream."""
        if read is None:
            if self.trains_in_kernels(x, attn_mask):
                return self._train_in_kernels(x, attn_mask)
            read = x if self.attention_norm is None else self.attention_norm(x)
        if self.runner is not None and attn_mask.places is not None and attn_mask.context is None:
            return self._run_native(self.runner, x, attn_mask, read)
        x = x + self.attention(read, attn_mask)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result

    def trains_in_kernels(self, x: Tensor, attn_mask: AttentionMask) -> bool:
        """Can the compiled kernels compute this pass, forward and backward?"""
        attention, mlp = self.attention, self.mlp
        matrices = attention.qkv, attention.out, mlp.up_gate, mlp.down
        if self.attention_norm is None or not attn_mask.causal or attn_mask.cos.shape[0] != 1:
            return False
        if any(matrix.bias is not None or matrix.fast is not None for matrix in matrices):
            return False
        return training_block.usable(x, mlp.down.weight.shape[1], attention.dim)

    def _train_in_kernels(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        attention, mlp = self.attention, self.mlp
        assert self.attention_norm is not None
        shape = (attention.heads, attention.kv, attention.dim, attention.eps, self.mlp_norm.eps)
        weights = (
            *(self.attention_norm.weight, attention.qkv.weight, attention.qk_norm, attention.out.weight),
            *(self.mlp_norm.weight, mlp.up_gate.weight, mlp.down.weight),
        )
        return training_block.apply(x, attn_mask.cos[0, :, 0], attn_mask.sin[0, :, 0], shape, weights)

    def _run_native(self, runner: NativePass, x: Tensor, attn_mask: AttentionMask, read: Tensor) -> Tensor:
        assert attn_mask.store is not None and attn_mask.places is not None
        self.ensure_positions(runner, attn_mask.bound)
        states = x.flatten(0, 1).to(torch.float32, copy=True)
        runner.run(
            states, attn_mask.store[self.attention.index, None], attn_mask.places, 0, 1, read.flatten(0, 1).contiguous()
        )
        return states.to(x.dtype).view(x.shape)

    def ensure_positions(self, runner: NativePass, count: int) -> None:
        """Extend the kernels' rotary tables to at least `count` positions."""
        if count > self._max_position:
            self._max_position = max(2 * count, min(self.config.context, 1024))
            cosine, sine = rope_table(self.config, self._max_position, torch.float32, torch.device("cpu"))
            half = self.config.head_dim // 2
            runner.set_angles(cosine[:, :half], sine[:, half:])

    def settle(self) -> None:
        """Have it run in one call where there is code for it, once its matrices are laid out."""
        laid = [one.fast for one in (self.attention.qkv, self.attention.out, self.mlp.up_gate, self.mlp.down)]
        if not all(isinstance(one, native.Tiled) for one in laid):
            return
        norm = self.mlp_norm.weight.detach()  # attention's is never asked for: what it reads is given
        layer = Layer(norm, laid[0], laid[1], norm, laid[2], laid[3], qk_norm=self.attention.qk_norm)  # type: ignore[arg-type]
        self.runner = native_pass(self.config, [layer], norm.dtype)

    @torch.no_grad()
    def copy(self, layer: Layer) -> None:
        """Start from a target's own layer: every part that has the same shape; of a wider input the last columns."""
        attention, mlp = self.attention, self.mlp
        inputs = attention.qkv.weight
        for mine, theirs in (
            (None if self.attention_norm is None else self.attention_norm.weight, layer.attention_norm),
            (self.mlp_norm.weight, layer.mlp_norm),
            (inputs[:, inputs.shape[1] - len(layer.attention_norm) :], layer.qkv.weight),
            (attention.qkv.bias, layer.qkv.bias),
            (attention.out.weight, layer.out.weight),
            (attention.out.bias, layer.out.bias),
            (attention.qk_norm, layer.qk_norm),
            (mlp.up_gate.weight, layer.up_gate.weight),
            (mlp.up_gate.bias, layer.up_gate.bias),
            (mlp.down.weight, layer.down.weight),
            (mlp.down.bias, layer.down.bias),
        ):
            if mine is not None and theirs is not None and mine.shape == theirs.shape:
                mine.copy_(theirs)

    @torch.no_grad()
    def layer(self, dtype: torch.dtype, device: torch.device | str) -> Layer:
        """As a layer of a network, its matrices laid out for the machine."""
        attention, mlp = self.attention, self.mlp
        assert self.attention_norm is not None

        def moved(part: Tensor) -> Tensor:
            return part.detach().to(device, dtype)

        def laid(matrix: Matrix) -> Linear:
            return fastest(Dense(moved(matrix.weight), None if matrix.bias is None else moved(matrix.bias)))

        return Layer(
            attention_norm=moved(self.attention_norm.weight),
            qkv=laid(attention.qkv),
            out=laid(attention.out),
            mlp_norm=moved(self.mlp_norm.weight),
            up_gate=laid(mlp.up_gate),
            down=laid(mlp.down),
            qk_norm=None if attention.qk_norm is None else moved(attention.qk_norm),
        )
