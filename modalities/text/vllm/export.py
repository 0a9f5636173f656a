"""Exports trained drafters for vLLM: EAGLE-3 in the speculators format, Medusa heads under vLLM's names, and the draft
model as a transformers folder.

Weights are rounded to 16 bits. Target weights that a drafter shares are copied where vLLM expects them in the file.
Starts no server.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from outrider.core.assets.files import read_json, write_atomically, write_tensors
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.drafters.trained.eagle import Eagle3Head
from outrider.core.drafters.trained.export_checkpoints import layer_tensors, write_speculators
from outrider.core.drafters.trained.heads import MedusaHeads
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.methods.trained import EAGLE3, MEDUSA
from outrider.text import recipes
from outrider.text.loading import find, load
from outrider.text.model import TextModel

NOTE = "outrider.json"  # metadata beside the exported weights
_LENGTH = 4
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def export(model: str, drafter: str, folder: Path, *, weights: Path | None = None, length: int = _LENGTH) -> Path:
    """Write the trained weights of a drafter of this model, or those of a file, to a folder for vLLM; `length` is the
    number of tokens that vLLM then drafts."""
    if drafter not in WRITERS:
        raise refused(drafter)
    if length < 1:
        raise InvalidOption(f"length is {length}; it must be 1 drafted token or more")
    path = recipes.find(find(model)[1], drafter) if weights is None else weights
    if path is None:
        raise recipes.missing(model, drafter)
    lm = load(model, device="cpu", dtype="bfloat16")
    target = lm.target()
    if not isinstance(target, Decoder):
        raise Incompatible(f"drafters are trained for targets on our own decoder, and {model} does not run on it")
    draft_head = recipes.load(path, drafter, target).float()
    if isinstance(draft_head, MedusaHeads):
        length = draft_head.depth  # vLLM uses all heads
    folder.mkdir(parents=True, exist_ok=True)
    WRITERS[drafter](draft_head, lm, folder, length)
    note = {"drafter": drafter, "target": lm.name, "length": length, "weights": path.name}
    write_atomically(folder / NOTE, json.dumps(note, indent=1) + "\n")
    return folder


def refused(drafter: str) -> Incompatible:
    """Return the error for a drafter that vLLM cannot run."""
    return Incompatible(
        f"vLLM can't run the drafter '{drafter}'; of trained ones it runs {', '.join(WRITERS)}, and without training "
        "prompt-lookup and suffix"
    )


def _eagle3(draft_head: Any, lm: TextModel, folder: Path, length: int) -> None:
    _check_type(draft_head, Eagle3Head)
    write_speculators(draft_head, folder, str(lm.plain_folder()), length=length)


def _medusa(draft_head: Any, lm: TextModel, folder: Path, length: int) -> None:
    """Write Medusa heads. Heads without their own output layers share the target's full one, because vLLM (0.32)
    rejects the map of a reduced vocabulary; a guess outside our vocabulary is verified like any other."""
    _check_type(draft_head, MedusaHeads)
    words, layers, width = draft_head.words, draft_head.config["layers"], draft_head.form.hidden_size
    if draft_head.outputs and words.vocabulary is not None:
        raise Incompatible("vLLM's Medusa has no reduced vocabulary for heads with output rows of their own")
    tensors: dict[str, Tensor] = {}
    for k in range(draft_head.depth):
        steps = [
            (draft_head.first.weight[k * width : (k + 1) * width], draft_head.first.bias[k * width : (k + 1) * width])
        ]
        steps += [(one.weight, one.bias) for one in draft_head.more[k]]
        for place, (weight, bias) in enumerate(steps):
            tensors |= {f"blocks.{k}.layers.{place}.weight": weight, f"blocks.{k}.layers.{place}.bias": bias}
        if draft_head.outputs:
            tensors[f"lm_heads.{k}.weight"] = draft_head.outputs[k].weight
    if not draft_head.outputs:
        tensors["lm_heads.0.weight"] = lm.target().network.head.weight  # type: ignore[attr-defined]
    _save(tensors, folder)
    config = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": width,
        "num_heads": draft_head.depth,
        "num_hidden_layers": layers,
        "vocab_size": words.full_vocabulary,
        "truncated_vocab_size": words.full_vocabulary,
        "original_lm_head": not draft_head.outputs,
        "medusa_fc_bias": True,
        "torch_dtype": "bfloat16",
    }
    write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")


def _draft_model(draft_head: Any, lm: TextModel, folder: Path, length: int) -> None:
    """Write the draft model with the target's full output layer, because transformers has no reduced vocabularies; a
    guess outside our vocabulary is verified like any other."""
    _check_type(draft_head, SmallModel)
    if (source := lm.plain_folder()) is None:
        raise Incompatible(f"{lm.name} was not loaded from a folder, so there is no config.json to copy")
    network, form = lm.target().network, lm.target().config  # type: ignore[attr-defined]
    tensors = {"model.embed_tokens.weight": network.embedding, "model.norm.weight": draft_head.norm.weight}
    for index, block in enumerate(draft_head.blocks):
        prefix = f"model.layers.{index}"
        tensors |= {
            f"{prefix}.input_layernorm.weight": block.attention_norm.weight,
            f"{prefix}.post_attention_layernorm.weight": block.mlp_norm.weight,
            **layer_tensors(block, prefix, form),
        }
    config = read_json(source / "config.json")
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = network.head.weight
    _save(tensors, folder)
    config |= {"num_hidden_layers": len(draft_head.blocks)}
    write_atomically(folder / "config.json", json.dumps(config, indent=1) + "\n")
    for name in _TOKENIZER:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def _check_type(draft_head: nn.Module, wanted: type) -> None:
    if not isinstance(draft_head, wanted):
        raise Incompatible(f"the file contains a {type(draft_head).__name__}, not a {wanted.__name__}")


def _save(tensors: Mapping[str, Tensor], folder: Path) -> None:
    with torch.no_grad():
        kept = {
            name: (one.detach().cpu().bfloat16() if one.is_floating_point() else one.cpu()).clone().contiguous()
            for name, one in tensors.items()
        }
    write_tensors(folder / "model.safetensors", kept, {"format": "pt"})


WRITERS: Mapping[str, Callable[[Any, TextModel, Path, int], None]] = {
    DRAFT_MODEL.name: _draft_model,
    EAGLE3.name: _eagle3,
    MEDUSA.name: _medusa,
}
