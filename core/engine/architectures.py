"""The architectures that our decoder computes, one row each: where a model type differs from Llama in its configuration
and in the names and layouts of its tensors.

Reads a config.json as a dictionary; opens no files and reads no tensors.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from outrider.core.engine.experts import Mixture
from outrider.core.engine.rotary import SCALINGS
from outrider.core.engine.types import Variant
from outrider.core.errors import OutriderError


class CheckpointError(OutriderError):
    """A checkpoint is not of a model that our decoder can run, or is incomplete."""


class ConfigError(OutriderError):
    """A config.json is invalid."""


@dataclass(frozen=True, kw_only=True)
class Norms:
    """The names of a layer's norms; None: it has no such norm."""

    attention: str = "input_layernorm"
    attention_post: str | None = None
    mlp: str = "post_attention_layernorm"
    mlp_post: str | None = None


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A model type's defaults and tensor layout; Llama's unless given."""

    attention_bias: bool | None = None  # of queries, keys and values; None: as the config says
    out_bias: bool | None = None
    qk_norm: bool = False
    tied: bool = False  # the default where a config does not say
    windows: Literal["none", "all", "optional", "alternate", "pattern", "late"] = (
        "none"  # which layers have one, by default
    )
    activation: Literal["silu", "gelu"] = "silu"
    scaled_embedding: bool = False  # by the root of the hidden size
    norm_offset: bool = False  # norms multiply by 1 + weight
    norms: Norms = Norms()
    rotary: float = 1.0  # the default of partial_rotary_factor
    interleaved: bool = False  # neighbouring dimensions are rotated together, instead of halves of a head
    joined_qkv: bool = False  # one tensor for queries, keys and values
    joined_up_gate: bool = False  # one tensor for gate and up, in this order
    experts: Literal["none", "qwen", "mixtral", "gpt_oss"] = "none"  # how the tensors of experts are named
    sinks: bool = False


_GEMMA_NORMS = Norms(
    attention_post="post_attention_layernorm", mlp="pre_feedforward_layernorm", mlp_post="post_feedforward_layernorm"
)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture(),
    "mistral": Architecture(windows="all", attention_bias=False, out_bias=False),
    "qwen2": Architecture(windows="late", attention_bias=True),
    "qwen3": Architecture(windows="late", qk_norm=True),
    "gemma": Architecture(tied=True, activation="gelu", scaled_embedding=True, norm_offset=True),
    "gemma2": Architecture(
        tied=True,
        windows="alternate",
        activation="gelu",
        scaled_embedding=True,
        norm_offset=True,
        norms=_GEMMA_NORMS,
    ),
    "gemma3_text": Architecture(
        tied=True,
        qk_norm=True,
        windows="pattern",
        activation="gelu",
        scaled_embedding=True,
        norm_offset=True,
        norms=_GEMMA_NORMS,
    ),
    "phi3": Architecture(windows="all", attention_bias=False, out_bias=False, joined_qkv=True, joined_up_gate=True),
    "glm4": Architecture(
        out_bias=False,
        rotary=0.5,
        interleaved=True,
        joined_up_gate=True,
        norms=Norms(attention_post="post_self_attn_layernorm", mlp_post="post_mlp_layernorm"),
    ),
    "qwen3_moe": Architecture(windows="optional", qk_norm=True, experts="qwen"),
    "mixtral": Architecture(windows="all", attention_bias=False, out_bias=False, experts="mixtral"),
    "gpt_oss": Architecture(windows="alternate", experts="gpt_oss", sinks=True),
}
_ACTIVATIONS = {"silu": ("silu", "swish"), "gelu": ("gelu_pytorch_tanh",)}
_PARAMETERS = {
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


def architecture(described: Mapping[str, Any]) -> Architecture:
    """The row of a config's model type; raises CheckpointError if there is none."""
    kind = described.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise CheckpointError(
            f"the architecture '{kind}' is not supported by our decoder ({', '.join(ARCHITECTURES)}); "
            "load it through transformers (outrider.core.engine.adapters.hf) instead"
        )
    return ARCHITECTURES[kind]


def variant(described: Mapping[str, Any], row: Architecture) -> Variant:
    """How the described model's layers differ from Llama's."""
    given = described.get("hidden_activation") or described.get("hidden_act") or _ACTIVATIONS[row.activation][0]
    if row.activation == "gelu" and described.get("model_type") == "gemma":
        given = described.get("hidden_activation") or "gelu_pytorch_tanh"  # old configs name another that was not used
    if given not in _ACTIVATIONS[row.activation]:
        raise CheckpointError(
            f"the activation is '{given}'; our decoder supports only {_ACTIVATIONS[row.activation][0]} for "
            f"'{described['model_type']}'; load it through transformers"
        )
    if described.get("use_bidirectional_attention"):
        raise CheckpointError("the model's attention is bidirectional, so it does not generate text")
    scalar = described.get("query_pre_attn_scalar")
    windows = _windows(described, row)
    local = _local_theta(described) if row.windows == "pattern" and any(windows) else None
    return Variant(
        windows=windows,
        local_rope_theta=local,
        activation=row.activation,
        embedding_scale=described["hidden_size"] ** 0.5 if row.scaled_embedding else 1.0,
        attention_scale=None if scalar is None else scalar**-0.5,
        attention_softcap=described.get("attn_logit_softcapping"),
        logit_softcap=described.get("final_logit_softcapping"),
        post_norms=row.norms.attention_post is not None,
        sinks=row.sinks,
        mixture=None if row.experts == "none" else _mixture(described, row),
    )


def _mixture(described: Mapping[str, Any], row: Architecture) -> Mixture | None:
    """The experts of the described model; None if all its layers are dense."""
    experts = described.get("num_local_experts") or described.get("num_experts") or 0
    chosen = described.get("num_experts_per_tok") or described.get("experts_per_token")
    if type(experts) is not int or type(chosen) is not int or not 1 <= chosen <= experts:
        raise ConfigError(
            f"the config has {experts!r:.40} experts, {chosen!r:.40} of them per token; expected whole numbers in "
            "num_local_experts or num_experts and, not above it, in num_experts_per_tok"
        )
    layers, step = described["num_hidden_layers"], described.get("decoder_sparse_step") or 1
    dense = described.get("mlp_only_layers") or ()
    sparse = tuple(experts > 0 and index not in dense and (index + 1) % step == 0 for index in range(layers))
    if not any(sparse):
        return None
    return Mixture(
        experts=experts,
        chosen=chosen,
        intermediate_size=described.get("moe_intermediate_size") or described["intermediate_size"],
        layers=sparse,
        normalized=row.experts != "qwen" or bool(described.get("norm_topk_prob", False)),
        limit=float(described.get("swiglu_limit") or 7.0) if row.experts == "gpt_oss" else None,
        rate=float(described.get("swiglu_alpha") or 1.702) if row.experts == "gpt_oss" else 1.0,
    )


def _windows(described: Mapping[str, Any], row: Architecture) -> tuple[int | None, ...]:
    """The attention window of each layer; empty if none has one shorter than the context."""
    layers, window = described["num_hidden_layers"], described.get("sliding_window")
    kinds = described.get("layer_types")
    if kinds is None:
        full = {
            "none": [window is None or not described.get("use_sliding_window", True)] * layers,
            "all": [False] * layers,
            "optional": [not described.get("use_sliding_window")] * layers,
            "alternate": [index % 2 == 1 for index in range(layers)],
            "pattern": [(index + 1) % (described.get("sliding_window_pattern") or 6) == 0 for index in range(layers)],
            "late": [
                not described.get("use_sliding_window") or index < (described.get("max_window_layers") or 28)
                for index in range(layers)
            ],
        }[row.windows]
        kinds = [_FULL if whole else _SLIDING for whole in full]
    if len(kinds) != layers:
        raise ConfigError(f"the config's layer_types lists {len(kinds)} layers and num_hidden_layers is {layers}")
    other = sorted(set(kinds) - {_FULL, _SLIDING})
    if other:
        raise CheckpointError(f"the model has layers of type '{other[0]}', which our decoder does not support")
    context = described.get("max_position_embeddings") or 0
    if window is None or _SLIDING not in kinds or window >= context:
        return ()
    if row.windows == "none":
        raise CheckpointError(
            f"the model uses sliding window attention, which our decoder does not support for "
            f"'{described['model_type']}'; load it through transformers"
        )
    return tuple(None if kind == _FULL else window for kind in kinds)


def _local_theta(described: Mapping[str, Any]) -> float:
    """The rotary base of layers with a window, where it differs."""
    local = (described.get("rope_parameters") or {}).get(_SLIDING) or {}
    theta = local.get("rope_theta") or described.get("rope_local_base_freq") or 10_000.0
    if local.get("rope_type", "default") != "default" or not positive(theta):
        raise CheckpointError(
            "the rotary angles of layers with a window are scaled, which our decoder does not support"
        )
    return float(theta)


def rope(described: Mapping[str, Any], row: Architecture) -> tuple[float, tuple[str, Mapping[str, Any]] | None, float]:
    """The base of the rotary angles, their scaling, and the rotated part of each head. transformers 5 writes them in
    one entry (one per kind of layer for Gemma 3), 4 in several."""
    parameters = dict(described.get("rope_parameters") or {})
    entry = dict(described.get("rope_scaling") or {}) | dict(parameters.get(_FULL) or parameters)
    default = 1_000_000.0 if row.windows == "pattern" else 10_000.0
    theta = entry.get("rope_theta", described.get("rope_theta")) or default
    if not positive(theta):
        raise ConfigError(f"the config's rope_theta is {theta!r:.40}; expected a number above 0")
    part = entry.get("partial_rotary_factor", described.get("partial_rotary_factor")) or row.rotary
    if not positive(part) or part > 1:
        raise ConfigError(f"the config's partial_rotary_factor is {part!r:.40}; expected a number above 0, at most 1")
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind == "su" or (kind == "yarn" and described.get("model_type") == "phi3"):
        kind = "longrope"  # its names in early configs
    if kind == "default":
        return float(theta), None, float(part)
    if kind not in SCALINGS:
        raise CheckpointError(
            f"rotary scaling of type '{kind}' is not supported; known: default, {', '.join(SCALINGS)}"
        )
    context = described.get("max_position_embeddings") or 2048
    if kind in ("yarn", "longrope"):
        entry.setdefault("original_max_position_embeddings", described.get("original_max_position_embeddings"))
        if entry["original_max_position_embeddings"] is None:
            entry["original_max_position_embeddings"] = context
    if wrong := [name for name in _PARAMETERS[kind] if not positive(entry.get(name))]:
        raise ConfigError(f"rotary scaling of type '{kind}' needs {', '.join(wrong)}: each a number above 0")
    if kind == "yarn":
        return float(theta), (kind, _yarn(entry)), float(part)
    if kind == "longrope":
        return float(theta), (kind, _longrope(entry, context)), float(part)
    numbers = {name: float(entry[name]) for name in entry if isinstance(entry[name], int | float)}
    return float(theta), (kind, numbers), float(part)


def _yarn(entry: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of YaRN, with its defaults."""
    factor, given = float(entry["factor"]), entry.get("attention_factor")

    def gain(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    scale, scale_all = entry.get("mscale"), entry.get("mscale_all_dim")
    inferred = gain(scale) / gain(scale_all) if scale and scale_all else gain(1)
    return {
        "factor": factor,
        "original_max_position_embeddings": float(entry["original_max_position_embeddings"]),
        "attention_factor": inferred if given is None else float(given),
        "beta_fast": float(entry.get("beta_fast") or 32),
        "beta_slow": float(entry.get("beta_slow") or 1),
        "truncate": bool(entry.get("truncate", True)),
    }


def _longrope(entry: Mapping[str, Any], context: int) -> dict[str, Any]:
    """The parameters of LongRoPE (arXiv 2402.13753): the short factors up to the original context, the long beyond."""
    original, given = int(entry["original_max_position_embeddings"]), entry.get("attention_factor")
    for name in ("short_factor", "long_factor"):
        factors = entry.get(name)
        if not isinstance(factors, list) or not factors or not all(map(positive, factors)):
            raise ConfigError(f"rotary scaling of type 'longrope' needs {name}: a list of numbers above 0")
    factor = entry.get("factor") or context / original
    inferred = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 and original > 1 else 1.0
    return {
        "short_factor": tuple(map(float, entry["short_factor"])),
        "long_factor": tuple(map(float, entry["long_factor"])),
        "original_max_position_embeddings": float(original),
        "attention_factor": inferred if given is None else float(given),
    }


def positive(value: object) -> bool:
    """Whether it is a finite number above 0."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf
