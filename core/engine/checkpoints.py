"""Builds our decoder from checkpoints of the Llama family (Llama, SmolLM, Mistral, Qwen2, Qwen3): a config.json as a
dictionary and tensors under transformers' names.

Opens no files; outrider.core.assets.store does. Refuses, with an error of one line, other architectures and tensors
that are missing, unexpected or of the wrong shape.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.linear import Dense, Linear, fastest
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config, Layer
from outrider.core.errors import OutriderError

# defaults by architecture where it differs from Llama
_ARCHITECTURES: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}
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
_MAX_COUNT = 1 << 24  # of any of these; no model has more
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALING_PARAMETERS = {"linear": ("factor",), "llama3": _LLAMA3}
_IGNORED = ("rotary_emb.inv_freq", "masked_bias")  # tables in older checkpoints that are computed here


class CheckpointError(OutriderError):
    """A checkpoint is not of a model that our decoder can run, or is incomplete."""


class ConfigError(OutriderError):
    """A config.json is invalid."""


def load(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder from the contents of a config.json and a checkpoint."""
    return Decoder(assemble(parse_config(config), tensors, dtype=dtype, device=device, convert=fastest))


def parse_config(described: Mapping[str, Any]) -> Config:
    """Our configuration of the model that a config.json describes."""
    kind = described.get("model_type")
    for name in _COUNTS:
        if isinstance(value := described.get(name), int) and not 0 <= value <= _MAX_COUNT:
            raise ConfigError(f"the config's {name} is {value:,}; expected from 1 to {_MAX_COUNT:,}")
    if not isinstance(kind, str) or kind not in _ARCHITECTURES:
        raise CheckpointError(
            f"the architecture '{kind}' is not supported by our decoder ({', '.join(_ARCHITECTURES)}); "
            "load it through transformers (outrider.core.engine.adapters.hf) instead"
        )
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [name for name in needed if described.get(name) is None]
    if missing:
        raise CheckpointError(f"the config lacks {', '.join(missing)}; check that it is a complete config.json")
    _check_values(described)
    _check_supported(described)
    heads, hidden_size = described["num_attention_heads"], described["hidden_size"]
    bias = bool(described.get("attention_bias", False))
    theta, scaling = _rope(described)
    return Config(
        vocabulary=described["vocab_size"],
        hidden_size=hidden_size,
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or hidden_size // heads,
        intermediate_size=described["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=described.get("rms_norm_eps") or 1e-6,
        tied=bool(described.get("tie_word_embeddings", False)),
        attention_bias=bias or _ARCHITECTURES[kind].get("attention_bias", False),
        out_bias=bias,
        mlp_bias=bool(described.get("mlp_bias", False)),
        qk_norm=_ARCHITECTURES[kind].get("qk_norm", False),
        context=described.get("max_position_embeddings") or 2048,
    )


def _check_values(described: Mapping[str, Any]) -> None:
    """Raise ConfigError for a value of the wrong type or range."""
    for name, value in described.items():
        if value is None:
            continue
        if name in _COUNTS and not (type(value) is int and value > 0):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a whole number above 0")
        if name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor") and not _positive(value):
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


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _check_supported(described: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a valid model that our decoder does not compute."""
    activation = described.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"the activation is '{activation}'; our decoder supports only silu")
    kinds = set(described.get("layer_types") or ()) - {"full_attention"}
    windowed = described.get("sliding_window") and described.get("use_sliding_window", True)
    if kinds or (windowed and described["sliding_window"] < (described.get("max_position_embeddings") or 0)):
        raise CheckpointError(
            "the model uses sliding window attention, which our decoder does not support; load it through transformers"
        )


def _rope(described: Mapping[str, Any]) -> tuple[float, tuple[str, Mapping[str, float]] | None]:
    """The base of the rotary angles and their scaling. transformers 5 writes both in one entry, 4 in two."""
    rope = dict(described.get("rope_scaling") or {}) | dict(described.get("rope_parameters") or {})
    theta = rope.get("rope_theta", described.get("rope_theta")) or 10_000.0
    if not _positive(theta):
        raise ConfigError(f"the config's rope_theta is {theta!r:.40}; expected a number above 0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0)) != 1:
        raise CheckpointError("the model rotates only part of each head, which our decoder does not support")
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3"):
        raise CheckpointError(f"rotary scaling of type '{kind}' is not supported; known: default, linear, llama3")
    if wrong := [name for name in _SCALING_PARAMETERS[kind] if not _positive(rope.get(name))]:
        raise ConfigError(f"rotary scaling of type '{kind}' needs {', '.join(wrong)}: each a number above 0")
    return float(theta), (kind, {name: float(rope[name]) for name in rope if isinstance(rope[name], int | float)})


class _Tensors:
    """Reads tensors by name and shape, and keeps track of those that were not used."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        convert: Callable[[Linear], Linear],
    ) -> None:
        self._tensors, self._dtype, self._device, self._convert = tensors, dtype, device, convert
        self._used: set[str] = set()

    def __call__(self, name: str, *shape: int) -> Tensor:
        tensor = self._tensors.get(name)
        if tensor is None:
            raise CheckpointError(
                f"the checkpoint has no tensor '{name}'; it holds {len(self._tensors)} others, so a file may be missing"
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"the tensor '{name}' has the shape {tuple(tensor.shape)}; the config implies {shape}"
            )
        self._used.add(name)
        return tensor.to(self._device, self._dtype)

    def linear(self, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        """Projections of the same input, concatenated; a single one is not copied."""
        weights = [self(f"{name}.weight", count, columns) for name, count in zip(names, rows, strict=True)]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if not bias:
            return self._convert(Dense(weight))
        biases = [self(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)]
        return self._convert(Dense(weight, torch.cat(biases) if len(biases) > 1 else biases[0]))

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
) -> Network:
    """The network of a checkpoint, with one projection for queries, keys and values and one for up and gate. Each
    linear layer is passed through `convert` (such as `fastest`) as soon as it is read, so that at most one is held
    twice, and each layer through `add` (such as LayerOffload.add)."""
    take = _Tensors(tensors, dtype, device, convert)
    width, dim = config.hidden_size, config.head_dim
    query_size, kv_size = config.heads * dim, config.kv_heads * dim
    embedding = take("model.embed_tokens.weight", config.vocabulary, width)
    layers = []
    for index in range(config.layers):
        prefix = f"model.layers.{index}"
        attention = [f"{prefix}.self_attn.{part}_proj" for part in "qkv"]
        mlp = [f"{prefix}.mlp.{part}_proj" for part in ("up", "gate")]
        qk_norm = None
        if config.qk_norm:
            query = take(f"{prefix}.self_attn.q_norm.weight", dim)
            key = take(f"{prefix}.self_attn.k_norm.weight", dim)
            qk_norm = torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])
        layers.append(
            add(
                Layer(
                    attention_norm=take(f"{prefix}.input_layernorm.weight", width),
                    qkv=take.linear(attention, [query_size, kv_size, kv_size], width, config.attention_bias),
                    out=take.linear([f"{prefix}.self_attn.o_proj"], [width], query_size, config.out_bias),
                    mlp_norm=take(f"{prefix}.post_attention_layernorm.weight", width),
                    up_gate=take.linear(mlp, [config.intermediate_size] * 2, width, config.mlp_bias),
                    down=take.linear([f"{prefix}.mlp.down_proj"], [width], config.intermediate_size, config.mlp_bias),
                    qk_norm=qk_norm,
                )
            )
        )
    if config.tied:
        take.ignore("lm_head.weight")
    head = embedding if config.tied else take("lm_head.weight", config.vocabulary, width)
    network = Network(config, embedding, layers, take("model.norm.weight", width), convert(Dense(head)))
    take.check_all_used()
    return network
