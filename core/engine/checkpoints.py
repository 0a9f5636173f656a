"""Builds our decoder from checkpoints of the architectures in outrider.core.engine.architectures: a config.json as a
dictionary and tensors under transformers' names.

Opens no files; outrider.core.assets.store does. Refuses, with an error of one line, other architectures and tensors
that are missing, unexpected or of the wrong shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.architectures import (
    ARCHITECTURES,
    Architecture,
    CheckpointError,
    ConfigError,
    architecture,
    positive,
    rope,
    variant,
)
from outrider.core.engine.experts import Experts, Mixture
from outrider.core.engine.linear import Dense, Linear, fastest
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import Network
from outrider.core.engine.quantization import mxfp4
from outrider.core.engine.quantization.published import Dequantized, check_method, readable
from outrider.core.engine.quantization.quantize import Int4
from outrider.core.engine.rotary import qkv_order, rotary_order
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config, Layer

__all__ = ["CheckpointError", "ConfigError", "assemble", "check_method", "load", "parse_config", "readable"]

_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "head_dim",
    "max_position_embeddings",
    "sliding_window",
)
_POSITIVE = (
    "rms_norm_eps",
    "rope_theta",
    "rope_local_base_freq",
    "partial_rotary_factor",
    "query_pre_attn_scalar",
    "attn_logit_softcapping",
    "final_logit_softcapping",
)
_MAX_COUNT = 1 << 24  # of any of these; no model has more
_IGNORED = ("rotary_emb.inv_freq", "masked_bias")  # tables in older checkpoints that are computed here


def load(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder from the contents of a config.json and a checkpoint."""
    tensors = readable(config, tensors)
    return make_decoder(assemble(parse_config(config), tensors, dtype=dtype, device=device, convert=fastest))


def parse_config(described: Mapping[str, Any]) -> Config:
    """Our configuration of the model that a config.json describes."""
    for name in _COUNTS:
        if isinstance(value := described.get(name), int) and not 0 <= value <= _MAX_COUNT:
            raise ConfigError(f"the config's {name} is {value:,}; expected from 1 to {_MAX_COUNT:,}")
    row = architecture(described)
    check_method(described)
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [name for name in needed if described.get(name) is None]
    if missing:
        raise CheckpointError(f"the config lacks {', '.join(missing)}; check that it is a complete config.json")
    _check_values(described)
    heads, hidden_size = described["num_attention_heads"], described["hidden_size"]
    head_dim = described.get("head_dim") or hidden_size // heads
    bias = bool(described.get("attention_bias", False))
    tied = described.get("tie_word_embeddings")
    theta, scaling, rotated = rope(described, row)
    context = described.get("max_position_embeddings") or 2048
    rotary_dim = int(head_dim * rotated)
    for name in ("short_factor", "long_factor") if scaling is not None and scaling[0] == "longrope" else ():
        if scaling is not None and len(scaling[1][name]) != rotary_dim // 2:
            raise ConfigError(
                f"the config's {name} has {len(scaling[1][name])} numbers; expected {rotary_dim // 2}, one per "
                "rotated pair"
            )
    return Config(
        architecture=described["model_type"],
        vocabulary=described["vocab_size"],
        hidden_size=hidden_size,
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        intermediate_size=described["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_dim=None if rotary_dim == head_dim else rotary_dim,
        norm_eps=described.get("rms_norm_eps") or 1e-6,
        tied=row.tied if tied is None else bool(tied),
        attention_bias=bias if row.attention_bias is None else row.attention_bias,
        out_bias=bias if row.out_bias is None else row.out_bias,
        mlp_bias=bool(described.get("mlp_bias", False)),
        qk_norm=row.qk_norm,
        context=context,
        variant=variant(described, row),
    )


def _check_values(described: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of the wrong type or range."""
    for name, value in described.items():
        if value is None:
            continue
        if name in _COUNTS and not (type(value) is int and value > 0):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a whole number above 0")
        if name in _POSITIVE and not positive(value):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a number above 0")
        if name in ("rope_scaling", "rope_parameters") and not isinstance(value, Mapping):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a dictionary")
        if name == "layer_types" and not (isinstance(value, list) and all(isinstance(kind, str) for kind in value)):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a list of names")
    if described["hidden_size"] < described["num_attention_heads"] and not described.get("head_dim"):
        raise ConfigError(
            f"the config's hidden_size is {described['hidden_size']}; expected at least its number of heads, "
            f"{described['num_attention_heads']}"
        )


class Tensors:
    """Reads tensors by name and shape, and keeps track of those that were not used."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        convert: Callable[[Linear], Linear],
        keep_int4: bool,
    ) -> None:
        self._keep_int4 = keep_int4
        self._tensors, self._dtype, self._device, self.convert = tensors, dtype, device, convert
        self._used: set[str] = set()

    def __call__(self, name: str, *shape: int) -> Tensor:
        return self._stored(name, *shape).to(self._dtype)

    def linear(
        self, names: list[str], rows: list[int], columns: int, bias: bool, order: Tensor | None = None
    ) -> Linear:
        """Projections of the same input, concatenated, with their outputs in this order; a single one that is not
        reordered is not copied."""
        biases = [self(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)] if bias else []
        both = torch.cat(biases) if len(biases) > 1 else biases[0] if biases else None
        if order is not None and both is not None:
            both = both[order.to(both.device)]
        sizes = {f"{name}.weight": (count, columns) for name, count in zip(names, rows, strict=True)}
        if (levels := self._levels(sizes)) is not None:
            parts = levels if order is None else [part[order.to(part.device)] for part in levels]
            return self.convert(Int4.of_levels(parts[0], parts[1], parts[2], both))
        weights = [self(name, *size) for name, size in sizes.items()]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        return self.convert(Dense(weight if order is None else weight[order.to(weight.device)], both))

    def _levels(self, sizes: Mapping[str, tuple[int, int]]) -> list[Tensor] | None:
        """The integers, scales and offsets of joined weights, if they are to be kept and all fit our form of 4 bits."""
        if not self._keep_int4 or not isinstance(self._tensors, Dequantized) or not set(sizes) <= set(self._tensors):
            return None
        found = [parts for name in sizes if (parts := self._tensors.levels(name)) is not None]
        if len(found) < len(sizes):
            return None
        for (name, size), (ints, _, _) in zip(sizes.items(), found, strict=True):
            self._check(name, ints.shape, size)
        ints, scales, offsets = (torch.cat(parts).to(self._device) for parts in zip(*found, strict=True))
        return [ints, scales.to(self._dtype), offsets.to(self._dtype)]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def mxfp4(self, name: str, *shape: int) -> Tensor:
        """A dequantised tensor that is stored in MXFP4; the last size is that of its blocks."""
        groups = shape[-1] // 32
        blocks = self._stored(f"{name}_blocks", *shape[:-1], groups, 16)
        return mxfp4.dequantize(blocks, self._stored(f"{name}_scales", *shape[:-1], groups), self._dtype)

    def _stored(self, name: str, *shape: int) -> Tensor:
        """A tensor in the precision that it is stored in."""
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"the checkpoint has no tensor '{name}'; it holds {len(self._tensors)} others, so a file may be missing"
            )
        self._check(name, tensor.shape, shape)
        return tensor.to(self._device)

    def _check(self, name: str, shape: Sequence[int], implied: Sequence[int]) -> None:
        """Note the use of a tensor, if it has the shape that the config implies."""
        if tuple(shape) != tuple(implied):
            raise CheckpointError(f"the tensor '{name}' has the shape {tuple(shape)}; the config implies {implied}")
        self._used.add(name)

    def norm(self, name: str, size: int, offset: bool) -> Tensor:
        """A norm's weight; with `offset` what is stored is its difference from 1, and the sum stays in 32 bits."""
        weight = self(name, size)
        return weight.float() + 1 if offset else weight

    def ignore(self, *names: str) -> None:
        """Accept these tensors without using them."""
        self._used.update(names)

    def check_all_used(self) -> None:
        unused = [name for name in self._tensors if name not in self._used and not name.endswith(_IGNORED)]
        if unused:
            raise CheckpointError(
                f"the checkpoint holds {len(unused)} tensors that the config does not account for, such as "
                f"'{unused[0]}'; its architecture differs from its config"
            )


def assemble(
    config: Config,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    convert: Callable[[Linear], Linear] = lambda linear: linear,
    add: Callable[[Layer], Layer] = lambda layer: layer,
    keep_int4: bool = False,
) -> Network:
    """The network of a checkpoint, with one projection for queries, keys and values and one for up and gate. Each
    linear layer is passed through `convert` (such as `fastest`) as soon as it is read, so that at most one is held
    twice, and each layer through `add` (such as LayerOffload.add). `keep_int4`: published integers of 4 bits
    are not dequantised where they fit our form, with scales in `dtype`."""
    take, row = Tensors(tensors, dtype, device, convert, keep_int4), ARCHITECTURES[config.architecture]
    embedding = take("model.embed_tokens.weight", config.vocabulary, config.hidden_size)
    layers = [add(_layer(take, config, row, index)) for index in range(config.layers)]
    if config.tied:
        take.ignore("lm_head.weight")
    head = embedding if config.tied else take("lm_head.weight", config.vocabulary, config.hidden_size)
    norm = take.norm("model.norm.weight", config.hidden_size, row.norm_offset)
    network = Network(config, embedding, layers, norm, convert(Dense(head)))
    take.check_all_used()
    return network


def _layer(take: Tensors, config: Config, row: Architecture, index: int) -> Layer:
    """One layer of a checkpoint, in our layout."""
    prefix = f"model.layers.{index}"
    width, dim, middle = config.hidden_size, config.head_dim, config.intermediate_size
    sizes = [config.heads * dim, config.kv_heads * dim, config.kv_heads * dim]
    attention = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
    if row.joined_qkv:
        attention, sizes = [f"{prefix}.self_attn.qkv_proj"], [sum(sizes)]
    mlp, halves, swapped = [f"{prefix}.mlp.{part}_proj" for part in ("up", "gate")], [middle] * 2, None
    if row.joined_up_gate:
        mlp, halves, swapped = [f"{prefix}.mlp.gate_up_proj"], [2 * middle], torch.arange(2 * middle).roll(middle)
    pairs = rotary_order(dim, config.rotary_dim or dim, row.interleaved)
    order = None if pairs is None else qkv_order(config.heads, config.kv_heads, dim, pairs)
    qk_norm = None
    if config.qk_norm:
        query = take.norm(f"{prefix}.self_attn.q_norm.weight", dim, row.norm_offset)
        key = take.norm(f"{prefix}.self_attn.k_norm.weight", dim, row.norm_offset)
        qk_norm = torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])
        qk_norm = qk_norm if pairs is None else qk_norm[:, pairs]
    attention_norm, attention_post, mlp_norm, mlp_post = (
        None if name is None else take.norm(f"{prefix}.{name}.weight", width, row.norm_offset)
        for name in (row.norms.attention, row.norms.attention_post, row.norms.mlp, row.norms.mlp_post)
    )
    assert attention_norm is not None and mlp_norm is not None
    mixture, experts = config.variant.mixture, None
    if mixture is not None and mixture.layers[index]:
        experts = _read_experts(take, mixture, row.experts, width, f"{prefix}.mlp")
        up_gate: Linear = Dense(attention_norm.new_zeros(0, width))
        down: Linear = Dense(attention_norm.new_zeros(0, width))
    else:
        up_gate = take.linear(mlp, halves, width, config.mlp_bias, swapped)
        down = take.linear([f"{prefix}.mlp.down_proj"], [width], middle, config.mlp_bias)
    return Layer(
        attention_norm=attention_norm,
        qkv=take.linear(attention, sizes, width, config.attention_bias, order),
        out=take.linear([f"{prefix}.self_attn.o_proj"], [width], config.heads * dim, config.out_bias),
        mlp_norm=mlp_norm,
        up_gate=up_gate,
        down=down,
        qk_norm=qk_norm,
        attention_post_norm=attention_post,
        mlp_post_norm=mlp_post,
        sinks=take(f"{prefix}.self_attn.sinks", config.heads).float() if config.variant.sinks else None,
        experts=experts,
    )


def _read_experts(take: Tensors, mixture: Mixture, naming: str, width: int, prefix: str) -> Experts:
    """The experts of one layer, from one tensor for each, joined tensors, or MXFP4."""
    if naming == "gpt_oss":
        return _read_gpt_oss(take, mixture, width, prefix)
    count, middle = mixture.experts, mixture.intermediate_size
    if f"{prefix}.experts.gate_up_proj" in take:
        router = take.linear([f"{prefix}.gate"], [count], width, False)
        up_gate = take(f"{prefix}.experts.gate_up_proj", count, 2 * middle, width).roll(middle, 1)
        down = take(f"{prefix}.experts.down_proj", count, width, middle)
        return Experts.of(mixture, router, up_gate, down, None, None, take.convert)
    names = ("up_proj", "gate_proj", "down_proj")
    if naming == "mixtral":
        prefix, names = prefix.replace(".mlp", ".block_sparse_moe"), ("w3", "w1", "w2")
    router = take.linear([f"{prefix}.gate"], [count], width, False)
    up_gates, downs = list[Linear](), list[Linear]()
    for expert in range(count):
        up, gate, down_name = (f"{prefix}.experts.{expert}.{name}" for name in names)
        up_gates.append(take.linear([up, gate], [middle] * 2, width, False))
        downs.append(take.linear([down_name], [width], middle, False))
    if up_gates[0].weight.device.type == "cpu" or not all(isinstance(linear, Dense) for linear in up_gates + downs):
        return Experts(mixture, router, up_gates, downs)
    joined = [torch.stack([linear.weight for linear in linears]) for linears in (up_gates, downs)]
    return Experts.of(mixture, router, joined[0], joined[1], None, None, take.convert)


def _read_gpt_oss(take: Tensors, mixture: Mixture, width: int, prefix: str) -> Experts:
    """As published, in MXFP4, or dequantised, as transformers writes them, with inputs and outputs transposed. Rows of
    gate and up alternate."""
    count, middle, at = mixture.experts, mixture.intermediate_size, f"{prefix}.experts"
    order = [*range(1, 2 * middle, 2), *range(0, 2 * middle, 2)]

    def weights(name: str, rows: int, columns: int) -> Tensor:
        if f"{at}.{name}_blocks" not in take:
            return take(f"{at}.{name}", count, columns, rows).transpose(1, 2)
        return take.mxfp4(f"{at}.{name}", count, rows, columns)

    router = take.linear([f"{prefix}.router"], [count], width, True)
    up_gate = weights("gate_up_proj", 2 * middle, width)[:, order].contiguous()
    down = weights("down_proj", width, middle).contiguous()
    up_gate_bias = take(f"{at}.gate_up_proj_bias", count, 2 * middle)[:, order].contiguous()
    down_bias = take(f"{at}.down_proj_bias", count, width)
    return Experts.of(mixture, router, up_gate, down, up_gate_bias, down_bias, take.convert)
