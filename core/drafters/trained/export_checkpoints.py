"""Exports draft heads in the formats in which they are published, to be read again with equal weights: EAGLE and Medusa
in their own formats, MTP and DFlash in that of speculators; EAGLE-3 and P-EAGLE by import_checkpoints.

Weights are written in 16 bits. Knows names of tensors and fields of configs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets.files import write_atomically, write_tensors
from outrider.core.drafters.trained.block_diffusion import DFlashBlock
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead, PEagleHead
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.drafters.trained.import_checkpoints import (
    layer_config,
    normed_layer_tensors,
    write_speculators,
)
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.errors import Incompatible
from outrider.core.training.draft_head import DraftHead

Written = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and config


def write_published(draft_head: DraftHead, folder: Path, verifier: str) -> None:
    """Write a draft head to a folder in its published format, for the target `verifier` (a hub id or a folder)."""
    if isinstance(draft_head, Eagle3Head):
        write_speculators(draft_head, folder, verifier)
        return
    if type(draft_head) not in _WRITERS:
        raise Incompatible(
            f"a {type(draft_head).__name__} has no published format; those that have are "
            f"{', '.join(kind.__name__ for kind in (*_WRITERS, Eagle3Head, PEagleHead))}"
        )
    tensors, config = _WRITERS[type(draft_head)](draft_head, verifier)
    stored = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / "model.safetensors", stored)
    write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")


def _state(draft_head: DraftHead) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in draft_head.state_dict().items()}


def _speculators(kind: str, architecture: str, verifier: str, length: int, layer: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
        "transformer_layer_config": dict(layer),
    }


def _medusa(draft_head: Any, verifier: str) -> Written:
    if not draft_head.outputs:
        raise Incompatible("these Medusa heads share the target's output rows; published ones have their own")
    tensors, width = dict[str, Tensor](), draft_head.form.hidden_size
    for k in range(draft_head.depth):
        rows = slice(k * width, (k + 1) * width)
        steps = [(draft_head.first.weight[rows], draft_head.first.bias[rows])]
        steps += [(step.weight, step.bias) for step in draft_head.more[k]]
        for j, (weight, bias) in enumerate(steps):
            tensors |= {f"{k}.{j}.linear.weight": weight.detach().cpu(), f"{k}.{j}.linear.bias": bias.detach().cpu()}
        tensors[f"{k}.{len(steps)}.weight"] = draft_head.outputs[k].weight.detach().cpu()
    config = {"medusa_num_heads": draft_head.depth, "medusa_num_layers": draft_head.config["layers"]}
    return tensors, config | {"base_model_name_or_path": verifier}


def _eagle(draft_head: Any, verifier: str) -> Written:
    state = _state(draft_head)
    tensors = {"fc.weight": state["fuse.weight"], "fc.bias": state["fuse.bias"]}
    tensors |= normed_layer_tensors(draft_head.block, "layers.0", draft_head.form)
    if "words.embedding" in state:
        tensors["embed_tokens.weight"] = state["words.embedding"]
    return tensors, {"base_model_name_or_path": verifier, **layer_config(draft_head.form)}


def _mtp(draft_head: Any, verifier: str) -> Written:
    if len(draft_head.chain) > 1 or not draft_head.normed_output:
        raise Incompatible("the format has one MTP layer, whose normed states are fed back; these modules differ")
    at, module = "mtp_layers.0", draft_head.chain[0]
    parts = {"token_layernorm": module.embedded, "hidden_layernorm": module.entered}
    parts |= {"input_proj": module.fuse, "final_layernorm": draft_head.norm}
    tensors = {f"{at}.{name}.weight": part.weight.detach().cpu() for name, part in parts.items()}
    tensors |= normed_layer_tensors(module.block, at, draft_head.form)
    layer = layer_config(draft_head.form)
    return tensors, _speculators("mtp", "MTPDraftModel", verifier, draft_head.rounds, layer)


def _dflash(draft_head: Any, verifier: str) -> Written:
    embedding = draft_head.words.embedding.detach().cpu().float()
    masks = (embedding == draft_head.mask.detach().cpu().float()).all(1).nonzero().flatten()
    if draft_head.tap_norms or draft_head.block_offset != 1 or "last" in draft_head.taps or not len(masks):
        raise Incompatible(
            "the format has no norms of taps and no 'last' tap, and its mask is one of the target's tokens; this block "
            "differs"
        )
    state, words, form = _state(draft_head), draft_head.words, draft_head.form
    names = {"fc": "fuse", "hidden_norm": "context_norm", "norm": "norm"}
    tensors = {f"{name}.weight": state[f"{part}.weight"] for name, part in names.items()}
    for index, block in enumerate(draft_head.blocks):
        tensors |= normed_layer_tensors(block, f"layers.{index}", form)
    layer = layer_config(form, len(draft_head.blocks))
    taps = [0 if tap == "embedding" else int(tap.removeprefix("layer.")) + 1 for tap in draft_head.taps]
    sliding, causal = [window is not None for window in draft_head.windows], list(draft_head.causal)
    if any(sliding):
        layer["layer_types"] = ["sliding_attention" if windowed else "full_attention" for windowed in sliding]
        layer["sliding_window"], layer["use_sliding_window"] = max(filter(None, draft_head.windows)), True
    if (any(sliding) or any(causal)) and not draft_head.anchored:  # the format of DFlash itself
        config = {**layer, "base_model_name_or_path": verifier}
        config["dflash_config"] = {"mask_token_id": int(masks[0]), "target_layer_ids": [tap - 1 for tap in taps]}
        if causal != sliding:
            config["dflash_config"]["causal"] = causal[0]
    else:
        config = _speculators("dflash", "DFlashSpeculator", verifier, draft_head.depth, layer)
        config["mask_token_id"], config["aux_hidden_state_layer_ids"] = int(masks[0]), taps
        config["draft_vocab_size"], config["sliding_window_non_causal"] = words.count, causal != sliding
    config["block_size"] = draft_head.depth + 1
    if words.own is not None:
        ids = torch.arange(words.full_vocabulary) if words.vocabulary is None else words.vocabulary.cpu()
        order = ids.argsort()
        tensors["lm_head.weight"] = words.own.weight.detach().cpu()[order]
        if words.vocabulary is not None:
            tensors["d2t"] = ids[order] - torch.arange(len(ids))
            tensors["t2d"] = torch.zeros(words.full_vocabulary, dtype=torch.bool).index_fill_(0, ids, True)
    return tensors, config


_WRITERS: Mapping[type, Callable[[Any, str], Written]] = {
    MedusaHeads: _medusa,
    EagleHead: _eagle,
    MtpModules: _mtp,
    DFlashBlock: _dflash,
}
