"""Makes targets of transformers model objects: a copy of the weights on our own decoder if it computes the same, else
an adapter around the model's own code.

The copy is renewed when the weights have changed. Independent of text.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from outrider.core.engine import checkpoints
from outrider.core.engine.adapters.recurrent import adapter
from outrider.core.engine.linear import fastest
from outrider.core.engine.long_context import make_decoder
from outrider.core.engine.network import Network
from outrider.core.errors import Incompatible, OutriderError
from outrider.core.protocol import Target

_MAX_COPY_BYTES = 2 << 30  # larger models are not copied, although our own decoder is several times as fast
_SAMPLES = 64  # values of each tensor that are checked for changes
_ATTRIBUTE = "_outrider_copy"


def target_of(model: Any) -> tuple[Callable[[], Target], int]:
    """Return a function that makes targets of a model object, and the model's context length."""
    check_class(model)
    network = copied(model)
    if network is None:
        return adapted(model)

    def make() -> Target:
        network_now = copied(model)
        return adapter(model) if network_now is None else make_decoder(network_now)

    return make, network.config.context


def check_class(model: Any) -> None:
    """Refuse what is not a causal language model by itself."""
    if getattr(model.config, "is_encoder_decoder", False):
        raise Incompatible(
            f"{type(model).__name__} is an encoder-decoder model; Outrider decodes causal language models (decoder "
            "only), and speech recognisers such as Whisper by outrider.speech"
        )


def adapted(model: Any) -> tuple[Callable[[], Target], int]:
    """Return the same for the model's own code, without a copy."""
    first = adapter(model)
    return partial(adapter, model, first.trees), first.context


def copied(model: Any) -> Network | None:
    """Return the weights on our own decoder, or None if that would compute something else. The copy is cached on the
    model object."""
    if sum(
        parameter.numel() * parameter.element_size() for parameter in model.parameters()
    ) > _MAX_COPY_BYTES or _altered(model):
        return None
    fingerprint = _fingerprint(model)
    cached = model.__dict__.get(_ATTRIBUTE)
    if cached is not None and cached[0] == fingerprint:
        copy: Network | None = cached[1]
        return copy
    network: Network | None = None
    try:
        config = checkpoints.parse_config(model.config.to_dict())
        network = checkpoints.assemble(
            config, model.state_dict(), dtype=model.dtype, device=model.device, convert=fastest
        )
    except OutriderError:
        network = None
    model.__dict__[_ATTRIBUTE] = (fingerprint, network)
    return network


def _altered(model: Any) -> bool:
    """Whether hooks, adapters or a replaced forward change what the model's class computes."""
    if not type(model).__module__.startswith("transformers.") or model.device.type == "meta":
        return True
    for module in model.modules():
        if module._forward_hooks or module._forward_pre_hooks:
            return True
        if "forward" in module.__dict__ or hasattr(module, "_hf_hook"):
            return True
    return False


def _fingerprint(model: Any) -> tuple[object, ...]:
    """Return addresses, versions and samples of all tensors; they change with a training step or a merged adapter."""
    parameters = [parameter.detach() for parameter in model.parameters()]
    samples = [parameter.flatten()[:: max(1, parameter.numel() // _SAMPLES)].double().sum() for parameter in parameters]
    addresses = tuple((parameter.data_ptr(), parameter._version) for parameter in model.parameters())
    return addresses, tuple(torch.stack(samples).tolist())
