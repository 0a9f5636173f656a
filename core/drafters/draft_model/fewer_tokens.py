"""A draft model that predicts its first tokens only, which tokenizers number by how frequent they are.

Restricting a draft model's output layer to frequent tokens is from FR-Spec (arXiv 2502.14856). Exact rules
stay exact, since they read the distribution that was drawn from. Independent of drafters.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch

from outrider.core.engine.linear import Dense, Linear, Selected, fastest
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.kernels import native


def can_predict_fewer(model: Any) -> TypeGuard[Decoder]:
    """Not where layers are loaded in passes, rows have conditions, or only some tokens are predicted already."""
    if type(model) is not Decoder or type(model.network) is not Network:
        return False
    return model.network.before_layer is None and model.network.selected is None


def predicting(model: Decoder, count: int) -> Decoder:
    """A decoder with these weights, and a cache of its own, that predicts its first `count` tokens only (16 n)."""
    network = model.network
    few: Network | None = network.kept.get((predicting, count))
    if few is None:
        head = network.head
        if isinstance(head, native.Tiled):
            rows: Linear = head.first(count)
        else:
            rows = fastest(Dense(head.weight[:count], None if head.bias is None else head.bias[:count]))
        selected = Selected(rows, torch.arange(count, device=network.device), network.config.vocabulary)
        few = Network(network.config, network.embedding, network.layers, network.norm, selected)
        if network.graphs is not None:
            network.graphs.attach(few)
        network.kept[predicting, count] = few
    return Decoder(few, cache_bits=8 if model.cache.store.dtype == torch.int8 else None)
