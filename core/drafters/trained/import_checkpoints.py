"""Imports published draft heads: Medusa, Hydra, EAGLE, EAGLE-3, P-EAGLE, DFlash, MTP and Llasa+'s modules, also in
the `speculators` format.

Reads names of tensors and fields of configs. What a head shares with its target (the embedding and the output rows,
unless it has its own) is not read from the file. Pickled checkpoints are loaded as weights only, by
outrider.core.assets.store.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets.files import read_json
from outrider.core.assets.store import foreign_tensors
from outrider.core.drafters.trained.blocks.block_diffusion import DFlashBlock
from outrider.core.drafters.trained.checkpoint_tensors import (
    Take,
    check_target,
    form_of,
    layer_of,
    no_windows,
    own_embedding,
    proposed,
    tap_of,
    taps_of,
    vocabulary_of,
    windows_of,
)
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead, spread
from outrider.core.drafters.trained.heads import HydraHeads, MedusaHeads
from outrider.core.drafters.trained.mtp import MtpModules
from outrider.core.drafters.trained.parallel_eagle import PEagleHead
from outrider.core.drafters.trained.parallel_heads import CascadedModules
from outrider.core.drafters.trained.target_mtp import KINDS as TARGET_KINDS
from outrider.core.drafters.trained.target_mtp import read_target_mtp
from outrider.core.errors import Incompatible
from outrider.core.training.draft_head import DraftHead

Made = tuple[DraftHead, dict[str, Tensor]]
_BLOCK = re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<step>\d+)\.(?P<part>weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")


def read_foreign(folder: Path, target: Any) -> DraftHead:
    """The draft head in a folder, for a target on our decoder or a causal language model of transformers."""
    described = read_json(folder / "config.json", runs_code=False)
    tensors = foreign_tensors(folder)
    check_target(described, target)
    kind = described.get("speculators_model_type") or _kind(described, tensors)
    if kind not in _READERS:
        raise Incompatible(
            f"{folder} contains a drafter of the kind '{kind}', which can't be read; those that can are "
            f"{', '.join(_READERS)}"
        )
    draft_head, weights = _READERS[kind](described, tensors, target)
    own = draft_head.state_dict()
    mismatched = [name for name in own if name not in weights or weights[name].shape != own[name].shape]
    if mismatched:
        raise Incompatible(
            f"{folder} does not fit this target: {len(mismatched)} tensors are missing or have another shape, "
            f"the first is '{mismatched[0]}'"
        )
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(weights[name])
    return draft_head.eval()


def _kind(described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """The kind of a checkpoint that is not in the speculators format, by its config and the names of its tensors."""
    if "medusa_num_heads" in described or described.get("model_type") == "medusa":
        return "medusa"
    if "hydra_num_heads" in described:
        return "hydra"
    if "mtp_1_proj.weight" in tensors:
        return "llasa+"
    if "dflash_config" in described:
        return "dflash"
    if "midlayer.hidden_norm.weight" in tensors:
        return "eagle3"
    if "fc.weight" in tensors and "layers.0.mlp.up_proj.weight" in tensors:
        return "eagle"
    if described.get("num_nextn_predict_layers") or described.get("model_type") in TARGET_KINDS:
        return "target's mtp"
    if any(name.startswith("mtp.") for name in tensors):
        return "mtp"
    return str(described.get("model_type"))


def _medusa(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """Medusa. In published files `k.j.linear` are the steps of head k and `k.layers` its output layer, with or without
    the prefix `medusa_head`; in vLLM's they are `blocks.k.layers.j`, with or without biases, and `lm_heads.k`. The
    number of heads is that in the file, since published configs may name fewer."""
    take = Take(dict(_medusa_names(tensors)))
    places = [name.split(".") for name in take.tensors]
    count = 1 + max((int(place[0]) for place in places if place[0].isdigit()), default=-1)
    layers = 1 + max((int(place[1]) for place in places if place[2:] == ["linear", "weight"]), default=-1)
    if not count or not layers:
        raise Incompatible("the file contains no Medusa heads, whose tensors are named such as '0.0.linear.weight'")
    weights: dict[str, Tensor] = {}

    def step(k: int, j: int) -> tuple[Tensor, Tensor]:
        weight, bias = take(f"{k}.{j}.linear.weight"), f"{k}.{j}.linear.bias"
        return weight, take(bias) if bias in take.tensors else weight.new_zeros(len(weight))

    first = [step(k, 0) for k in range(count)]
    weights["first.weight"], weights["first.bias"] = (torch.cat(parts) for parts in zip(*first, strict=True))
    for k in range(count):
        for j in range(1, layers):
            weights[f"more.{k}.{j - 1}.weight"], weights[f"more.{k}.{j - 1}.bias"] = step(k, j)
        weights[f"outputs.{k}.weight"] = take(f"{k}.{layers}.weight")
    take.done()
    return MedusaHeads(target, heads=count, layers=layers, own=True), weights


def _hydra(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """Hydra's heads, and Hydra++'s behind a layer over the committed states (`prefix-mlp`), whose published parameters
    stand behind dropout layers."""
    kind = described.get("hydra_head_arch", "mlp")
    if kind not in ("mlp", "prefix-mlp") or not described.get("grounded_heads"):
        raise Incompatible(
            f"the Hydra heads are of the kind '{kind}'{'' if described.get('grounded_heads') else ', not grounded'}; "
            "grounded ones of the kinds mlp and prefix-mlp can be read"
        )
    if described.get("hidden_state_offset"):
        raise Incompatible("the Hydra heads read a state below the last (hidden_state_offset), which these do not")
    prefix = kind == "prefix-mlp"
    take = Take({name: tensor for name, tensor in tensors.items() if not name.endswith("embed_tokens.weight")})
    places = [name.split(".") for name in take.tensors]
    count = 1 + max((int(place[1]) for place in places if place[0] == "hydra_lm_head"), default=-1)
    steps = sorted({int(place[2]) for place in places if place[0] == "hydra_mlp" and place[3] == "linear"})
    if not count or not steps:
        raise Incompatible("the file contains no Hydra heads, whose tensors are named such as 'hydra_lm_head.0.weight'")
    output = ".1" if "hydra_lm_head.0.1.weight" in take.tensors else ""
    form = {"qk_norm": False} if prefix else None  # a layer of the target's shape
    draft_head = HydraHeads(
        target,
        heads=count,
        layers=len(steps) - 1,
        prefix=prefix,
        joint=True,
        plain_inputs=True,
        own=True,
        form=form,
    )
    weights: dict[str, Tensor] = {}
    for k in range(count):
        for part in ("weight", "bias"):
            first, row = f"hydra_mlp.{k}.{steps[0]}", f"hydra_lm_head.{k}{output}.{part}"
            weights[f"inputs.{k}.{part}"] = take(f"{first}.linear.{part}")
            weights[f"sums.{k}.{part}"] = take(f"{first}.res_connection.{part}")
            for j, step in enumerate(steps[1:]):
                weights[f"layers.{k}.{j}.{part}"] = take(f"hydra_mlp.{k}.{step}.linear.{part}")
            biased = part == "weight" or row in take.tensors
            weights[f"rows.{k}.{part}"] = take(row) if biased else torch.zeros(target.vocabulary)
    if prefix:
        at = "prefix_embeding_layer.layers.0"
        layer = layer_of(take, at, asdict(draft_head.form)) | {
            "block.attention_norm.weight": take(f"{at}.input_layernorm.weight")
        }
        weights |= {name.replace("block.", "prefix.", 1): tensor for name, tensor in layer.items()}
        weights["prefix_norm.weight"] = take("prefix_embeding_layer.norm.weight")
    take.done()
    return draft_head, weights


def _medusa_names(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors under their published names."""
    steps = 1 + max((int(one["step"]) for name in tensors if (one := _BLOCK.fullmatch(name))), default=-1)
    for name in tensors:
        block, head = _BLOCK.fullmatch(name), _HEAD.fullmatch(name)
        if block is not None:
            yield f"{block['head']}.{block['step']}.linear.{block['part']}", tensors[name]
        elif head is not None:
            yield f"{head[1]}.{steps}.weight", tensors[name]
        else:
            yield name.removeprefix("medusa_head."), tensors[name]


def _eagle(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """EAGLE and EAGLE-2: `fc` and one layer without a norm before its attention; named `fusion_fc` and `transformer` in
    the speculators format."""
    no_windows(described)
    take, form = Take(tensors), form_of(described)
    ours = "fusion_fc.weight" in tensors
    fuse, layer = ("fusion_fc", "transformer") if ours else ("fc", "layers.0")
    take.left.discard("lm_head.weight")  # the target's own
    normed = f"{layer}.input_layernorm.weight" in tensors
    own = own_embedding(tensors, target)
    draft_head = EagleHead(target, normed=normed, form=form, own_embedding=own, regress=0.0, noise=0.0)
    weights = layer_of(take, layer, form) | {"fuse.weight": take(f"{fuse}.weight")}
    if normed:
        weights["block.attention_norm.weight"] = take(f"{layer}.input_layernorm.weight")
    weights["fuse.bias"] = take(f"{fuse}.bias") if f"{fuse}.bias" in tensors else torch.zeros(target.config.hidden_size)
    if own:
        weights["words.embedding"] = take("embed_tokens.weight")
    take.done()
    return draft_head, weights


def _eagle3(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """EAGLE-3: the layer is `midlayer` in published files, `layers.0` in the speculators format. `norm_before_fc` norms
    the concatenated taps, `fc_norm` each of them."""
    return _eagle3_of(Eagle3Head, described, tensors, target)


def _peagle(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """P-EAGLE: EAGLE-3's tensors and the state that stands for an unknown one; the embedding is trained too."""
    mask = described.get("mask_token_id")
    if not isinstance(mask, int) or not 0 <= mask < target.vocabulary:
        raise Incompatible(f"the config's mask_token_id is {mask!r:.40}; it must be a token id of the target")
    extra = {"depth": proposed(described, 5), "mask": mask}
    draft_head, weights = _eagle3_of(PEagleHead, described, tensors, target, extra, ("mask_hidden",))
    weights["mask_hidden"] = tensors["mask_hidden"].flatten()
    return draft_head, weights


def _eagle3_of(
    make: type[Eagle3Head],
    described: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: Any,
    extra: Mapping[str, Any] = {},
    spare: Sequence[str] = (),
) -> Made:
    take, form = Take(tensors), form_of(described)
    layers = (described.get("transformer_layer_config") or described).get("num_hidden_layers") or 1
    take.left -= set(spare)
    layer = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    take("lm_head.weight")
    vocabulary = vocabulary_of(tensors, target)
    trained = bool(described.get("embed_requires_grad", described.get("speculators_model_type") == "peagle"))
    own = own_embedding(tensors, target, trained)
    joint, each = bool(described.get("norm_before_fc")), bool(described.get("fc_norm"))
    draft_head = make(
        target,
        taps=taps_of(described, target.config.layers) or spread(target.config.layers),
        steady=False,
        tap_norm="joint" if joint else "each" if each else "none",
        normed_output=bool(described.get("norm_output", False)),
        form=form,
        own=True,
        own_embedding=own,
        layers=layers,
        windows=windows_of(described, layers).get("windows", ()),
        normed_residual=bool(described.get("norm_before_residual", False)),
        vocabulary=vocabulary,
        **extra,
    )
    weights = layer_of(take, layer, form) | {
        "fuse.weight": take("fc.weight"),
        "embedded.weight": take(f"{layer}.input_layernorm.weight"),
        "entered.weight": take(f"{layer}.hidden_norm.weight"),
        "norm.weight": take("norm.weight"),
        "words.own.weight": take("lm_head.weight"),
    }
    for index in range(1, layers):
        part = layer_of(take, f"layers.{index}", form)
        part["block.attention_norm.weight"] = take(f"layers.{index}.input_layernorm.weight")
        weights |= {name.replace("block.", f"more.{index - 1}.", 1): tensor for name, tensor in part.items()}
    if joint:
        weights["tap_norms.0.weight"] = take("input_norm.weight")
    elif each:
        weights |= {f"tap_norms.{i}.weight": take(f"fc_norm.{i}.weight") for i in range(len(draft_head.taps))}
    if own:
        weights["words.embedding"] = take("embed_tokens.weight")
    if draft_head.words.vocabulary is not None:
        weights["words.vocabulary"] = vocabulary
    take.done()
    return draft_head, weights


def _dflash(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """DFlash in its own format (`dflash_config`, whose layer ids count outputs of layers) and the speculators format. A
    block is an anchor and its masks."""
    own_format, layer = described.get("dflash_config") or {}, described.get("transformer_layer_config") or described
    mask = described.get("mask_token_id", own_format.get("mask_token_id"))
    size = described.get("block_size") or own_format.get("block_size")
    if not isinstance(mask, int) or not 0 <= mask < target.vocabulary or not isinstance(size, int) or size < 2:
        raise Incompatible(
            f"the config's mask_token_id is {mask!r:.40} and its block_size {size!r:.40}; expected a token id of the "
            "target and a number above 1"
        )
    if described.get("sample_from_anchor"):
        raise Incompatible("the drafter guesses from its anchor too (sample_from_anchor), which can't be run here")
    take, form, depth = Take(tensors), form_of({**described, "model_type": "qwen3"}), target.config.layers
    taps = taps_of(described, depth)
    if "target_layer_ids" in own_format:
        ids = [int(index) + 1 for index in own_format["target_layer_ids"]]
        taps = ["last" if index == depth else tap_of(index, depth) for index in ids]
    own = "lm_head.weight" in tensors
    vocabulary = vocabulary_of(tensors, target) if own else 0
    if own:
        take("lm_head.weight")
    if own_embedding(tensors, target):
        raise Incompatible("the drafter has an embedding of its own, which this kind of drafter can't have here")
    layers = int(layer.get("num_hidden_layers", 1))
    draft_head = DFlashBlock(
        target,
        block=size - 1,
        layers=layers,
        taps=taps or (),
        form=form,
        normed_taps=False,
        block_offset=1,
        own=own,
        vocabulary=vocabulary,
        **windows_of(described, layers),
    )
    weights = {
        "fuse.weight": take("fc.weight"),
        "context_norm.weight": take("hidden_norm.weight"),
        "norm.weight": take("norm.weight"),
        "mask": target.network.embedding[mask : mask + 1].detach().cpu(),
    }
    for index in range(draft_head.cached_layers):
        part = layer_of(take, f"layers.{index}", form)
        part["block.attention_norm.weight"] = take(f"layers.{index}.input_layernorm.weight")
        weights |= {name.replace("block.", f"blocks.{index}.", 1): tensor for name, tensor in part.items()}
    if own:
        weights["words.own.weight"] = take("lm_head.weight")
    if draft_head.words.vocabulary is not None:
        weights["words.vocabulary"] = vocabulary
    take.done()
    return draft_head, weights


_MTP_NAMES = {
    "mtp.fc.": "mtp_layers.0.input_proj.",
    "mtp.norm.": "mtp_layers.0.final_layernorm.",
    "mtp.pre_fc_norm_hidden.": "mtp_layers.0.hidden_layernorm.",
    "mtp.pre_fc_norm_embedding.": "mtp_layers.0.token_layernorm.",
    "mtp.layers.0.": "mtp_layers.0.",
}
_MTP_LAYERS = ("llama", "qwen2", "qwen3")


def _mtp(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """One MTP layer, as in the speculators format, or within the target's own checkpoint under `mtp.`. It is applied
    again to its own normed states (FastMTP)."""
    kind = (described.get("transformer_layer_config") or described).get("model_type")
    if kind not in _MTP_LAYERS:
        raise Incompatible(
            f"the MTP layer is one of '{kind}', which can't be read; those of {', '.join(_MTP_LAYERS)} can. Decode "
            "this target without it, for instance with drafter='auto'"
        )
    named = {}
    for name, tensor in tensors.items():
        before = next((start for start in _MTP_NAMES if name.startswith(start)), None)
        if before is not None:
            named[_MTP_NAMES[before] + name.removeprefix(before)] = tensor
        elif name.startswith("mtp_layers."):
            named[name] = tensor
    take, form, at = Take(named), form_of(described), "mtp_layers.0"
    draft_head = MtpModules(target, modules=1, form=form, normed_output=True)
    part = layer_of(take, at, form)
    part["block.attention_norm.weight"] = take(f"{at}.input_layernorm.weight")
    part["fuse.weight"] = take(f"{at}.input_proj.weight")
    part["embedded.weight"] = take(f"{at}.token_layernorm.weight")
    part["entered.weight"] = take(f"{at}.hidden_layernorm.weight")
    weights = {f"chain.0.{name}": tensor for name, tensor in part.items()}
    weights["norm.weight"] = take(f"{at}.final_layernorm.weight")
    take.done()
    return draft_head, weights


def _llasa_plus(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """Llasa+'s modules `mtp_1`, `mtp_2`, beside the frozen model (`llm`), which the file repeats."""
    take, form = Take({name: part for name, part in tensors.items() if not name.startswith("llm.")}), form_of(described)
    count = sum(name.endswith("_proj.weight") and name.count(".") == 1 for name in take.tensors)
    weights: dict[str, Tensor] = {}
    for index in range(count):
        at = f"mtp_{index + 1}"
        part = layer_of(take, f"{at}_block", form)
        part["block.attention_norm.weight"] = take(f"{at}_block.input_layernorm.weight")
        part |= {f"project.{name}": take(f"{at}_proj.{name}") for name in ("weight", "bias")}
        part["norm.weight"] = take(f"{at}_local_RMSNorm.weight")
        weights |= {f"chain.{index}.{name}": tensor for name, tensor in part.items()}
    take.done()
    return CascadedModules(target, modules=count, form=form), weights


_READERS: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Tensor], Any], Made]] = {
    "medusa": _medusa,
    "hydra": _hydra,
    "eagle": _eagle,
    "eagle3": _eagle3,
    "peagle": _peagle,
    "dflash": _dflash,
    "mtp": _mtp,
    "llasa+": _llasa_plus,
    "target's mtp": read_target_mtp,
}
