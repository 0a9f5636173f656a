"""Parts of a transformers model that draft heads use: its embedding and output rows, and single layers of its class.

Independent of caches of the model, drafts and draft heads. transformers is imported only when a layer is built.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from outrider.core.engine.linear import Dense
from outrider.core.engine.network import Network
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible
from outrider.core.protocol import Target

_ONE_LAYER: dict[str, Any] = {
    "num_hidden_layers": 1,
    "layer_types": ["full_attention"],
    "first_k_dense_replace": 0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "mlp_layer_types": ["sparse"],
    "vocab_size": 1,
}


def tapped(model: Any, taps: Sequence[str], output: Any, needs: Collection[str]) -> dict[str, Tensor]:
    """The hidden states [B, Q, D] of a pass at the taps that are needed."""
    if not needs:
        return {}
    states = output.hidden_states
    if states[-1].dim() != 3:
        raise Incompatible(
            f"{type(model).__name__} has several hidden states per token, which drafters do not read; use one that "
            "needs none, such as 'prompt-lookup'"
        )
    named = dict(zip(taps, states, strict=False)) | {"last": states[-1]}
    return {tap: named[tap] for tap in needs}


def shared_weights(model: Any, output: Any = None) -> Network:
    """What draft heads share with a causal language model, as a network without layers: its sizes, its embedding and
    its output rows (of the layer `output`, if the class doesn't name it), which are referenced and not copied."""
    described = model.config.get_text_config(decoder=True)
    embedding, output = model.get_input_embeddings(), output or model.get_output_embeddings()
    words: Any = getattr(embedding, "weight", None)
    rows: Any = getattr(output, "weight", None)

    def size(name: str, default: int) -> int:
        given = getattr(described, name, None)
        return given if isinstance(given, int) and given > 0 else default  # some classes list one per layer

    width, vocabulary = size("hidden_size", 0), size("vocab_size", 0)
    known = isinstance(words, Tensor) and isinstance(rows, Tensor) and width and vocabulary
    if not known or not words.shape[1] == rows.shape[1] == width:
        raise Incompatible(
            f"{type(model).__name__} has no embedding and output rows of its hidden size, which draft heads share; use "
            "a drafter that needs no head, such as 'prompt-lookup'"
        )
    bias, heads = getattr(output, "bias", None), size("num_attention_heads", 1)
    config = Config(
        vocabulary=vocabulary,
        hidden_size=width,
        layers=described.num_hidden_layers,
        heads=heads,
        kv_heads=size("num_key_value_heads", heads),
        head_dim=size("head_dim", max(width // heads, 1)),
        intermediate_size=size("intermediate_size", 4 * width),
        norm_eps=getattr(described, "rms_norm_eps", 1e-6),
        tied=False,
    )
    head = Dense(rows.detach()[:vocabulary], None if bias is None else bias.detach()[:vocabulary])
    norm = torch.ones(width, dtype=model.dtype, device=model.device)  # unknown; heads bring their own
    return Network(config, words.detach(), (), norm, head)


def of_ids(network: Network, ids: Tensor) -> Network:
    """A network without layers that reads and predicts some of another's ids only, in this order."""
    bias = network.head.bias
    head = Dense(network.head.weight[ids], None if bias is None else bias[ids])
    return Network(replace(network.config, vocabulary=len(ids)), network.embedding[ids], (), network.norm, head)


class SharingTarget(Target, Protocol):
    """A target whose embedding and output rows draft heads share: our own decoder, or one of transformers."""

    @property
    def network(self) -> Network: ...
    @property
    def taps(self) -> Sequence[str]: ...  # names of its hidden states


class SharesWeights:
    """Base of targets whose embedding and output rows draft heads share."""

    model: Any
    shared: Callable[[], Network] | None = None  # makes those of a class that doesn't name them

    @cached_property
    def network(self) -> Network:
        """Those rows; has no layers."""
        return shared_weights(self.model) if self.shared is None else self.shared()

    @property
    def config(self) -> Config:
        return self.network.config


def extra_layer(model: Any, tensors: Mapping[str, Tensor]) -> tuple[Any, Any]:
    """A layer of a model's class beyond those that it runs, with a mixture of experts where the class has one, and the
    module of its rotary angles. `tensors` have the names within a layer, as the class's checkpoints do."""
    from transformers.utils import logging

    config = copy.deepcopy(model.config)
    for name, value in _ONE_LAYER.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    config.pad_token_id = None
    given = {f"layers.0.{name}": tensor for name, tensor in tensors.items()}
    width = config.hidden_size
    given |= {"embed_tokens.weight": torch.zeros(1, width), "norm.weight": torch.ones(width)}
    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    kind = type(model.base_model)
    try:
        whole, report = kind.from_pretrained(  # opens no file: the tensors are given
            None,
            config=config,
            state_dict=given,
            dtype=model.dtype,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises many kinds of errors
        raise Incompatible(f"the layer does not fit {kind.__name__}: {' '.join(str(error).split())[:200]}") from None
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
    for problem, wrong in (("has no tensor", "missing_keys"), ("has another layout, with", "unexpected_keys")):
        if names := sorted(report[wrong]):
            raise Incompatible(f"the layer {problem} '{names[0].removeprefix('layers.0.')}'")
    whole.eval().requires_grad_(False).to(model.device)
    return whole.layers[0], whole.rotary_emb
