"""The weights of a decoder-only transformer and its forward pass: rotary positions, grouped-query attention, SwiGLU and
RMSNorm, as in Llama (arXiv 2302.13971) and Qwen.

Independent of drafts, prompts and committed tokens. The code uses few operations per layer, since in a pass of one
token the launch of an operation takes longer than its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.fused_pass import fused_pass
from outrider.core.engine.kv_cache import int8
from outrider.core.engine.kv_cache.page_tables import contiguous
from outrider.core.engine.linear import Dense, Linear, Selected
from outrider.core.engine.native.draft_chain import NativeChain
from outrider.core.engine.native.native_pass import NativePass, native_pass
from outrider.core.engine.rotary import Factors, rope_table
from outrider.core.engine.types import Config, Layer, PassLayout
from outrider.core.errors import Incompatible
from outrider.core.kernels import native
from outrider.core.kernels.attention import attention

if TYPE_CHECKING:
    from outrider.core.engine.captured_passes import Graphs


@dataclass(frozen=True, eq=False)
class _AttentionInputs:
    """Rotary angles, mask and KV views of one pass, computed once for all layers."""

    rows: int
    cos: Tensor  # [B|1, Q, 1, d]
    sin: Tensor
    mask: Tensor | None  # [B|1, 1, Q G, C] additive, for the G query heads of each key/value head
    read: Sequence[Tensor]  # for each layer the keys and values [B, 2 K, C, d]; in 8 bits slots of bytes instead of d
    write: Sequence[Tensor]  # for each layer where new keys and values go: [B, Q, 2 K, d], or with `index` all slots
    index: tuple[Tensor, Tensor | None] | None  # rows and slots to write, if slots differ between rows


class Network:
    """Weights and the forward pass. With 16-bit weights the residual stream is kept in 32 bits."""

    def __init__(self, config: Config, embedding: Tensor, layers: Sequence[Layer], norm: Tensor, head: Linear) -> None:
        self.config, self.embedding, self.layers, self.norm, self.head = config, embedding, layers, norm, head
        self.dtype, self.device = embedding.dtype, embedding.device
        self.selected = head if isinstance(head, Selected) else None  # the tokens that are predicted; None: all
        self.weight_bytes = sum(layer.weight_bytes for layer in layers) + head.weight_bytes
        self.residual_dtype = wide = self.dtype if self.dtype.itemsize > 2 else torch.float32
        # RMSNorm as x / hypot(|x|, sqrt(D eps)) * (sqrt(D) w): equal to x / sqrt(mean x^2 + eps) * w, but cheaper
        root = math.sqrt(config.hidden_size)
        self._norm_floor = torch.tensor([[root * math.sqrt(config.norm_eps)]], dtype=wide, device=self.device)
        self._layer_norms = [(layer.attention_norm.to(wide) * root, layer.mlp_norm.to(wide) * root) for layer in layers]
        self._scaled_norm = norm.to(wide) * root
        self._norm32 = norm.float().contiguous()
        post_norms = ((layer.attention_post_norm, layer.mlp_post_norm) for layer in layers)
        self._post_norms = [[None if norm is None else norm.to(wide) * root for norm in pair] for pair in post_norms]
        self._embedding_scale = float(torch.tensor(config.variant.embedding_scale, dtype=self.dtype))
        self._plain_attention = config.variant.attention_softcap is None and not config.variant.sinks
        # the rotary tables, and those of layers with an attention window; LongRoPE: with the short and the long factors
        self._factors, nothing = Factors(), (torch.zeros(0), torch.zeros(0))
        self._tables = dict.fromkeys((False, True), (nothing, nothing))
        self.before_layer: Callable[[int], None] | None = None  # called before each layer; offload loads weights in it
        self.graphs: Graphs | None = None  # captured passes, if enabled
        self.kept: dict[object, Any] = {}  # what drafters keep of this model between requests
        self._native = native_pass(config, layers, self.dtype)
        if self._native is not None:
            self._native.factors = self._factors
        self.reads_apart = self._native is not None and self._native.reads_apart  # prompts: see NativePass
        self.fused = fused_pass(config, layers, self.dtype, self.device)  # on a GPU, where Triton is

    @cached_property
    def native_chain(self) -> NativeChain | None:
        """Draws a whole chain in one call of the compiled kernels; None where they cannot run this network."""
        if self._native is None or self.before_layer is not None or self.embedding.dtype != torch.bfloat16:
            return None
        return NativeChain(self._native, self.embedding.contiguous(), self._norm32, self.head)

    def map_linears(
        self,
        change: Callable[[Linear], Linear],
        layers: Sequence[Layer] | None = None,
        head: Callable[[Linear], Linear] | None = None,
    ) -> Network:
        """A copy with `change` applied to every linear layer (`head` to the output layer, if given) of these layers, or
        of the network's own."""
        if self.before_layer is not None:
            raise Incompatible(
                "this model's layers are offloaded, so they can be neither quantized nor skipped; draft with another "
                "model, or load it without `offload`"
            )
        changed = [layer.map_linears(change) for layer in (self.layers if layers is None else layers)]
        return Network(self.config, self.embedding, changed, self.norm, (head or change)(self.head))

    def conditioning_of(self, row: int) -> Tensor | None:
        """[T, D] added to a row's embeddings, by position; None: nothing."""
        return None

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, Q] -> [B Q, D]; invalid ids are clamped. The embedding may have more rows than the vocabulary:
        conditions, which are read but never predicted."""
        states = F.embedding(ids.flatten().clamp(0, len(self.embedding) - 1), self.embedding)
        states = states.to(self.residual_dtype)
        return states if self._embedding_scale == 1 else states * self._embedding_scale

    def logits(self, x: Tensor) -> Tensor:
        """Normed states [..., D] -> [..., V]."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.config.vocabulary)
        flat, selected = x.flatten(0, -2), self.selected
        rows, count = (self.head, self.config.vocabulary) if selected is None else (selected.rows, len(selected.kept))
        if self.native_chain is not None:
            rows = self.native_chain.head  # in tiles, padded to whole ones
        logits = rows.product(flat, torch.float32)[:, :count] if isinstance(rows, native.Tiled) else rows(flat)
        if (cap := self.config.variant.logit_softcap) is not None:
            logits = cap * torch.tanh(logits / cap)
        return (logits if selected is None else selected.spread(logits)).view(*x.shape[:-1], self.config.vocabulary)

    def ensure_positions(self, count: int, long: bool = False) -> None:
        """Extend the rotary tables to at least `count` positions. `long`: this thread's passes use LongRoPE's long
        factors from now on."""
        with nullcontext() if self.graphs is None else self.graphs.pool.lock:  # not while a pass reads them
            self._factors.long = long
            if len(self._angles[0]) < count:
                # recorded passes hold the tables, so on a GPU they are made once for all lengths that are common
                usual = 4096 if self.device.type == "cpu" else 1 << 15
                self._extend(max(2 * count, min(self.config.context, usual)), long)

    def _extend(self, size: int, long: bool) -> None:
        theta = self.config.variant.local_rope_theta
        local = None if theta is None else replace(self.config, rope_theta=theta, rope_scaling=None)
        if self._native is not None:
            half = self.config.head_dim // 2
            cosine, sine = rope_table(self.config, size, torch.float32, self.device, long=long)
            self._native.set_angles(cosine[:, :half], sine[:, half:])
        angles = rope_table(self.config, size, self.dtype, self.device, long=long)
        self._tables[long] = angles, angles if local is None else rope_table(local, size, self.dtype, self.device)

    @property
    def _angles(self) -> tuple[Tensor, Tensor]:
        return self._tables[self._factors.long][0]

    @property
    def _local_angles(self) -> tuple[Tensor, Tensor]:
        return self._tables[self._factors.long][1]

    @property
    def angles(self) -> tuple[Tensor, ...]:
        """The tables of cosines and sines, [positions, d] each, and those of layers with an attention window."""
        return *self._angles, *self._local_angles

    def _window(self, index: int) -> int | None:
        """How many keys a query of layer `index` attends to; None: all."""
        windows = self.config.variant.windows
        return windows[index] if windows else None

    def _rms_norm(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """RMSNorm of x [N, D] into `out`; `weight` is scaled by sqrt(D)."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x / torch.hypot(length, self._norm_floor), weight, out=out)

    def run(
        self,
        x: Tensor,
        store: Tensor,
        layout: PassLayout,
        taps: dict[str, list[Tensor]] | None = None,
        span: tuple[int, int] | None = None,
    ) -> Tensor:
        """Run all layers, or those in `span`, on states [B Q, D]. Writes keys and values to the store [L, B, 2 K, C, d]
        (see also kv_cache.int8 and kv_cache.page_tables) and appends the states at each key of `taps` to its list."""
        count = len(x) // (rows := layout.size(store)[0])
        if not count:
            for states in (taps or {}).values():
                states.append(x.view(rows, 0, self.config.hidden_size).to(self.dtype))
            return x
        if layout.table is not None and not self.reads_lengths(store.dtype):
            with contiguous(store, layout, count) as copied:
                return Network.run(self, x, *copied, taps, span)
        if taps and "embedding" in taps:
            taps["embedding"].append(x.view(rows, count, -1).to(self.dtype))
        x, span = x.clone(), span or (0, len(self.layers))
        if self._native is not None:
            return self._run_native(self._native, x, store, layout, taps, span)
        if self.fused is not None and self.reads_lengths(store.dtype):
            return self.fused.run(x, store, layout, self._angles, taps, span)
        inputs = self._attention_inputs(store, layout, count)
        local: dict[int | None, _AttentionInputs] = {None: inputs}
        buffer = torch.empty(x.shape, dtype=self.dtype, device=self.device)
        for index in range(*span):
            layer, norms, post_norms = self.layers[index], self._layer_norms[index], self._post_norms[index]
            if self.before_layer is not None:
                self.before_layer(index)
            if layer.use_attention:
                qkv = layer.qkv(self._rms_norm(x, norms[0], buffer))
                if (window := self._window(index)) not in local:
                    local[window] = self._windowed(inputs, layout, window)
                x += self._post_norm(layer.out(self._attend(layer, qkv, index, local[window])), post_norms[0])
            if layer.use_mlp:
                x += self._post_norm(
                    self._mlp(layer, self._rms_norm(x, norms[1], buffer), layout.slots is not None), post_norms[1]
                )
            if taps and (tap := f"layer.{index}") in taps:
                taps[tap].append(x.view(rows, count, -1).to(self.dtype, copy=True))
        return x

    def reads_lengths(self, dtype: torch.dtype) -> bool:
        """Whether passes over a store of this type read the rows' lengths on the device: all of it may be given."""
        return self.fused is not None and self.before_layer is None and dtype == self.dtype

    def _post_norm(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """RMSNorm of a sublayer's output [N, D], if the layer has one; `weight` is scaled by sqrt(D)."""
        if weight is None:
            return x
        x = x.to(self.residual_dtype)
        return x / torch.hypot(torch.linalg.vector_norm(x, dim=-1, keepdim=True), self._norm_floor) * weight

    def _mlp(self, layer: Layer, x: Tensor, captured: bool) -> Tensor:
        """The MLP's output of normed states [N, D]. `captured`: the pass may be, or the host must not wait in it."""
        if layer.experts is not None:
            return layer.experts(x, fixed=captured and x.device.type != "cpu")
        up_gate, middle = layer.up_gate(x), self.config.intermediate_size
        if self.config.variant.activation == "gelu":
            return layer.down(F.gelu(up_gate[:, middle:], approximate="tanh").mul_(up_gate[:, :middle]))
        return layer.down(F.glu(up_gate, -1).mul_(up_gate[:, middle:]))  # up sigmoid(gate) gate

    def _run_native(
        self,
        runner: NativePass,
        x: Tensor,
        store: Tensor,
        layout: PassLayout,
        taps: dict[str, list[Tensor]] | None,
        span: tuple[int, int],
    ) -> Tensor:
        """`run` in one call of the compiled kernels, or in one per layer if layers are offloaded."""
        tapped = [index for index in range(*span) if taps and f"layer.{index}" in taps]
        recorded = {index: torch.empty(x.shape, dtype=torch.bfloat16) for index in tapped}
        if self.before_layer is None:
            runner.run(x, store, layout, *span, taps=recorded)
        else:
            for index in range(*span):
                self.before_layer(index)
                runner.run(x, store, layout, index, index + 1, taps=recorded)
        for index, states in recorded.items():
            assert taps is not None
            taps[f"layer.{index}"].append(states.view(store.shape[1], -1, self.config.hidden_size).to(self.dtype))
        return x

    def final_norm(self, x: Tensor, rows: int, taps: dict[str, list[Tensor]] | None = None) -> Tensor:
        """The last layer's states [B Q, D] -> normed states [B, Q, D], which the output layer reads; the tap "last"."""
        if self._native is not None and x.dtype == torch.float32:
            states = self._native.rms_norm(x.contiguous(), self._norm32)
        else:
            out = torch.empty(x.shape, dtype=self.dtype, device=self.device)
            states = self._rms_norm(x, self._scaled_norm, out)
        states = states.view(rows, len(x) // rows, self.config.hidden_size)
        if taps and "last" in taps and len(x):
            taps["last"].append(states)
        return states

    def _attention_inputs(self, store: Tensor, layout: PassLayout, count: int) -> _AttentionInputs:
        positions = layout.positions.clamp(0, len(self._angles[0]) - 1)
        cos, sin = (table[positions][:, :, None] for table in self._angles)
        mask, read = None if layout.mask is None else self._additive(layout.mask), store[:, :, :, : layout.columns]
        if layout.start is None:
            write = store.transpose(2, 3)  # [L, B, C, 2 K, d]
            index = torch.arange(store.shape[1], device=store.device)[:, None], layout.slots
        else:
            write, index = store[:, :, :, layout.start : layout.start + count].transpose(2, 3), None
        return _AttentionInputs(store.shape[1], cos, sin, mask, read.unbind(), write.unbind(), index)

    def _additive(self, mask: Tensor) -> Tensor:
        """A mask [B|1, Q, C], true where attended -> additive [B|1, 1, Q G, C] for the query heads of a KV head."""
        zero = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        group = self.config.heads // self.config.kv_heads
        return zero.masked_fill_(~mask, -math.inf).repeat_interleave(group, 1)[:, None]

    def _windowed(self, inputs: _AttentionInputs, layout: PassLayout, window: int | None) -> _AttentionInputs:
        """The inputs of layers in which a query attends to the last `window` positions only, its own included. Keys
        that fell out of the window stay in the store and are masked, since a tree's nodes and rewinds need them."""
        if self._local_angles is not self._angles:
            positions = layout.positions.clamp(0, len(self._angles[0]) - 1)
            cos, sin = (table[positions][:, :, None] for table in self._local_angles)
            inputs = replace(inputs, cos=cos, sin=sin)
        if window is None or layout.columns <= window:
            return inputs
        keys = torch.arange(layout.columns, device=self.device)[None] if layout.keys is None else layout.keys
        near = layout.positions[:, :, None] - keys[:, None] < window
        return replace(inputs, mask=self._additive(near if layout.mask is None else near & layout.mask))

    def queries(self, x: Tensor, index: int, positions: Tensor) -> Tensor:
        """The rotated queries [B, H, d] of layer `index` for one token per row, from its input states x [B, D]."""
        layer, cfg = self.layers[index], self.config
        buffer = torch.empty(x.shape, dtype=self.dtype, device=self.device)
        flat = layer.qkv(self._rms_norm(x, self._layer_norms[index][0], buffer))[:, : cfg.heads * cfg.head_dim]
        queries = flat.view(len(x), cfg.heads, cfg.head_dim)
        if layer.qk_norm is not None:
            queries = F.rms_norm(queries, (cfg.head_dim,), None, cfg.norm_eps) * layer.qk_norm[: cfg.heads]
        tables = self._angles if self._window(index) is None else self._local_angles
        cos, sin = (table[positions.clamp(0, len(table) - 1)] for table in tables)  # [B, 1, d]
        return queries * cos + queries.roll(cfg.head_dim // 2, -1) * sin

    def _attend(self, layer: Layer, qkv: Tensor, index: int, inputs: _AttentionInputs) -> Tensor:
        """Queries, keys and values [B Q, (H + 2 K) d] -> attention output [B Q, H d]; writes keys and values."""
        cfg, rows = self.config, inputs.rows
        heads, kv, dim, count = cfg.heads, cfg.kv_heads, cfg.head_dim, len(qkv) // inputs.rows
        split = qkv.view(rows, count, heads + 2 * kv, dim)
        rotated = normed = split[:, :, : heads + kv]
        if layer.qk_norm is not None:
            normed = F.rms_norm(normed, (dim,), None, cfg.norm_eps) * layer.qk_norm
        torch.addcmul(normed * inputs.cos, normed.roll(dim // 2, -1), inputs.sin, out=rotated)
        new, past = split[:, :, heads:], inputs.read[index]
        is_int8 = past.dtype == torch.int8
        if is_int8:
            new = int8.pack(new)
        if inputs.index is None:
            inputs.write[index].copy_(new)
        else:
            inputs.write[index].index_put_(inputs.index, new)
        if is_int8:
            past = int8.unpack(past, dim, self.dtype)
        key, value = past[:, :kv], past[:, kv:]
        if count == 1:
            query = split[:, 0, :heads].view(rows, kv, heads // kv, dim)
            return self._softmax_attention(layer, query, key, value, inputs.mask).reshape(rows, heads * dim)
        query = split[:, :, :heads].view(rows, count, kv, -1, dim).transpose(1, 2).reshape(rows, kv, -1, dim)
        out = self._softmax_attention(layer, query, key, value, inputs.mask)  # [B, K, Q G, d]
        return out.view(rows, kv, count, -1, dim).transpose(1, 2).reshape(rows * count, heads * dim)

    def _softmax_attention(
        self, layer: Layer, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> Tensor:
        """Queries [B, K, Q G, d], keys and values [B, K, C, d] -> [B, K, Q G, d]."""
        variant = self.config.variant
        if self._plain_attention:
            return attention(query, key, value, mask, variant.attention_scale)
        scale = variant.attention_scale or 1 / math.sqrt(self.config.head_dim)
        scores = (query @ key.transpose(2, 3)).float() * scale
        if (cap := variant.attention_softcap) is not None:
            scores = cap * torch.tanh(scores / cap)
        if mask is not None:
            scores = scores + mask
        if layer.sinks is not None:
            count, kv = scores.shape[2] * self.config.kv_heads // self.config.heads, self.config.kv_heads
            sinks = layer.sinks.view(1, kv, 1, -1).expand(len(scores), -1, count, -1).reshape(len(scores), kv, -1, 1)
            return torch.cat([scores, sinks], -1).softmax(-1)[..., :-1].to(value.dtype) @ value
        return scores.softmax(-1).to(value.dtype) @ value


def random_network(
    config: Config,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gain: float = 4.0,
) -> Network:
    """Seeded random weights, the same in every precision. Logits have a standard deviation of about `gain`, so that
    distributions are neither flat nor certain and still depend on early tokens."""
    generator = torch.Generator().manual_seed(seed)
    cfg = config

    def draw(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        weight = torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))
        return weight.to(device, dtype)

    def dense(rows: int, columns: int, bias: bool, scale: float = 1.0) -> Dense:
        weight = draw(rows, columns, scale)
        return Dense(weight, draw(1, rows, math.sqrt(rows) * 0.3)[0] if bias else None)

    def norm(*shape: int) -> Tensor:
        return (1 + 0.1 * torch.randn(*shape, generator=generator)).to(device, dtype)

    query_size = cfg.heads * cfg.head_dim
    layers = [
        Layer(
            attention_norm=norm(cfg.hidden_size),
            qkv=dense(query_size + 2 * cfg.kv_heads * cfg.head_dim, cfg.hidden_size, cfg.attention_bias, 1.5),
            out=dense(cfg.hidden_size, query_size, cfg.out_bias, 1.5),
            mlp_norm=norm(cfg.hidden_size),
            up_gate=dense(2 * cfg.intermediate_size, cfg.hidden_size, cfg.mlp_bias, 1.5),
            down=dense(cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias),
            qk_norm=norm(cfg.heads + cfg.kv_heads, cfg.head_dim) * 1.5 if cfg.qk_norm else None,
        )
        for _ in range(cfg.layers)
    ]
    embedding = draw(cfg.vocabulary, cfg.hidden_size, gain)
    head = embedding if cfg.tied else draw(cfg.vocabulary, cfg.hidden_size, gain)
    # random signs in the last norm: otherwise a tied output layer repeats the last token
    signs = torch.randint(0, 2, (cfg.hidden_size,), generator=generator) * 2 - 1
    return Network(cfg, embedding, layers, norm(cfg.hidden_size) * signs.to(device, dtype), Dense(head))
