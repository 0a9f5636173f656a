"""Every causal language model class of the installed transformers as a target: a small random checkpoint each, whose
greedy tokens must be those of the class's own `generate`, plain and drafted, or which is refused before anything runs.

    python tests/core/engine/adapters/class_sweep.py --shard 1/4        # a quarter of the classes
    python tests/core/engine/adapters/class_sweep.py --jobs 2 --write   # all of them, and the page in the docs
"""

from __future__ import annotations

import argparse
import copy
import sys
import textwrap
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.engine.adapters.recurrent import RecurrentTarget, adapter
from outrider.core.errors import OutriderError
from outrider.core.methods import make_rule

PAGE = Path(__file__).parents[4] / "docs/guides/transformers-classes.md"
NEW_TOKENS, WORDS, MAX_PARAMETERS = 14, 53, 14_000_000
PROMPTS = ([7, 21, 33, 21, 33, 8, 21], [5, 40, 11, 12, 11])

# sizes by the names that configurations give them; what a class does not have is not set
SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input", "text_vocab_size"), WORDS),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "emb_dim", "word_embed_proj_dim"), 32),
    "embedding_size": 32,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner", "dff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "ffn_hidden_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "shared_intermediate_size", "dim_ff", "d_inner"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads",), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "kv_channels", "attention_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 128),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_shared_experts", "num_shared_experts"), 1),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("qk_nope_head_dim", "v_head_dim"), 8),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 4),
    **dict.fromkeys(("pad_token_id", "eos_token_id", "forced_eos_token_id", "bos_token_id"), None),
    "hidden_size_per_layer_input": 8,
    "sliding_window": 8,
    "attention_window": 8,
    "attention_chunk_size": 8,
    "dropout": 0.0,
    "is_decoder": True,
    "is_encoder_decoder": False,
    "use_cache": True,
}


@dataclass
class Outcome:
    kind: str  # "equal", "refused", "broken" or "not built"
    model_type: str
    name: str
    why: str = ""


def names() -> dict[str, str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def config_of(model_type: str, layers: int = 2) -> Any:
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    fields = _sizes(kind(), layers) | OWN.get(model_type, {})
    try:
        return kind(**fields)
    except Exception:  # some classes require ids of special tokens
        return kind(**{name: 0 if name.endswith("token_id") and not value else value for name, value in fields.items()})


# what a class needs beside or instead of these
OWN: dict[str, dict[str, Any]] = {"xmod": {"languages": ["en_XX"], "default_language": "en_XX"}}


def _sizes(default: Any, layers: int) -> dict[str, Any]:
    """The sizes for the fields that a default configuration has."""
    fields: dict[str, Any] = {}
    for name, value in default.to_dict().items():
        if name in ("head_dim", "num_key_value_heads") and hasattr(default, "qk_rope_head_dim"):
            fields[name] = SIZES["qk_rope_head_dim" if name == "head_dim" else "num_attention_heads"]
            continue
        inner = vars(default).get(name)
        if hasattr(inner, "to_dict") and hasattr(inner, "model_type"):
            fields[name] = {**_sizes(inner, layers), "model_type": inner.model_type}
        elif name in SIZES:
            fields[name] = layers if SIZES[name] == 2 and "layer" in name else SIZES[name]
        elif name in ("layer_types", "layers_block_type", "mlp_layer_types", "attention_layers") and value:
            kinds = list(dict.fromkeys(value))
            fields[name] = [kinds[index % len(kinds)] for index in range(layers)]
    return fields


def model_of(model_type: str, seed: int = 0) -> Any:
    """The class's model with random weights that make it neither certain nor indifferent."""
    import transformers

    kind, config = getattr(transformers, names()[model_type]), config_of(model_type)
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in kind(copy.deepcopy(config)).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size:,} parameters at these sizes")
    torch.manual_seed(seed)
    model = kind(config).eval().float()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter += 0.5 * torch.randn_like(parameter) / parameter.shape[-1] ** 0.5
    return model


def generated(model: Any, prompt: Sequence[int]) -> list[int]:
    """The class's own greedy tokens."""
    ids = torch.tensor([prompt])
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=NEW_TOKENS,
            eos_token_id=None,
            pad_token_id=0,
        )
    return [int(token) for token in out[0, len(prompt) :]]


def decoded(target: Any, drafter: Any, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in prompts]
    greedy = Sampling(temperature=0)
    for step in decode(target, drafter, make_rule(), prompts, sampling=greedy, max_new_tokens=NEW_TOKENS):
        tokens[step.row] += step.emitted
    return tokens


def outcome(model_type: str) -> Outcome:
    name = names()[model_type]
    try:
        model, drafts = model_of(model_type), model_of(model_type)
        with torch.no_grad():
            for parameter in drafts.parameters():
                parameter += 0.03 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
        expected = [generated(model, prompt) for prompt in PROMPTS]
    except Exception as error:  # its own class does not run at this size
        return Outcome("not built", model_type, name, f"{type(error).__name__}: {error}")
    try:
        target, draft_model = adapter(model), adapter(drafts)
    except OutriderError as error:
        return Outcome("refused", model_type, name, str(error))
    except Exception as error:
        return Outcome("broken", model_type, name, f"{type(error).__name__}: {error}")
    ways: dict[str, Callable[[], Any]] = {
        "plain": lambda: None,
        "prompt-lookup": lambda: PromptLookup(),
        "draft-model": lambda: DraftModel(draft_model, length=3),
    }
    for way, drafter in ways.items():
        try:
            alone = [decoded(target, drafter(), [prompt])[0] for prompt in PROMPTS[: 1 if drafter() else 2]]
            batch = decoded(target, drafter(), PROMPTS)
        except Exception as error:
            return Outcome("broken", model_type, name, f"{way}: {type(error).__name__}: {error}")
        if alone != expected[: len(alone)] or batch != expected:
            where = "alone" if alone != expected[: len(alone)] else "in a batch"
            return Outcome("broken", model_type, name, f"{way}: other tokens {where} ({target.trees})")
    return Outcome("equal", model_type, name, "state" if isinstance(target, RecurrentTarget) else target.trees)


def table(outcomes: Sequence[Outcome], version: str) -> str:
    """The page of the documentation."""
    kinds = Counter(found.kind for found in outcomes)
    rows = {"equal": [], "refused": [], "not built": []}  # type: dict[str, list[str]]
    for found in sorted(outcomes, key=lambda found: found.model_type):
        why = " ".join(found.why.split()).replace("|", "/")
        if found.kind == "equal":
            trees = {"mask": "one pass", "state": "a pass per leaf"}.get(found.why, "a row per leaf")
            rows["equal"].append(f"| `{found.model_type}` | {found.name} | {trees} |")
        elif found.kind == "refused":
            reason = why.removeprefix(found.name).partition(", so ")[0].strip()
            rows["refused"].append(f"| `{found.model_type}` | {found.name} | {reason} |")
        else:
            rows[found.kind].append(f"`{found.model_type}`")
    return f"""# Classes of transformers

Causal language model classes of transformers {version} as targets, each with a small random checkpoint
(`tests/core/engine/adapters/class_sweep.py`, which writes this page). *Equal*: plain, with `prompt-lookup` and with a
draft model, alone and in a batch of unequal prompts, the greedy tokens are those of the class's own `generate`.
*Refused*: loading raises an error with this reason before anything runs; use the class's `generate`. *Draft trees*:
as the class itself scores them, through `core.engine.adapters`; our own decoder, which `text.load` chooses for the
architectures of [this list](architectures.md), scores every tree in one pass.

{kinds["equal"]} equal, {kinds["refused"]} refused, {kinds["broken"]} with other tokens; {kinds["not built"]} are \
composite or do not build or run at this size, and are not compared.

## Equal

| `model_type` | class | draft trees |
|---|---|---|
{chr(10).join(rows["equal"])}

Classes with attention windows keep all entries and mask those outside the window, so that rejected tokens can be
removed. Classes that take positions from the columns of the cache are read row by row where prompts differ in length.

## Refused

| `model_type` | class | it |
|---|---|---|
{chr(10).join(rows["refused"])}

## Not compared

{textwrap.fill(", ".join(rows["not built"]), 120, break_long_words=False, break_on_hyphens=False)}
"""


def main(arguments: Sequence[str]) -> int:
    import transformers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shard", default="0/1", help="0/2: the first half")
    parser.add_argument("--only", nargs="*", help="model types")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--write", action="store_true", help="write the page of the documentation")
    options = parser.parse_args(arguments)
    number, count = map(int, options.shard.split("/"))
    chosen, outcomes = options.only or sorted(names())[number::count], []
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        for found in pool.map(outcome, chosen):
            print(f"{found.kind:10} {found.model_type:28} {' '.join(found.why.split())[:150]}", flush=True)
            outcomes.append(found)
    print(Counter(found.kind for found in outcomes))
    if options.write:
        PAGE.write_text(table(outcomes, transformers.__version__), encoding="utf-8")
    return int(any(found.kind == "broken" for found in outcomes))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    sys.exit(main(sys.argv[1:]))
