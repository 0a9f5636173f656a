"""Trainable transformer modules: linear layers, norms, rotary attention with any mask, SwiGLU, and a block of them.

The same modules train (with explicit products and softmax, whose backward pass on a CPU is several times as fast as
that of the fused kernel) and, after `shared_embedding.for_inference`, draft with optimized weight layouts. Independent
of drafts, distributions and losses."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.linear import Dense, Linear, fastest, size
from outrider.core.engine.native import training_block
from outrider.core.engine.native.native_pass import NativePass, native_pass
from outrider.core.engine.quantization.quantize import fastest_for_drafting
from outrider.core.engine.rotary import rope_table
from outrider.core.engine.types import Config, Layer, PassLayout
from outrider.core.kernels import native
from outrider.core.kernels.attention import attention, batch_invariant

Rounds = dict[int, list[tuple[Tensor, Tensor]]]  # attention index -> keys and values [B, K, Q, d] of each round


class Matrix(nn.Module):
    """A linear layer, x W^T + b, that can be converted to a fast layout."""

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

    def optimize(self) -> None:
        """Convert the weights to the fastest layout for drafting; the layer cannot be trained afterwards."""
        bias = None if self.bias is None else self.bias.detach()
        fast = fastest_for_drafting(Dense(self.weight.detach(), bias))
        if not isinstance(fast, Dense):
            self.fast, self.weight = fast, nn.Parameter(torch.empty(0), requires_grad=False)


class Norm(nn.Module):
    """RMSNorm (arXiv 1910.07467)."""

    def __init__(self, hidden_size: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


@dataclass(eq=False)
class AttentionMask:
    """Rotary angles, mask and KV store of one pass, shared by its attention layers."""

    cos: Tensor  # [B|1, Q, 1, d]
    sin: Tensor
    mask: Tensor | None  # [B|1, Q, C] bool: true where attended; None: everything is
    store: Tensor | None = None  # [L, B, 2 K, C, d] of a cache; None: attention sees only the tokens of the pass
    layout: PassLayout | None = None  # of the store
    rounds: Rounds | None = None  # unrolled training: keys and values of earlier rounds; columns are the first round's
    context: Sequence[tuple[Tensor, Tensor]] | None = None  # for each layer keys and values [B, K, C, d] to prepend
    bound: int = 0  # all positions in `layout` are below it
    causal: bool = False  # whether the mask is the plain causal one
    queries: Tensor | None = None  # [B, Q] their positions behind `context`, for layers with windows
    additive: dict[int, Tensor] = field(default_factory=dict, init=False)

    def positions(self) -> tuple[Tensor, Tensor]:
        """The positions of queries [B|1, Q] and of keys [B|1, C]. Where no layout has them, queries see all tokens
        before theirs, and token i is in column i, up to the queries' own."""
        layout, mask, own = self.layout, self.mask, self.queries
        if layout is not None and layout.keys is not None:
            return layout.positions, layout.keys
        columns = layout.columns if mask is None and layout is not None else 0 if mask is None else mask.shape[2]
        keys = torch.arange(columns, device=self.cos.device)[None]
        if own is not None:
            return own, torch.cat([keys[:, : columns - own.shape[1]].expand(len(own), -1), own], 1)
        if mask is None:
            return keys[:, -1:], keys
        return (keys if layout is None else mask.sum(2) - 1), keys

    def root(self) -> tuple[Tensor, Tensor]:
        """The position [B|1, 1] of a parallel head's root, which sees all of `context` up to it, and its mask."""
        assert self.context is not None
        columns = self.context[0][0].shape[2]
        mask = torch.ones(1, 1, columns, dtype=torch.bool, device=self.cos.device) if self.mask is None else self.mask
        return mask.sum(2) - 1, mask

    def within(self, window: int | None) -> AttentionMask:
        """The same for a layer that sees the last `window` positions, a query's own included; None: all."""
        if window is None:
            return self
        queries, keys = self.positions()
        near = keys[:, None] > queries[..., None] - window
        return self.narrowed(near if self.mask is None else self.mask & near)

    def narrowed(self, mask: Tensor) -> AttentionMask:
        """The same with another mask."""
        return replace(self, mask=mask, layout=None if self.layout is None else replace(self.layout, mask=mask))

    def bias(self, group: int, dtype: torch.dtype) -> Tensor | None:
        """The mask as an additive bias [B|1, 1, Q G, C] for scores; computed once a pass."""
        if self.mask is None:
            return None
        if group not in self.additive:
            zero = torch.zeros(self.mask.shape, dtype=dtype, device=self.mask.device)
            self.additive[group] = zero.masked_fill_(~self.mask, -math.inf).repeat_interleave(group, 1)[:, None]
        return self.additive[group]

    def write(self, index: int, new: Tensor) -> tuple[Tensor, Tensor]:
        """Write keys and values [B, Q, 2 K, d] to layer `index` of the store; returns all visible keys and values,
        [B, K, C, d] each."""
        kv = new.shape[2] // 2
        if self.store is None or self.layout is None:
            both = new.transpose(1, 2)
            return both[:, :kv], both[:, kv:]
        layer, layout = self.store[index], self.layout
        if layout.start is None:
            rows = torch.arange(len(new), device=new.device)[:, None]
            layer.transpose(1, 2).index_put_((rows, layout.slots), new)
        else:
            layer[:, :, layout.start : layout.start + new.shape[1]].copy_(new.transpose(1, 2))
        visible = layer[:, :, : layout.columns]
        return visible[:, :kv], visible[:, kv:]


def causal_mask(count: int, cos: Tensor, sin: Tensor) -> AttentionMask:
    """The causal mask for training on whole texts of `count` tokens."""
    mask = torch.ones(1, count, count, dtype=torch.bool, device=cos.device).tril()
    return AttentionMask(cos, sin, mask, causal=True)


class Angles:
    """Rotary cosines and sines from tables that grow as needed."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self._tables = torch.zeros(0), torch.zeros(0)

    def __call__(self, positions: Tensor, bound: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines [B|1, Q, 1, d] of positions [B|1, Q], all below `bound`."""
        cos, sin = self.tables(bound, dtype, positions.device)
        index = positions.clamp(0, len(cos) - 1)
        return cos[index][:, :, None], sin[index][:, :, None]

    def tables(self, bound: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
        """The tables [positions, d], of `bound` positions or more."""
        cos = self._tables[0]
        if len(cos) < bound or cos.dtype != dtype or cos.device != device:
            # recorded passes hold the tables, so on a GPU they are made once for all lengths that are common
            count = max(2 * bound, min(self.config.context, 1024 if device.type == "cpu" else 1 << 15))
            self._tables = rope_table(self.config, count, dtype, device)
        return self._tables


class Attention(nn.Module):
    """Rotary grouped-query attention. `into`: the size of its input, if not the hidden size."""

    def __init__(self, config: Config, *, into: int | None = None, index: int = 0) -> None:
        super().__init__()
        cfg, self.index = config, index
        self.heads, self.kv, self.dim, self.eps = cfg.heads, cfg.kv_heads, cfg.head_dim, cfg.norm_eps
        query_size = self.heads * self.dim
        self.qkv = Matrix(into or cfg.hidden_size, query_size + 2 * self.kv * self.dim, bias=cfg.attention_bias)
        self.out = Matrix(query_size, cfg.hidden_size, bias=cfg.out_bias)
        self.qk_norm = nn.Parameter(torch.ones(self.heads + self.kv, self.dim)) if cfg.qk_norm else None

    def forward(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        """[B, Q, into] -> [B, Q, D]."""
        rows, count = x.shape[:2]
        split = self.qkv(x).view(rows, count, self.heads + 2 * self.kv, self.dim)
        normed = split[:, :, : self.heads + self.kv]
        if self.qk_norm is not None:
            normed = F.rms_norm(normed, (self.dim,), None, self.eps) * self.qk_norm
        rotated = normed * attn_mask.cos + normed.roll(self.dim // 2, -1) * attn_mask.sin
        query = rotated[:, :, : self.heads].reshape(rows, count, self.kv, -1, self.dim)
        query = query.transpose(1, 2).flatten(2, 3)  # [B, K, Q G, d]
        new = torch.cat([rotated[:, :, self.heads :], split[:, :, self.heads + self.kv :]], 2).to(query.dtype)
        keys, values = attn_mask.write(self.index, new)
        if attn_mask.context is not None:
            context = attn_mask.context[self.index]
            keys, values = torch.cat([context[0], keys], 2), torch.cat([context[1], values], 2)
        attended = self._attended(query, keys, values, attn_mask)
        attended = attended.view(rows, self.kv, count, -1, self.dim).transpose(1, 2).reshape(rows, count, -1)
        result: Tensor = self.out(attended)
        return result

    def _attended(self, query: Tensor, keys: Tensor, values: Tensor, attn_mask: AttentionMask) -> Tensor:
        rounds, group = attn_mask.rounds, self.heads // self.kv
        if rounds is None and not torch.is_grad_enabled():
            found = batch_invariant(query, keys, values, attn_mask.mask)
            return attention(query, keys, values, attn_mask.bias(group, query.dtype)) if found is None else found
        bias = attn_mask.bias(group, query.dtype)
        if rounds is not None:
            return _unrolled(query, rounds.setdefault(self.index, []), keys, values, bias)
        whole = attn_mask.causal and group == 1 and keys.shape[2] == query.shape[2]
        return _causal(query, keys, values) if whole and _has_fused(query) else _plain(query, keys, values, bias)

    def read(self, x: Tensor, attn_mask: AttentionMask) -> tuple[Tensor, Tensor]:
        """Compute only keys and values of x [B, Q, into] and write them; returns all visible ones, [B, K, C, d]
        each."""
        rows, count = x.shape[:2]
        split = self.qkv(x).view(rows, count, self.heads + 2 * self.kv, self.dim)[:, :, self.heads :]
        keys, values = split.split([self.kv, self.kv], 2)
        if self.qk_norm is not None:
            keys = F.rms_norm(keys, (self.dim,), None, self.eps) * self.qk_norm[self.heads :]
        keys = keys * attn_mask.cos + keys.roll(self.dim // 2, -1) * attn_mask.sin
        return attn_mask.write(self.index, torch.cat([keys, values], 2).to(values.dtype))


def _scores(query: Tensor, keys: Tensor, bias: Tensor | None) -> Tensor:
    scores = (query / math.sqrt(query.shape[-1])) @ keys.transpose(-1, -2)
    return scores if bias is None else scores + bias


def _has_fused(query: Tensor) -> bool:
    return query.is_cuda


def _causal(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Under the causal mask, in the kernel that trains faster on CUDA: it stores no scores."""
    return F.scaled_dot_product_attention(query, keys, values, is_causal=True)


def _plain(query: Tensor, keys: Tensor, values: Tensor, bias: Tensor | None) -> Tensor:
    return _scores(query, keys, bias).softmax(-1).to(values.dtype) @ values


def _unrolled(
    query: Tensor, past: list[tuple[Tensor, Tensor]], keys: Tensor, values: Tensor, bias: Tensor | None
) -> Tensor:
    """Attention of one round of unrolled drafting. Columns are those of the first round, which reads the target's
    states; of each later round a query attends to a single key, that of its own draft's token in that round."""
    past.append((keys, values))
    first = _scores(query, past[0][0], bias)
    if len(past) == 1:
        return first.softmax(-1).to(values.dtype) @ values
    rows, kv, count, dim = keys.shape
    split = query.view(rows, kv, count, -1, dim) / math.sqrt(dim)
    later = [
        (_shift(k, len(past) - 2 - i)[:, :, :, None], _shift(v, len(past) - 2 - i)[:, :, :, None])
        for i, (k, v) in enumerate(past[1:])
    ]
    scores = torch.stack([(split * k).sum(-1) for k, _ in later], -1)  # [B, K, Q, G, rounds - 1]
    weights = torch.cat([first, scores.flatten(2, 3)], -1).softmax(-1).to(values.dtype)
    from_first = weights[..., :count] @ past[0][1]
    later_weights = weights[..., count:].view(*scores.shape)
    from_later = sum((later_weights[..., i : i + 1] * v for i, (_, v) in enumerate(later)), torch.zeros_like(split))
    return from_first + from_later.flatten(2, 3)


def _shift(x: Tensor, count: int) -> Tensor:
    """[B, K, Q, d] shifted along Q by `count`, with zeros first."""
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
    """Attention, then the MLP, each with its norm before it and its residual connection. Without `normed` there is no
    attention norm; the caller norms the input of attention."""

    def __init__(self, config: Config, *, into: int | None = None, index: int = 0, normed: bool = True) -> None:
        super().__init__()
        self.config, self._max_position = config, 0
        self.runner: NativePass | None = None
        self.attention_norm = Norm(config.hidden_size, config.norm_eps) if normed else None
        self.attention = Attention(config, into=into, index=index)
        self.mlp_norm = Norm(config.hidden_size, config.norm_eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, attn_mask: AttentionMask, read: Tensor | None = None) -> Tensor:
        """[B, Q, D] -> [B, Q, D]; `read` [B, Q, into]: attention's input, if not the normed x."""
        if read is None:
            if self.trains_in_kernels(x, attn_mask):
                return self._train_in_kernels(x, attn_mask)
            read = x if self.attention_norm is None else self.attention_norm(x)
        if self.runner is not None and attn_mask.layout is not None and attn_mask.context is None:
            return self._run_native(self.runner, x, attn_mask, read)
        x = x + self.attention(read, attn_mask)
        result: Tensor = x + self.mlp(self.mlp_norm(x))
        return result

    def trains_in_kernels(self, x: Tensor, attn_mask: AttentionMask) -> bool:
        """Whether the compiled kernels can compute this pass, forward and backward."""
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
        assert attn_mask.store is not None and attn_mask.layout is not None
        self.ensure_positions(runner, attn_mask.bound)
        states = x.flatten(0, 1).to(torch.float32, copy=True)
        runner.run(
            states, attn_mask.store[self.attention.index, None], attn_mask.layout, 0, 1, read.flatten(0, 1).contiguous()
        )
        return states.to(x.dtype).view(x.shape)

    def ensure_positions(self, runner: NativePass, count: int) -> None:
        """Extend the kernels' rotary tables to at least `count` positions."""
        if count > self._max_position:
            self._max_position = max(2 * count, min(self.config.context, 1024))
            cosine, sine = rope_table(self.config, self._max_position, torch.float32, torch.device("cpu"))
            half = self.config.head_dim // 2
            runner.set_angles(cosine[:, :half], sine[:, half:])

    def optimize(self) -> None:
        """Run the block in one call of the compiled kernels if all its matrices are tiled."""
        qkv, out = self.attention.qkv.fast, self.attention.out.fast
        up_gate, down = self.mlp.up_gate.fast, self.mlp.down.fast
        if not all(isinstance(linear, native.Tiled) for linear in (qkv, out, up_gate, down)):
            return
        norm = self.mlp_norm.weight.detach()  # also in place of the attention norm, which is not used: `read` is given
        layer = Layer(norm, qkv, out, norm, up_gate, down, qk_norm=self.attention.qk_norm)  # type: ignore[arg-type]
        self.runner = native_pass(self.config, [layer], norm.dtype)

    @torch.no_grad()
    def copy(self, layer: Layer) -> None:
        """Initialise from a target's layer: every weight of the same shape, and the last columns of a wider qkv."""
        attention, mlp = self.attention, self.mlp
        inputs = attention.qkv.weight
        for own, source in (
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
            if own is not None and source is not None and own.shape == source.shape:
                own.copy_(source)

    @torch.no_grad()
    def layer(self, dtype: torch.dtype, device: torch.device | str) -> Layer:
        """The block as a layer of a network, in the fastest weight layout."""
        attention, mlp = self.attention, self.mlp
        assert self.attention_norm is not None

        def moved(part: Tensor) -> Tensor:
            return part.detach().to(device, dtype)

        def linear(matrix: Matrix) -> Linear:
            return fastest(Dense(moved(matrix.weight), None if matrix.bias is None else moved(matrix.bias)))

        return Layer(
            attention_norm=moved(self.attention_norm.weight),
            qkv=linear(attention.qkv),
            out=linear(attention.out),
            mlp_norm=moved(self.mlp_norm.weight),
            up_gate=linear(mlp.up_gate),
            down=linear(mlp.down),
            qk_norm=None if attention.qk_norm is None else moved(attention.qk_norm),
        )
