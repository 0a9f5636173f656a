"""Weights of Llama's family (Llama, SmolLM, Mistral, Qwen2, Qwen3) for the decoder of our own: tensors under the names
that transformers gives them, and the dictionary of its config.json.

Opens no file: where tensors come from is outrider.core.assets.store' affair. Whatever does not fit is said in one line:
an architecture that computes something else, a tensor that is missing, has another shape, or has no place.
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

# what sets each architecture apart: which biases it has unless its config says, and whether it norms queries and keys
_KINDS: dict[str, dict[str, bool]] = {
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
_MOST = 1 << 24  # of any of these: a larger one is no model but a trap
_LLAMA3 = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
_SCALED = {"linear": ("factor",), "llama3": _LLAMA3}
_SILENT = ("rotary_emb.inv_freq", "masked_bias")  # tables that older checkpoints carry and nobody needs


class CheckpointError(OutriderError):
    """Weights or their description do not make a model that we can run."""


class ConfigError(OutriderError):
    """A description that makes no sense, for us or anybody else."""


def load(
    described: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Decoder:
    """A decoder from the contents of a config.json and a checkpoint."""
    return Decoder(assemble(configure(described), tensors, dtype=dtype, device=device, form=fastest))


def configure(described: Mapping[str, Any]) -> Config:
    """The shape of the decoder that a config.json describes."""
    kind = described.get("model_type")
    for name in _COUNTS:
        if isinstance(value := described.get(name), int) and not 0 <= value <= _MOST:
            raise ConfigError(f"the config's {name} is {value:,}; expected from 1 to {_MOST:,}")
    if not isinstance(kind, str) or kind not in _KINDS:
        raise CheckpointError(
            f"the architecture '{kind}' is not one our own decoder runs ({', '.join(_KINDS)}); "
            "load it through transformers (outrider.core.engine.adapters.hf) instead"
        )
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [name for name in needed if name not in described]
    if missing:
        raise CheckpointError(f"the config says nothing of {', '.join(missing)}; is it a whole config.json?")
    _check(described)
    _refuse(described)
    heads, width = described["num_attention_heads"], described["hidden_size"]
    bias = bool(described.get("attention_bias", False))
    theta, scaling = _rope(described)
    return Config(
        vocabulary=described["vocab_size"],
        hidden_size=width,
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or width // heads,
        intermediate_size=described["intermediate_size"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=described.get("rms_norm_eps", 1e-6),
        tied=bool(described.get("tie_word_embeddings", False)),
        attention_bias=bias or _KINDS[kind].get("attention_bias", False),
        out_bias=bias,
        mlp_bias=bool(described.get("mlp_bias", False)),
        qk_norm=_KINDS[kind].get("qk_norm", False),
        context=described.get("max_position_embeddings", 2048),
    )


def _check(described: Mapping[str, Any]) -> None:
    """Is every value of the kind that its name wants?"""
    for name, value in described.items():
        if value is None:
            continue
        if name in _COUNTS and not (type(value) is int and value > 0):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a whole number above 0")
        if name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor") and not _positive(value):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a number above 0")
        if name in ("rope_scaling", "rope_parameters") and not isinstance(value, Mapping):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a dictionary")
        if name == "layer_types" and not (isinstance(value, list) and all(isinstance(one, str) for one in value)):
            raise ConfigError(f"the config's {name} is {value!r:.40}; expected a list of names")
    if described["hidden_size"] < described["num_attention_heads"] and "head_dim" not in described:
        raise ConfigError("the config has more heads than its hidden_size has numbers")


def _positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _refuse(described: Mapping[str, Any]) -> None:
    activation = described.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise CheckpointError(f"the activation is '{activation}'; our own decoder computes silu only")
    kinds = set(described.get("layer_types") or ()) - {"full_attention"}
    windowed = described.get("sliding_window") and described.get("use_sliding_window", True)
    if kinds or (windowed and described["sliding_window"] < described.get("max_position_embeddings", 0)):
        raise CheckpointError(
            "the model attends within a sliding window, which our own cache does not do; load it through transformers"
        )


def _rope(described: Mapping[str, Any]) -> tuple[float, tuple[str, Mapping[str, float]] | None]:
    """The base of the rotary angles and how they are scaled; transformers 5 writes them in one place, 4 in two."""
    rope = dict(described.get("rope_scaling") or {}) | dict(described.get("rope_parameters") or {})
    theta = rope.get("rope_theta", described.get("rope_theta")) or 10_000.0
    if not _positive(theta):
        raise ConfigError(f"the config's rope_theta is {theta!r:.40}; expected a number above 0")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0)) != 1:
        raise CheckpointError("only part of each head is turned by position, which our own decoder does not do")
    if kind == "default":
        return float(theta), None
    if kind not in ("linear", "llama3"):
        raise CheckpointError(f"rotary scaling of type '{kind}' is unknown here; known: default, linear, llama3")
    if wrong := [name for name in _SCALED[kind] if not _positive(rope.get(name))]:
        raise ConfigError(f"rotary scaling of type '{kind}' needs {', '.join(wrong)}: each a number above 0")
    return float(theta), (kind, {name: float(rope[name]) for name in rope if isinstance(rope[name], int | float)})


class _Tensors:
    """Takes tensors out one by one, and knows what is left."""

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        dtype: torch.dtype,
        device: torch.device | str,
        form: Callable[[Linear], Linear],
    ) -> None:
        self._tensors, self._dtype, self._device, self._form = tensors, dtype, device, form
        self._taken: set[str] = set()

    def __call__(self, name: str, *shape: int) -> Tensor:
        found = self._tensors.get(name)
        if found is None:
            raise CheckpointError(
                f"the checkpoint has no tensor '{name}'; it holds {len(self._tensors)} others, so a file may be missing"
            )
        if found.shape != shape:
            raise CheckpointError(
                f"the tensor '{name}' has the shape {tuple(found.shape)} where the config wants {shape}"
            )
        self._taken.add(name)
        return found.to(self._device, self._dtype)

    def linear(self, names: list[str], rows: list[int], columns: int, bias: bool) -> Linear:
        """Several projections of the same input as one; a single one is not copied."""
        weights = [self(f"{name}.weight", count, columns) for name, count in zip(names, rows, strict=True)]
        weight = torch.cat(weights) if len(weights) > 1 else weights[0]
        if not bias:
            return self._form(Dense(weight))
        biases = [self(f"{name}.bias", count) for name, count in zip(names, rows, strict=True)]
        return self._form(Dense(weight, torch.cat(biases) if len(biases) > 1 else biases[0]))

    def leave(self, *names: str) -> None:
        """These may be there and are not needed."""
        self._taken.update(names)

    def finish(self) -> None:
        left = [name for name in self._tensors if name not in self._taken and not name.endswith(_SILENT)]
        if left:
            raise CheckpointError(
                f"the checkpoint holds {len(left)} tensors that such a model has no place for, '{left[0]}' first; "
                "it is another architecture than its config says"
            )


def assemble(
    config: Config,
    tensors: Mapping[str, Tensor],
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    form: Callable[[Linear], Linear] = lambda linear: linear,
    put: Callable[[Layer], Layer] = lambda layer: layer,
) -> Network:
    """The network of a checkpoint: queries, keys and values as one projection, up and gate as another. Each is brought
    into its form, such as `fastest`, as soon as it is read, so that no more than one is held twice, and each layer is
    `put` where it shall be."""
    take = _Tensors(tensors, dtype, device, form)
    width, dim = config.hidden_size, config.head_dim
    spread, shared = config.heads * dim, config.kv_heads * dim
    embedding = take("model.embed_tokens.weight", config.vocabulary, width)
    layers = []
    for index in range(config.layers):
        at = f"model.layers.{index}"
        attention = [f"{at}.self_attn.{part}_proj" for part in "qkv"]
        mlp = [f"{at}.mlp.{part}_proj" for part in ("up", "gate")]
        qk_norm = None
        if config.qk_norm:
            query, key = take(f"{at}.self_attn.q_norm.weight", dim), take(f"{at}.self_attn.k_norm.weight", dim)
            qk_norm = torch.cat([query.expand(config.heads, -1), key.expand(config.kv_heads, -1)])
        layers.append(
            put(
                Layer(
                    attention_norm=take(f"{at}.input_layernorm.weight", width),
                    qkv=take.linear(attention, [spread, shared, shared], width, config.attention_bias),
                    out=take.linear([f"{at}.self_attn.o_proj"], [width], spread, config.out_bias),
                    mlp_norm=take(f"{at}.post_attention_layernorm.weight", width),
                    up_gate=take.linear(mlp, [config.intermediate_size] * 2, width, config.mlp_bias),
                    down=take.linear([f"{at}.mlp.down_proj"], [width], config.intermediate_size, config.mlp_bias),
                    qk_norm=qk_norm,
                )
            )
        )
    if config.tied:
        take.leave("lm_head.weight")
    head = embedding if config.tied else take("lm_head.weight", config.vocabulary, width)
    network = Network(config, embedding, layers, take("model.norm.weight", width), form(Dense(head)))
    take.finish()
    return network
