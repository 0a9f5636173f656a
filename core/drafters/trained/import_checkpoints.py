"""Imports published Medusa, EAGLE and EAGLE-3 checkpoints, also in the `speculators` format, and exports ours in that
format, which vLLM serves.

Reads names of tensors and fields of configs. What a head shares with its target (the embedding, and the output rows
unless it has its own) is not read from the file; a file with another embedding is refused. Pickled checkpoints are
loaded as weights only, by outrider.core.assets.store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets.store import foreign_tensors, read_json
from outrider.core.drafters.trained.eagle import Eagle3Head, EagleHead, spread
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.engine.checkpoints import parse_config
from outrider.core.engine.rotary import qkv_order, rotary_order
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible
from outrider.core.training.draft_head import DraftHead

Made = tuple[DraftHead, dict[str, Tensor]]
_FORM = (
    "heads",
    "kv_heads",
    "head_dim",
    "intermediate_size",
    "rope_theta",
    "rope_scaling",
    "rotary_dim",
    "norm_eps",
    "attention_bias",
    "out_bias",
    "mlp_bias",
)
_BLOCK = re.compile(r"blocks\.(?P<head>\d+)\.layers\.(?P<step>\d+)\.(?P<part>weight|bias)")
_HEAD = re.compile(r"lm_heads\.(\d+)\.weight")
_SPARE = ("embed_tokens.weight", "t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight")


def read_foreign(folder: Path, target: Any) -> DraftHead:
    """The draft head in a folder, for a target that runs on our decoder."""
    described = read_json(folder / "config.json")
    tensors = foreign_tensors(folder)
    kind = described.get("speculators_model_type")
    if "medusa_num_heads" in described or described.get("model_type") == "medusa":
        draft_head, weights = _medusa(described, tensors, target)
    elif kind == "eagle3" or (kind is None and "midlayer.hidden_norm.weight" in tensors):
        draft_head, weights = _eagle3(described, tensors, target)
    elif kind == "eagle" or (kind is None and "fc.weight" in tensors and "layers.0.mlp.up_proj.weight" in tensors):
        draft_head, weights = _eagle(described, tensors, target)
    else:
        raise Incompatible(
            f"{folder} contains a drafter of the kind '{kind or described.get('model_type')}'; supported are Medusa, "
            "EAGLE, EAGLE-3, and eagle and eagle3 of the speculators format"
        )
    if "embed_tokens.weight" in tensors:
        theirs, ours = tensors["embed_tokens.weight"], target.network.embedding
        if theirs.shape != ours.shape or not torch.allclose(theirs.float(), ours.cpu().float(), atol=2e-2):
            raise Incompatible(f"{folder} has an embedding that is not this target's; it was made for another model")
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


class _Take:
    """Takes tensors by name; `done` raises Incompatible if any was not taken."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors, self.left = tensors, set(tensors) - set(_SPARE)

    def __call__(self, name: str) -> Tensor:
        if name not in self.tensors:
            raise Incompatible(f"the drafter's file has no tensor '{name}'; it has another layout")
        self.left.discard(name)
        return self.tensors[name]

    def done(self) -> None:
        left = sorted(name for name in self.left if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise Incompatible(f"the drafter's file contains '{left[0]}', which such a drafter does not use")


def _medusa(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """Medusa. In published files `k.j.linear` are the steps of head k and `k.layers` its output layer, with or without
    the prefix `medusa_head`; in vLLM's they are `blocks.k.layers.j`, with or without biases, and `lm_heads.k`. The
    number of heads is that in the file, since published configs may name fewer."""
    take = _Take(dict(_medusa_names(tensors)))
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


def _form(described: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a drafter's layer that may differ from the target's."""
    layer = dict(described.get("transformer_layer_config") or described)
    layer["model_type"] = layer["model_type"] if layer.get("model_type") in ("llama", "qwen2", "mistral") else "llama"
    facts = asdict(parse_config(layer))
    return {name: facts[name] for name in _FORM}


def _order(heads: int, kv_heads: int, head_dim: int, rotary_dim: int | None) -> Tensor | None:
    """The order of the outputs of queries, keys and values in our blocks; None: as in checkpoints."""
    pairs = rotary_order(head_dim, rotary_dim or head_dim, False)
    return None if pairs is None else qkv_order(heads, kv_heads, head_dim, pairs)


def _layer(take: _Take, at: str, form: Mapping[str, Any]) -> dict[str, Tensor]:
    """A layer's tensors under transformers' names -> under our block's."""
    tensors = {"block.mlp_norm.weight": take(f"{at}.post_attention_layernorm.weight")}
    for part, biased in (("weight", True), ("bias", form["attention_bias"])):
        if biased:
            qkv = [take(f"{at}.self_attn.{one}_proj.{part}") for one in "qkv"]
            joined, order = (
                torch.cat(qkv),
                _order(form["heads"], form["kv_heads"], form["head_dim"], form["rotary_dim"]),
            )
            tensors[f"block.attention.qkv.{part}"] = joined if order is None else joined[order]
    for part, biased in (("weight", True), ("bias", form["out_bias"])):
        if biased:
            tensors[f"block.attention.out.{part}"] = take(f"{at}.self_attn.o_proj.{part}")
    for part, biased in (("weight", True), ("bias", form["mlp_bias"])):
        if biased:
            both = [take(f"{at}.mlp.{one}_proj.{part}") for one in ("up", "gate")]
            tensors[f"block.mlp.up_gate.{part}"] = torch.cat(both)
            tensors[f"block.mlp.down.{part}"] = take(f"{at}.mlp.down_proj.{part}")
    return tensors


def _eagle(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """EAGLE and EAGLE-2: `fc` and one layer without a norm before its attention; named `fusion_fc` and `transformer` in
    the speculators format."""
    take, form = _Take(tensors), _form(described)
    ours = "fusion_fc.weight" in tensors
    fuse, layer = ("fusion_fc", "transformer") if ours else ("fc", "layers.0")
    take.left.discard("lm_head.weight")  # the target's own
    normed = f"{layer}.input_layernorm.weight" in tensors
    draft_head = EagleHead(target, normed=normed, form=form, regress=0.0, noise=0.0)
    weights = _layer(take, layer, form) | {"fuse.weight": take(f"{fuse}.weight")}
    if normed:
        weights["block.attention_norm.weight"] = take(f"{layer}.input_layernorm.weight")
    weights["fuse.bias"] = take(f"{fuse}.bias") if f"{fuse}.bias" in tensors else torch.zeros(target.config.hidden_size)
    take.done()
    return draft_head, weights


def _eagle3(described: Mapping[str, Any], tensors: Mapping[str, Tensor], target: Any) -> Made:
    """EAGLE-3: the layer is `midlayer` in published files, `layers.0` in the speculators format; `d2t` is the
    difference between the target's and the drafter's id of each token."""
    if described.get("norm_before_fc"):
        raise Incompatible("this drafter norms the concatenated taps (norm_before_fc), which ours does not support")
    take, form = _Take(tensors), _form(described)
    layer = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
    rows, depth = len(tensors["lm_head.weight"]), target.config.layers
    vocabulary: Any = 0
    if "d2t" in tensors:
        vocabulary = tensors["d2t"].long() + torch.arange(rows)
    elif rows != target.vocabulary:
        raise Incompatible(f"the drafter has a vocabulary of {rows} tokens and no d2t that says which")
    chosen = described.get("eagle_aux_hidden_state_layer_ids") or (described.get("eagle_config") or {}).get(
        "eagle_aux_hidden_state_layer_ids"
    )
    taps = spread(depth) if not chosen else [_tap(index, depth) for index in chosen]
    steady = bool(described.get("fc_norm", False))
    if steady != bool(described.get("norm_output", False)):
        raise Incompatible("this drafter norms either its taps or its output; ours norms both (steady) or neither")
    draft_head = Eagle3Head(
        target,
        taps=taps,
        steady=steady,
        form=form,
        own=True,
        normed_residual=bool(described.get("norm_before_residual", False)),
        vocabulary=vocabulary,
    )
    weights = _layer(take, layer, form) | {
        "fuse.weight": take("fc.weight"),
        "embedded.weight": take(f"{layer}.input_layernorm.weight"),
        "entered.weight": take(f"{layer}.hidden_norm.weight"),
        "norm.weight": take("norm.weight"),
        "words.own.weight": take("lm_head.weight"),
    }
    weights |= {f"tap_norms.{i}.weight": take(f"fc_norm.{i}.weight") for i in range(len(taps) * steady)}
    if draft_head.words.vocabulary is not None:
        weights["words.vocabulary"] = vocabulary
    take.done()
    return draft_head, weights


def _tap(index: int, depth: int) -> str:
    """The tap of a published layer id, which counts inputs of layers: 0 is the embedding, i the output of layer i -
    1."""
    if not 0 <= index <= depth:
        raise Incompatible(f"the drafter reads the input of layer {index}; this target has {depth} layers")
    return "embedding" if index == 0 else f"layer.{index - 1}"


def write_speculators(draft_head: Eagle3Head, folder: Path, verifier: str, *, length: int = 5) -> None:
    """Write an EAGLE-3 head to a folder in the speculators format, for the target `verifier` (a hub id or a folder).
    Its output rows are included, in the order of their ids, as the format requires."""
    from safetensors.torch import save_file

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
    tensors |= {f"fc_norm.{i}.weight": state[f"tap_norms.{i}.weight"] for i in range(len(draft_head.tap_norms))}
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in tensors.items()
    }
    save_file(stored, str(folder / "model.safetensors"))
    described = _described(draft_head, form, verifier, len(ids), length)
    (folder / "config.json").write_text(json.dumps(described, indent=1) + "\n", encoding="utf-8")


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
    for product, names in products:
        for part, whole in (("weight", product.weight), ("bias", product.bias)):
            if whole is None:
                continue
            sizes = [len(whole) // len(names)] * len(names)
            if len(names) == 3:
                sizes = [form.heads * form.head_dim, shared, shared]
                order = _order(form.heads, form.kv_heads, form.head_dim, form.rotary_dim)
                whole = whole if order is None else whole[order.argsort().to(whole.device)]
            pieces = whole.detach().cpu().split(sizes)
            tensors |= {f"{at}.{name}.{part}": piece for name, piece in zip(names, pieces, strict=True)}
    return tensors


def _described(draft_head: Eagle3Head, form: Config, verifier: str, rows: int, length: int) -> dict[str, Any]:
    layer: dict[str, Any] = {
        "model_type": "llama",
        "vocab_size": form.vocabulary,
        "hidden_size": form.hidden_size,
        "intermediate_size": form.intermediate_size,
        "num_hidden_layers": 1,
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
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": length}],
            "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": layer,
        "draft_vocab_size": rows,
        "norm_before_residual": draft_head.normed_residual,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": [0 if tap == "embedding" else int(tap[6:]) + 1 for tap in draft_head.taps],
        "fc_norm": draft_head.steady,
        "norm_output": draft_head.steady,
    }
