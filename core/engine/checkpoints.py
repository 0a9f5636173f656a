"""Weights of Llama's family (Llama, SmolLM, Mistral, Qwen2, Qwen3) for the decoder of our own: tensors under the names
that transformers gives them, and the dictionary of its config.json.

Opens no file: where tensors come from is outrider.core.assets' affair. Whatever does not fit is said in one line:
an architecture that computes something else, a tensor that is missing, has another shape, or has no place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.linear import Dense, Linear, fastest
from outrider.core.engine.network import Config, Layer, Network
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import OutriderError

# what sets each architecture apart: which biases it has unless its config says, and whether it norms queries and keys
_KINDS: dict[str, dict[str, bool]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"attention_bias": True},
    "qwen3": {"qk_norm": True},
}
_SILENT = ("rotary_emb.inv_freq", "masked_bias")  # tables that older checkpoints carry and nobody needs


class CheckpointError(OutriderError):
    """Weights or their description do not make a model that we can run."""


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
    if kind not in _KINDS:
        raise CheckpointError(
            f"the architecture '{kind}' is not one our own decoder runs ({', '.join(_KINDS)}); "
            "load it through transformers (outrider.core.engine.hf) instead"
        )
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [name for name in needed if name not in described]
    if missing:
        raise CheckpointError(f"the config says nothing of {', '.join(missing)}; is it a whole config.json?")
    _refuse(described)
    heads, width = described["num_attention_heads"], described["hidden_size"]
    bias = bool(described.get("attention_bias", False))
    theta, scaling = _rope(described)
    return Config(
        vocabulary=described["vocab_size"],
        width=width,
        layers=described["num_hidden_layers"],
        heads=heads,
        kv_heads=described.get("num_key_value_heads") or heads,
        head_dim=described.get("head_dim") or width // heads,
        hidden=described["intermediate_size"],
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
    theta = float(rope.get("rope_theta", described.get("rope_theta", 10_000.0)))
    kind = rope.get("rope_type", rope.get("type", "default"))
    if rope.get("partial_rotary_factor", described.get("partial_rotary_factor", 1.0)) != 1:
        raise CheckpointError("only part of each head is turned by position, which our own decoder does not do")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise CheckpointError(f"rotary scaling of type '{kind}' is unknown here; known: default, linear, llama3")
    return theta, (kind, {name: float(rope[name]) for name in rope if isinstance(rope[name], int | float)})


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
    width, dim = config.width, config.head_dim
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
                    up_gate=take.linear(mlp, [config.hidden] * 2, width, config.mlp_bias),
                    down=take.linear([f"{at}.mlp.down_proj"], [width], config.hidden, config.mlp_bias),
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
