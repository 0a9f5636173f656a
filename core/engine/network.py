"""A decoder-only transformer as plain tensors, and one pass through it: rotary positions, grouped queries, SwiGLU,
RMSNorm (the family of Llama, arXiv 2302.13971, and Qwen).

Knows weights and where in a store keys and values go; nothing of drafts, prompts or what is committed. Written for few
operations a layer: at one token a pass, calling an operation costs as much as many of them compute.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.engine.cuda_graphs import (
    CudaRecorder,
    GraphPool,
    Inputs,
    Recorder,
    graphs_enabled,
    separate_recorder,
)
from outrider.core.engine.kv_cache import int8
from outrider.core.engine.linear import Dense, Linear
from outrider.core.engine.native.draft_chain import Chains
from outrider.core.engine.native.native_pass import Passes, passes
from outrider.core.engine.rotary import rope_table
from outrider.core.engine.types import Config, Layer, PassLayout
from outrider.core.errors import Incompatible
from outrider.core.kernels import native

_LOGITS = 1 << 23  # up to so many are computed within the captured pass
_VIEWS = 8  # of a network whose recordings are kept
PassResult = tuple[Tensor, Tensor | None, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class _Masks:
    """What the attention of every layer shares in one pass, and where each finds its own."""

    rows: int
    cos: Tensor  # [B|1, Q, 1, d]
    sin: Tensor
    mask: Tensor | None  # [B|1, 1, Q G, C] to be added, for G queries that share a head of keys
    past: Sequence[Tensor]  # [B, 2 K, C, d] of each layer, keys and values; in 8 bits slots of bytes instead of d
    into: Sequence[Tensor]  # [B, Q, 2 K, d] where each layer's keys and values go
    at: tuple[Tensor, Tensor | None] | None  # ... or which rows and slots of it, where rows differ


class Network:
    """Weights, and one pass through them. The residual stream is kept in 32 bits where weights have 16."""

    def __init__(self, config: Config, embedding: Tensor, layers: Sequence[Layer], norm: Tensor, head: Linear) -> None:
        self.config, self.embedding, self.layers, self.norm, self.head = config, embedding, layers, norm, head
        self.dtype, self.device = embedding.dtype, embedding.device
        self.weight_bytes = sum(layer.weight_bytes for layer in layers) + head.weight_bytes
        self.wide = self.dtype if self.dtype.itemsize > 2 else torch.float32
        # x / sqrt(mean x^2 + eps) w = x / hypot(|x|, sqrt(D eps)) (sqrt(D) w), in fewer and cheaper operations
        root = math.sqrt(config.hidden_size)
        self._floor = torch.tensor([[root * math.sqrt(config.norm_eps)]], dtype=self.wide, device=self.device)
        self._norms = [
            (layer.attention_norm.to(self.wide) * root, layer.mlp_norm.to(self.wide) * root) for layer in layers
        ]
        self._norm = norm.to(self.wide) * root
        self._last = norm.float().contiguous()
        self._angles = torch.zeros(0), torch.zeros(0)
        self.arrive: Callable[[int], None] | None = None  # called ahead of each layer, where weights come and go
        self.graphs: Graphs | None = None  # passes captured by shape, where that was asked for
        self._passes = passes(config, layers, self.dtype)

    @cached_property
    def chains(self) -> Chains | None:
        """Whole chains in one call, where passes are our code's and the layers are here; else None."""
        if self._passes is None or self.arrive is not None or self.embedding.dtype != torch.bfloat16:
            return None
        return Chains(self._passes, self.embedding.contiguous(), self._last, self.head)

    def replaced(
        self,
        change: Callable[[Linear], Linear],
        layers: Sequence[Layer] | None = None,
        head: Callable[[Linear], Linear] | None = None,
    ) -> Network:
        """The same network with every matrix product exchanged (the output layer's by `head`, where that differs), and
        perhaps other layers."""
        if self.arrive is not None:
            raise Incompatible(
                "this model's layers are streamed, and can't be seen cheaper or in other bits; draft with another "
                "model, or load it without `offload`"
            )
        changed = [layer.changed(change) for layer in (self.layers if layers is None else layers)]
        return Network(self.config, self.embedding, changed, self.norm, (head or change)(self.head))

    def told_to(self, row: int) -> Tensor | None:
        """[T, D] what is added to what a row reads, by position; None: nothing."""
        return None

    def embed(self, ids: Tensor) -> Tensor:
        """Token ids [B, Q], impossible ones included, -> [B Q, D]. There may be more to read than can be said:
        conditions, whose rows stand behind the vocabulary's."""
        states = F.embedding(ids.flatten().clamp(0, len(self.embedding) - 1), self.embedding)
        return states.to(self.wide)

    def logits(self, x: Tensor) -> Tensor:
        """Normed states [..., D] -> [..., V]."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.config.vocabulary)
        flat = x.flatten(0, -2)
        found = self.head.product(flat, torch.float32) if isinstance(self.head, native.Tiled) else self.head(flat)
        return found.view(*x.shape[:-1], self.config.vocabulary)

    def reach(self, positions: int) -> None:
        """Make the tables of angles long enough for this many positions."""
        if len(self._angles[0]) < positions:
            size = max(2 * positions, min(self.config.context, 4096))
            self._angles = rope_table(self.config, size, self.dtype, self.device)
            if self._passes is not None:
                half = self.config.head_dim // 2
                cosine, sine = rope_table(self.config, size, torch.float32, self.device)
                self._passes.reach(cosine[:, :half], sine[:, half:])

    @property
    def angles(self) -> tuple[Tensor, Tensor]:
        """The tables of cosines and sines, [positions, d] each."""
        return self._angles

    def normed(self, x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
        """RMSNorm of x [N, D] into `out`."""
        length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        return torch.mul(x / torch.hypot(length, self._floor), weight, out=out)

    def run(
        self,
        x: Tensor,
        store: Tensor,
        places: PassLayout,
        taps: dict[str, list[Tensor]] | None = None,
        span: tuple[int, int] | None = None,
    ) -> Tensor:
        """States [B Q, D] of embedded tokens -> states [B Q, D] behind the last layer, or behind those in `span`;
        writes keys and values into the store [L, B, 2 K, C, d] (in 8 bits: slots, see eightbit), and at each tap asked
        for appends what flows there."""
        rows, count = store.shape[1], len(x) // store.shape[1]
        if not count:
            for states in (taps or {}).values():
                states.append(x.view(rows, 0, self.config.hidden_size).to(self.dtype))
            return x
        if taps and "embedding" in taps:
            taps["embedding"].append(x.view(rows, count, -1).to(self.dtype))
        x = x.clone()
        span = span or (0, len(self.layers))
        if self._passes is not None:
            return self._run_native(self._passes, x, store, places, taps, span)
        sights = self._sights(store, places, count)
        buffer = torch.empty(x.shape, dtype=self.dtype, device=self.device)
        hidden = self.config.intermediate_size
        for index in range(*span):
            layer, norms = self.layers[index], self._norms[index]
            if self.arrive is not None:
                self.arrive(index)
            if layer.use_attention:
                every = layer.qkv(self.normed(x, norms[0], buffer))
                x += layer.out(self.attend(layer, every, index, sights))
            if layer.use_mlp:
                both = layer.up_gate(self.normed(x, norms[1], buffer))
                x += layer.down(F.glu(both, -1).mul_(both[:, hidden:]))  # up sigmoid(gate) gate
            if taps and (tap := f"layer.{index}") in taps:
                taps[tap].append(x.view(rows, count, -1).to(self.dtype, copy=True))
        return x

    def _run_native(
        self,
        passes: Passes,
        x: Tensor,
        store: Tensor,
        places: PassLayout,
        taps: dict[str, list[Tensor]] | None,
        span: tuple[int, int],
    ) -> Tensor:
        """The same in one call, or where layers have to arrive first, in one for each."""
        tapped = [index for index in range(*span) if taps and f"layer.{index}" in taps]
        noted = {index: torch.empty(x.shape, dtype=torch.bfloat16) for index in tapped}
        if self.arrive is None:
            passes.run(x, store, places, *span, taps=noted)
        else:
            for index in range(*span):
                self.arrive(index)
                passes.run(x, store, places, index, index + 1, taps=noted)
        for index, states in noted.items():
            assert taps is not None
            taps[f"layer.{index}"].append(states.view(store.shape[1], -1, self.config.hidden_size).to(self.dtype))
        return x

    def finish(self, x: Tensor, rows: int, taps: dict[str, list[Tensor]] | None = None) -> Tensor:
        """States behind the last layer -> normed [B, Q, D], what the output layer reads; the tap "last"."""
        if self._passes is not None and x.dtype == torch.float32:
            states = self._passes.normed(x.contiguous(), self._last)
        else:
            states = self.normed(x, self._norm, torch.empty(x.shape, dtype=self.dtype, device=self.device))
        states = states.view(rows, len(x) // rows, self.config.hidden_size)
        if taps and "last" in taps and len(x):
            taps["last"].append(states)
        return states

    def _sights(self, store: Tensor, places: PassLayout, count: int) -> _Masks:
        """All that the attention of every layer shares, worked out once a pass."""
        group = self.config.heads // self.config.kv_heads
        where = places.positions.clamp(0, len(self._angles[0]) - 1)
        cos, sin = (table[where][:, :, None] for table in self._angles)
        added = None
        if places.mask is not None:
            shape = places.mask.shape
            added = torch.zeros(shape, dtype=self.dtype, device=self.device).masked_fill_(~places.mask, -math.inf)
            added = added.repeat_interleave(group, 1)[:, None]
        past = store[:, :, :, : places.columns]
        if places.start is None:
            into = store.transpose(2, 3)  # [L, B, C, 2 K, d]
            at = torch.arange(store.shape[1], device=store.device)[:, None], places.slots
        else:
            into, at = store[:, :, :, places.start : places.start + count].transpose(2, 3), None
        return _Masks(store.shape[1], cos, sin, added, past.unbind(), into.unbind(), at)

    def queries(self, x: Tensor, index: int, positions: Tensor) -> Tensor:
        """What one token of each row, states x [B, D] that enter a layer, asks for there: [B, H, d], turned."""
        layer, cfg = self.layers[index], self.config
        buffer = torch.empty(x.shape, dtype=self.dtype, device=self.device)
        every = layer.qkv(self.normed(x, self._norms[index][0], buffer))[:, : cfg.heads * cfg.head_dim]
        found = every.view(len(x), cfg.heads, cfg.head_dim)
        if layer.qk_norm is not None:
            found = F.rms_norm(found, (cfg.head_dim,), None, cfg.norm_eps) * layer.qk_norm[: cfg.heads]
        cos, sin = (table[positions.clamp(0, len(table) - 1)] for table in self._angles)  # [B, 1, d]
        return found * cos + found.roll(cfg.head_dim // 2, -1) * sin

    def attend(self, layer: Layer, qkv: Tensor, index: int, sights: _Masks) -> Tensor:
        """Queries, keys and values [B Q, (H + 2 K) d] -> what the queries found, [B Q, H d]."""
        cfg, rows = self.config, sights.rows
        heads, kv, dim, count = cfg.heads, cfg.kv_heads, cfg.head_dim, len(qkv) // sights.rows
        every = qkv.view(rows, count, heads + 2 * kv, dim)
        turning = head = every[:, :, : heads + kv]
        if layer.qk_norm is not None:
            turning = F.rms_norm(turning, (dim,), None, cfg.norm_eps) * layer.qk_norm
        torch.addcmul(turning * sights.cos, turning.roll(dim // 2, -1), sights.sin, out=head)
        fresh, past = every[:, :, heads:], sights.past[index]
        small = past.dtype == torch.int8
        if small:
            fresh = int8.pack(fresh)
        if sights.at is None:
            sights.into[index].copy_(fresh)
        else:
            sights.into[index].index_put_(sights.at, fresh)
        if small:
            past = int8.unpack(past, dim, self.dtype)
        key, value = past[:, :kv], past[:, kv:]
        if count == 1:
            query = every[:, 0, :heads].view(rows, kv, heads // kv, dim)
            return F.scaled_dot_product_attention(query, key, value, sights.mask).reshape(rows, heads * dim)
        query = every[:, :, :heads].view(rows, count, kv, -1, dim).transpose(1, 2).reshape(rows, kv, -1, dim)
        found = F.scaled_dot_product_attention(query, key, value, sights.mask)  # [B, K, Q G, d]
        return found.view(rows, kv, count, -1, dim).transpose(1, 2).reshape(rows * count, heads * dim)


class Graphs:
    """A network's passes by shape. `record`: how, where it is not for the device to say."""

    def __init__(self, network: Network, *, record: Recorder | None = None) -> None:
        if record is None and graphs_enabled(network.device):  # pragma: CUDA
            record = CudaRecorder(network.device)
        self.network, self.pool = network, GraphPool(network.device, record)
        self.rules = self.separate_pool()  # verdicts
        self.views: dict[object, Network] = {}  # the network seen cheaper
        self.idle: list[Network] = []  # variants of the network that nobody runs at the moment, with their recordings

    def separate_pool(self) -> GraphPool:
        """For what drafts for this network, perhaps while it computes: recordings that share no memory with its own."""
        return GraphPool(self.network.device, separate_recorder(self.pool.record))

    def attach(self, network: Network) -> Network:
        """Another network that drafts for this one, its passes recorded likewise."""
        network.graphs = Graphs(network, record=separate_recorder(self.pool.record))
        return network

    def seen(self, how: object, make: Callable[[], Network]) -> Network:
        """The network seen cheaper, as `how` says, its passes recorded likewise: made once, so that recordings last."""
        if how not in self.views:
            while len(self.views) >= _VIEWS:
                self.views.pop(next(iter(self.views)))
            self.views[how] = self.attach(make())
        return self.views[how]

    def run(
        self, ids: Tensor, store: Tensor, places: PassLayout, taps: Collection[str], *, speaks: bool = True
    ) -> PassResult:
        """Ids [B, Q] -> normed states [B, Q, D], logits [B, Q, V] unless they are very many or nobody asks, and the
        states at taps; "stream" is what leaves the last layer, as it is."""
        angles = self.network.angles
        key = (store.data_ptr(), *store.shape, places.columns, angles[0].data_ptr(), speaks, *sorted(taps))
        inputs = (ids, places.positions, places.mask, places.slots)
        work = partial(self._compute, store, places.columns, frozenset(taps), speaks)
        return self.pool.run(key, inputs, work, angles)

    def _compute(self, store: Tensor, columns: int, taps: Collection[str], speaks: bool, inputs: Inputs) -> PassResult:
        ids, positions, mask, slots = inputs
        assert ids is not None and positions is not None
        network, found = self.network, {tap: list[Tensor]() for tap in taps}
        rows, count = ids.shape
        x = network.run(network.embed(ids), store, PassLayout(positions, columns, mask, None, slots), found)
        states = network.finish(x, rows, found)
        few = rows * count * network.config.vocabulary <= _LOGITS
        if "stream" in found:
            found["stream"].append(x.view(rows, count, -1))
        return states, network.logits(states) if speaks and few else None, {tap: one[0] for tap, one in found.items()}


def served(network: Network) -> Network:
    """The network, its passes captured where that is wanted."""
    if graphs_enabled(network.device) and network.graphs is None:  # pragma: CUDA
        network.graphs = Graphs(network)
    return network


def random_network(
    config: Config,
    seed: int = 0,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    gain: float = 4.0,
) -> Network:
    """Seeded random weights, the same in every precision. Logits have a spread of `gain`, so that distributions are
    neither flat nor certain, and what was read early still moves them."""
    generator = torch.Generator().manual_seed(seed)
    cfg = config

    def draw(rows: int, columns: int, scale: float = 1.0) -> Tensor:
        made = torch.randn(rows, columns, generator=generator) * (scale / math.sqrt(columns))
        return made.to(device, dtype)

    def dense(rows: int, columns: int, bias: bool, scale: float = 1.0) -> Dense:
        weight = draw(rows, columns, scale)
        return Dense(weight, draw(1, rows, math.sqrt(rows) * 0.3)[0] if bias else None)

    def norm(*shape: int) -> Tensor:
        return (1 + 0.1 * torch.randn(*shape, generator=generator)).to(device, dtype)

    spread = cfg.heads * cfg.head_dim
    layers = [
        Layer(
            attention_norm=norm(cfg.hidden_size),
            qkv=dense(spread + 2 * cfg.kv_heads * cfg.head_dim, cfg.hidden_size, cfg.attention_bias, 1.5),
            out=dense(cfg.hidden_size, spread, cfg.out_bias, 1.5),
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
