"""Model objects of transformers as targets: a copy of their weights on our own decoder where that computes the same,
else their own code.

A copy is made anew when the weights have changed. Knows nothing of text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outrider.core.engine import checkpoints
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import OutriderError
from outrider.core.protocol import Target

_COPIED = 2 << 30  # bytes of weights up to which they are copied: our own decoder is several times as fast
_SAMPLED = 64  # numbers of each tensor that are looked at for a change
_NAME = "_outrider_copy"


def target_of(model: Any) -> tuple[Callable[[], Target], int]:
    """What makes a target of a model object, and the model's context."""
    network = copied(model)
    if network is None:
        return adapted(model)

    def make() -> Target:
        now = copied(model)
        return TransformersTarget(model) if now is None else Decoder(now)

    return make, network.config.context


def adapted(model: Any) -> tuple[Callable[[], Target], int]:
    """On transformers' own code, whatever it computes."""
    first = TransformersTarget(model)
    return partial(TransformersTarget, model, trees=first.trees), first.context


def copied(model: Any) -> Network | None:
    """The weights on our own decoder; None where that would be another model. The copy lives as long as the object."""
    if sum(one.numel() * one.element_size() for one in model.parameters()) > _COPIED or _altered(model):
        return None
    now = _fingerprint(model)
    held = model.__dict__.get(_NAME)
    if held is not None and held[0] == now:
        network: Network | None = held[1]
        return network
    try:
        described = model.config.to_dict()
        network = checkpoints.assemble(
            checkpoints.parse_config(described),
            model.state_dict(),
            dtype=model.dtype,
            device=model.device,
            convert=fastest,
        )
    except OutriderError:
        network = None
    model.__dict__[_NAME] = (now, network)
    return network


def _altered(model: Any) -> bool:
    """Does it compute something else than its class says: with hooks, adapters, or a forward pass of its own?"""
    if not type(model).__module__.startswith("transformers.") or model.device.type == "meta":
        return True
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return True
        if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
            return True
    return False


def _fingerprint(model: Any) -> tuple[object, ...]:
    """Changes when a training step is taken or an adapter merged: places, versions, and a sample of each tensor."""
    parameters = [one.detach() for one in model.parameters()]
    samples = [one.flatten()[:: max(1, one.numel() // _SAMPLED)].double().sum() for one in parameters]
    places = tuple((one.data_ptr(), one._version) for one in model.parameters())
    return places, tuple(torch.stack(samples).tolist())
