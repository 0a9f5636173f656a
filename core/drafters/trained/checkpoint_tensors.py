"""What importers of published draft heads share: tensors taken by name, a layer's configuration and weights, taps and
reduced vocabularies. Knows nothing of single formats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.checkpoints import parse_config
from outrider.core.engine.rotary import qkv_order, rotary_order
from outrider.core.errors import Incompatible

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
    "qk_norm",
)
_SPARE = ("embed_tokens.weight", "t2d", "d2t", "verifier_lm_head.weight", "verifier_norm.weight")
_ALIKE = 0.3  # the mean cosine of rows of a fine-tuned embedding with those of the target is above it
_LAYERS = ("llama", "qwen2", "qwen3", "mistral")


class Take:
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


def form_of(described: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a drafter's layer that may differ from the target's."""
    layer = dict(described.get("transformer_layer_config") or described)
    layer = {name: value for name, value in layer.items() if name not in ("layer_types", "sliding_window")}
    layer["model_type"] = layer["model_type"] if layer.get("model_type") in _LAYERS else "llama"
    facts = asdict(parse_config(layer))
    return {name: facts[name] for name in _FORM}


def row_order(heads: int, kv_heads: int, head_dim: int, rotary_dim: int | None) -> Tensor | None:
    """The order of the outputs of queries, keys and values in our blocks; None: as in checkpoints."""
    pairs = rotary_order(head_dim, rotary_dim or head_dim, False)
    return None if pairs is None else qkv_order(heads, kv_heads, head_dim, pairs)


def layer_of(take: Take, at: str, form: Mapping[str, Any]) -> dict[str, Tensor]:
    """A layer's tensors under transformers' names -> under our block's."""
    tensors = {"block.mlp_norm.weight": take(f"{at}.post_attention_layernorm.weight")}
    pairs = rotary_order(form["head_dim"], form["rotary_dim"] or form["head_dim"], False)  # None: as in checkpoints
    for part, biased in (("weight", True), ("bias", form["attention_bias"])):
        if biased:
            qkv = [take(f"{at}.self_attn.{one}_proj.{part}") for one in "qkv"]
            joined = torch.cat(qkv)
            order = row_order(form["heads"], form["kv_heads"], form["head_dim"], form["rotary_dim"])
            tensors[f"block.attention.qkv.{part}"] = joined if order is None else joined[order]
    if form["qk_norm"]:
        query, key = (take(f"{at}.self_attn.{one}_norm.weight") for one in "qk")
        norms = [query.expand(form["heads"], -1), key.expand(form["kv_heads"], -1)]
        tensors["block.attention.qk_norm"] = torch.cat(norms) if pairs is None else torch.cat(norms)[:, pairs]
    for part, biased in (("weight", True), ("bias", form["out_bias"])):
        if biased:
            tensors[f"block.attention.out.{part}"] = take(f"{at}.self_attn.o_proj.{part}")
    for part, biased in (("weight", True), ("bias", form["mlp_bias"])):
        if biased:
            both = [take(f"{at}.mlp.{one}_proj.{part}") for one in ("up", "gate")]
            tensors[f"block.mlp.up_gate.{part}"] = torch.cat(both)
            tensors[f"block.mlp.down.{part}"] = take(f"{at}.mlp.down_proj.{part}")
    return tensors


def tap_of(index: int, depth: int) -> str:
    """The tap of a published layer id, which counts inputs of layers: 0 is the embedding, i the output of layer i -
    1."""
    if not 0 <= index <= depth:
        raise Incompatible(f"the drafter reads the input of layer {index}; this target has {depth} layers")
    return "embedding" if index == 0 else f"layer.{index - 1}"


def taps_of(described: Mapping[str, Any], depth: int) -> list[str] | None:
    """The taps that a config names by its layer ids; None: it names none."""
    nested = described.get("eagle_config") or {}
    name = "eagle_aux_hidden_state_layer_ids"
    chosen = described.get(name) or nested.get(name) or described.get("aux_hidden_state_layer_ids")
    return [tap_of(index, depth) for index in chosen] if chosen else None


def vocabulary_of(tensors: Mapping[str, Tensor], target: Any) -> Any:
    """The target's ids of a drafter's output rows, from d2t, the difference between the target's and the drafter's id
    of each token; 0: all of them, in order."""
    rows = len(tensors["lm_head.weight"])
    if "d2t" not in tensors:
        if rows != target.vocabulary:
            raise Incompatible(
                f"the drafter has a vocabulary of {rows:,} tokens and no d2t that says which of the target's "
                f"{target.vocabulary:,} they are; it was made for another model, or its file is incomplete"
            )
        return 0
    ids = tensors["d2t"].long() + torch.arange(len(tensors["d2t"]))
    if len(ids) != rows or int(ids.min()) < 0 or int(ids.max()) >= target.vocabulary or len(set(ids.tolist())) < rows:
        raise Incompatible(
            f"the drafter's d2t maps {len(ids):,} tokens to ids up to {int(ids.max()):,}, and the target has "
            f"{target.vocabulary:,}; it was made for a model with another vocabulary"
        )
    return ids


def proposed(described: Mapping[str, Any], default: int) -> int:
    """The number of tokens that a speculators config drafts."""
    methods = (described.get("speculators_config") or {}).get("proposal_methods") or [{}]
    count = methods[0].get("speculative_tokens")
    return count if isinstance(count, int) and count > 0 else default


def no_windows(described: Mapping[str, Any]) -> None:
    """Refuse drafters whose layers have windows, which those of the class here have not."""
    layer = described.get("transformer_layer_config") or described
    if "sliding_attention" in (layer.get("layer_types") or ())[: layer.get("num_hidden_layers") or 1]:
        raise Incompatible("the drafter's layers have sliding windows, which EAGLE's do not have here")


def windows_of(described: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The windows and causal blocks of a drafter's layers. DFlash's sliding layers are causal in their block unless the
    config says otherwise; in the speculators format a window is counted from the block's first token."""
    own, layer = described.get("dflash_config") or {}, described.get("transformer_layer_config") or described
    kinds = layer.get("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}:
        raise Incompatible(f"the config's layer_types are {kinds!r:.60}; expected full or sliding for {layers} layers")
    sliding = [kind == "sliding_attention" for kind in kinds]
    causal = [False] * layers if described.get("sliding_window_non_causal") else list(sliding)
    for given in (layer.get("is_causal"), own.get("causal")):
        causal = causal if given is None else [bool(given)] * layers
    if own.get("use_swa") and not any(sliding):
        sliding = [True] * layers
    if not any(sliding):
        return {"causal": causal} if any(causal) else {}
    size = own.get("swa_window_size", layer.get("sliding_window"))
    if not isinstance(size, int) or size < 1:
        raise Incompatible(f"the drafter's layers have sliding windows of {size!r:.20} tokens; expected 1 or more")
    windows = [size if windowed else None for windowed in sliding]
    return {"windows": windows, "causal": causal, "anchored": "speculators_model_type" in described}


def check_target(described: Mapping[str, Any], target: Any) -> None:
    """Refuse a drafter whose config names a target of another size."""
    layer, sizes = described.get("transformer_layer_config") or described, target.config
    verifier = (described.get("speculators_config") or {}).get("verifier") or {}
    made_for = verifier.get("name_or_path") or described.get("base_model_name_or_path") or "another model"
    for name, ours in (("hidden_size", sizes.hidden_size), ("vocab_size", sizes.vocabulary)):
        theirs = described.get(f"target_{name}") or layer.get(name)
        if isinstance(theirs, int) and theirs != ours:
            raise Incompatible(
                f"the drafter was made for {made_for}, with a {name} of {theirs:,}, and this target has {ours:,}; give "
                "the drafter of this target"
            )


def own_embedding(tensors: Mapping[str, Tensor], target: Any, trained: bool = False) -> bool:
    """Whether a drafter has an embedding of its own: a fine-tuned copy of the target's. One that is unrelated to the
    target's is refused, unless its config says that it was `trained`."""
    if "embed_tokens.weight" not in tensors:
        return False
    theirs, ours = tensors["embed_tokens.weight"].float(), target.network.embedding.detach().cpu().float()
    if theirs.shape != ours.shape:
        raise Incompatible(
            f"the drafter's embedding has the shape {tuple(theirs.shape)}, the target's {tuple(ours.shape)}; it was "
            "made for another model"
        )
    if torch.allclose(theirs, ours, atol=2e-2):
        return False
    likeness = torch.nn.functional.cosine_similarity(theirs, ours, dim=1).mean()
    if not trained and float(likeness) < _ALIKE:
        raise Incompatible("the drafter's embedding is unrelated to this target's; it was made for another model")
    return True
