"""Exports draft heads in the formats in which they are published, to be read again with equal weights: EAGLE and Medusa
in their own formats; EAGLE-3, P-EAGLE, MTP and DFlash in that of speculators, which vLLM serves.

Weights are written in 16 bits. Knows names of tensors and fields of configs.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets.files import write_atomically, write_tensors
from outrider.core.drafters.trained.blocks.block_diffusion import DFlashBlock
from outrider.core.drafters.trained.checkpoint_tensors import row_order
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.drafters.trained.parallel_eagle import PEagleHead
from outrider.core.engine.types import Config
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
    _write(folder, tensors, config)


def _write(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    stored = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    write_tensors(folder / "model.safetensors", stored)
    write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")


def write_speculators(draft_head: Eagle3Head, folder: Path, verifier: str, *, length: int = 5) -> None:
    """Write an EAGLE-3 or P-EAGLE head to a folder in the speculators format, for the target `verifier` (a hub id or a
    folder). Its output rows are included, in the order of their ids, as the format requires."""
    if "last" in draft_head.taps:
        raise Incompatible("the format has no number for the normed state 'last'; train the head with layer taps")
    form, words = draft_head.form, draft_head.words
    known = torch.arange(words.full_vocabulary) if words.vocabulary is None else words.vocabulary.cpu()
    order = known.argsort()
    ids = known[order]
    state = {name: weight.detach().cpu() for name, weight in draft_head.state_dict().items()}
    with torch.no_grad():
        rows = words.own.weight if words.own is not None else words.outputs()
    at = "layers.0"
    tensors = {
        "fc.weight": state["fuse.weight"],
        "norm.weight": state["norm.weight"],
        "lm_head.weight": rows.detach().cpu()[order],
        "d2t": ids - torch.arange(len(ids)),
        "t2d": torch.zeros(words.full_vocabulary, dtype=torch.bool).index_fill_(0, ids, True),
        f"{at}.hidden_norm.weight": state["entered.weight"],
        f"{at}.input_layernorm.weight": state["embedded.weight"],
        f"{at}.post_attention_layernorm.weight": state["block.mlp_norm.weight"],
    }
    tensors |= layer_tensors(draft_head.block, at, form)
    for index, block in enumerate(draft_head.more, 1):
        tensors |= normed_layer_tensors(block, f"layers.{index}", form)
    if draft_head.tap_norm == "joint":
        tensors["input_norm.weight"] = state["tap_norms.0.weight"]
    else:
        tensors |= {f"fc_norm.{i}.weight": state[f"tap_norms.{i}.weight"] for i in range(len(draft_head.tap_norms))}
    if "words.embedding" in state:
        tensors["embed_tokens.weight"] = state["words.embedding"]
    if isinstance(draft_head, PEagleHead):
        tensors["mask_hidden"], length = state["mask_hidden"][None, None], draft_head.masks + 1
    _write(folder, tensors, _eagle3_config(draft_head, verifier, len(ids), length))


def layer_tensors(block: Any, at: str, form: Config) -> dict[str, Tensor]:
    """A layer's matrices, LoRA corrections merged in, under transformers' names; our fused matrices are split."""
    products = (
        (block.attention.qkv, [f"self_attn.{one}_proj" for one in "qkv"]),
        (block.attention.out, ["self_attn.o_proj"]),
        (block.mlp.up_gate, ["mlp.up_proj", "mlp.gate_proj"]),
        (block.mlp.down, ["mlp.down_proj"]),
    )
    shared = form.kv_heads * form.head_dim
    tensors: dict[str, Tensor] = {}
    if block.attention.qk_norm is not None:
        norms = block.attention.qk_norm.detach().cpu()
        tensors |= {f"{at}.self_attn.q_norm.weight": norms[0], f"{at}.self_attn.k_norm.weight": norms[form.heads]}
    for product, names in products:
        for part, whole in (("weight", product.weight), ("bias", product.bias)):
            if whole is None:
                continue
            sizes = [len(whole) // len(names)] * len(names)
            if len(names) == 3:
                sizes = [form.heads * form.head_dim, shared, shared]
                order = row_order(form.heads, form.kv_heads, form.head_dim, form.rotary_dim)
                whole = whole if order is None else whole[order.argsort().to(whole.device)]
            pieces = whole.detach().cpu().split(sizes)
            tensors |= {f"{at}.{name}.{part}": piece for name, piece in zip(names, pieces, strict=True)}
    return tensors


def normed_layer_tensors(block: Any, at: str, form: Config) -> dict[str, Tensor]:
    """The same with the layer's norms."""
    tensors = {f"{at}.post_attention_layernorm.weight": block.mlp_norm.weight.detach().cpu()}
    if block.attention_norm is not None:
        tensors[f"{at}.input_layernorm.weight"] = block.attention_norm.weight.detach().cpu()
    return tensors | layer_tensors(block, at, form)


def layer_config(form: Config, layers: int = 1) -> dict[str, Any]:
    """A drafter's layers as a config of transformers."""
    layer: dict[str, Any] = {
        "model_type": "qwen3" if form.qk_norm else "qwen2" if form.attention_bias and not form.out_bias else "llama",
        "vocab_size": form.vocabulary,
        "hidden_size": form.hidden_size,
        "intermediate_size": form.intermediate_size,
        "num_hidden_layers": layers,
        "num_attention_heads": form.heads,
        "num_key_value_heads": form.kv_heads,
        "head_dim": form.head_dim,
        "rms_norm_eps": form.norm_eps,
        "rope_theta": form.rope_theta,
        "max_position_embeddings": form.context,
        "attention_bias": form.attention_bias,
        "mlp_bias": form.mlp_bias,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
    }
    if form.rotary_dim is not None:
        layer["partial_rotary_factor"] = form.rotary_dim / form.head_dim
    if form.rope_scaling is not None:
        layer["rope_scaling"] = {"rope_type": form.rope_scaling[0], **form.rope_scaling[1]}
    return layer


def _eagle3_config(draft_head: Eagle3Head, verifier: str, rows: int, length: int) -> dict[str, Any]:
    parallel = isinstance(draft_head, PEagleHead)
    kind, architecture = ("peagle", "PEagleSpeculator") if parallel else ("eagle3", "Eagle3Speculator")
    layer = layer_config(draft_head.form, draft_head.cached_layers) | _window_config(draft_head.windows)
    return {
        **_speculators(kind, architecture, verifier, length, layer, ["LlamaForCausalLM"]),
        "draft_vocab_size": rows,
        "norm_before_residual": draft_head.normed_residual,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": _layer_ids(draft_head.taps),
        "norm_before_fc": draft_head.tap_norm == "joint",
        "fc_norm": draft_head.tap_norm == "each",
        "norm_output": draft_head.normed_output,
        "embed_requires_grad": draft_head.config["own_embedding"],
        **({"mask_token_id": draft_head.config["mask"]} if parallel else {}),
    }


def _window_config(windows: Sequence[int | None]) -> dict[str, Any]:
    sizes = {size for size in windows if size is not None}
    if not sizes:
        return {}
    if len(sizes) > 1:
        raise Incompatible(f"the format has one size of windows; these layers have {sorted(sizes)}")
    kinds = ["full_attention" if size is None else "sliding_attention" for size in windows]
    return {"layer_types": kinds, "sliding_window": sizes.pop(), "use_sliding_window": True}


def _layer_ids(taps: Sequence[str]) -> list[int]:
    """Published ids, which count inputs of layers."""
    return [0 if tap == "embedding" else int(tap.removeprefix("layer.")) + 1 for tap in taps]


def _state(draft_head: DraftHead) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in draft_head.state_dict().items()}


def _speculators(
    kind: str,
    architecture: str,
    verifier: str,
    length: int,
    layer: Mapping[str, Any],
    verifiers: Sequence[str] = (),
) -> dict[str, Any]:
    """The config of a drafter in the speculators format; `verifiers`: the architectures of its targets."""
    return {
        "architectures": [architecture],
        "speculators_model_type": kind,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": verifier, "architectures": list(verifiers)},
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
    layer = layer_config(form, len(draft_head.blocks)) | _window_config(draft_head.windows)
    taps = _layer_ids(draft_head.taps)
    sliding, causal = [window is not None for window in draft_head.windows], list(draft_head.causal)
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
