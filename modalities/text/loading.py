"""Loads text models by name, hub id, folder or GGUF file, or from a model object of transformers.

Architectures in outrider.core.engine.architectures run on our own decoder, other causal language models through
transformers. Files are opened by outrider.core.assets.store.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from outrider.core.assets import store
from outrider.core.device import AUTO, usable_device, usual_dtype
from outrider.core.engine.loading import model_object
from outrider.core.engine.loading.folder import DTYPES, LoadError, converted_dtype, stored_dtype, target_of_folder
from outrider.core.engine.network import Network
from outrider.core.engine.quantization.published import converted
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels import native
from outrider.core.validation import dtype_name
from outrider.text.drafter_inputs import drafters_of_head
from outrider.text.model import TextModel
from outrider.text.tokenizer import Tokens

KV_CACHE_DTYPES = ("int8",)


def load(
    source: str | Path | Any,
    *,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    draft_model: Any = None,
    head: Any = None,
    revision: str | None = None,
    tokenizer: Any = None,
    offload: float | None = None,
    kv_cache_dtype: str | None = None,
    drafting: bool = False,
) -> TextModel:
    """Load a language model.

    `source` is "smollm2-135m" or another asset, a hub id (`revision` is a commit), a folder with config.json and
    safetensors, a GGUF file, or a model object of transformers, which needs `tokenizer` too.

    `device` is by default the best of this machine: cuda, else mps, else cpu; `dtype` then bfloat16, or float16 on
    devices that do not compute in bfloat16.

    `draft_model` is another such source, or a TextModel. It is used by every drafter that takes a draft model; the
    default drafter is then "draft-model", of one text with the length that is fastest at the recent acceptance rate.

    `head` is a draft head: a file, a folder, or the hub id of a published one; a checkpoint with its own MTP layer is
    named again. It is used by the drafters that it fits; the default drafter is then the last of them, such as
    "eagle3".

    `offload` is for models that do not fit into memory: the part of the layers to keep there, as a fraction or in
    bytes. The others are read from the disk in every pass (on a GPU: from the host's memory). Outputs are unchanged.

    `kv_cache_dtype="int8"` stores keys and values in 8 bits, which about halves the KV cache. The rounding can change
    outputs; drafting still does not.

    `dtype="int4"` keeps the weights of a GGUF file: those that it has in 4 bits as they are, those in 5 to 8 bits in 8.
    `drafting` rounds the latter to 4, which is faster and enough for a model that only drafts.

    >>> lm = load("smollm2-135m", dtype="float32")
    >>> lm.generate("Count to three.", drafter=None, max_new_tokens=8).trace.summary().tokens_per_pass
    1.0
    """
    place = usable_device(device)
    dtype = usual_dtype(place) if dtype == AUTO else dtype_name(dtype, DTYPES)
    if kv_cache_dtype is not None and kv_cache_dtype not in KV_CACHE_DTYPES:
        raise unknown("kv_cache_dtype", kv_cache_dtype, KV_CACHE_DTYPES)
    if not isinstance(source, str | Path):
        if kv_cache_dtype is not None:
            raise InvalidOption(
                "kv_cache_dtype needs our own decoder; a model object keeps keys and values in its own cache"
            )
        if offload is not None:
            raise InvalidOption("offload is for weights that are loaded here; a model object has loaded its own")
        return _with_drafts(of_object(source, tokenizer), draft_model, head)
    folder, name = find(source, dtype=converted_dtype(dtype), revision=revision)
    described = store.read_json(_config(folder))
    tokens = Tokens.load(folder) if tokenizer is None else Tokens.of_transformers(tokenizer)
    make, context = target_of_folder(
        folder, dtype, place, offload=offload, kv_cache_dtype=kv_cache_dtype, drafting=drafting
    )
    target = make()
    if tokens.size > target.vocabulary:
        raise LoadError(
            f"the tokenizer has {tokens.size:,} tokens and the model {target.vocabulary:,}; they do not match"
        )
    if dtype == stored_dtype(dtype) and offload is None and isinstance(target, Decoder):
        target.network.kept["stored", 4] = partial(_in_4_bits, source, revision, folder, place)
    end = end_tokens(folder, described, tokens)
    lm = TextModel(
        make,
        tokens,
        name=name,
        end=end,
        context=context,
        dtype=dtype,
        device=str(place),
        kv_cache_dtype=kv_cache_dtype,
        folder=folder,
        plain=(lambda: find(source)[0]) if converted(described) else None,
        load_other=companion,
    )
    if Path(source).suffix.lower() == ".gguf":
        lm.source = str(source)
    return _with_drafts(lm, draft_model, head)


def _in_4_bits(source: str | Path, revision: str | None, folder: Path, device: torch.device) -> Network | None:
    """The network for drafts, if the source is a GGUF file, whose 4-bit weights have a folder of their own."""
    if find(source, dtype="int4", revision=revision)[0] == folder:
        return None
    target = load(source, device=device, dtype="int4", revision=revision, drafting=True).target()
    return target.network if isinstance(target, Decoder) else None


def _with_drafts(lm: TextModel, draft_model: Any, head: Any) -> TextModel:
    """Set the model's draft model and draft head, which are loaded first if they are given by name."""
    named = isinstance(draft_model, str | Path) and Path(draft_model).suffix != ".safetensors"
    lm.draft_model = lm.companion(str(draft_model)) if named else draft_model
    if head is not None:
        drafters_of_head(lm, head)
        lm.head = head
    return lm


def companion(model: TextModel, source: str) -> TextModel:
    """Load another model, given as NAME or NAME:DTYPE, to draft for a model on its device: by default in its precision,
    and for one in 16 bits on a CPU in 4 bits, where our kernels multiply these: a token then reads a quarter."""
    name, _, dtype = source.rpartition(":")
    if not name or dtype not in DTYPES:
        fewer = model.dtype == "bfloat16" and model.device == "cpu" and native.library() is not None
        name, dtype = source, "int4" if fewer else model.dtype
    return load(name, device=model.device, dtype=dtype, drafting=True)


def find(source: str | Path, *, dtype: str | None = "bfloat16", revision: str | None = None) -> tuple[Path, str]:
    """A source's folder of safetensors, fetched or converted first if necessary, and the model's name. With None for
    `dtype` no weights are converted: for its tokenizer."""
    known = [name for name, asset in store.ASSETS.items() if asset.language_model]
    if str(source) in known:
        folder = store.fetch(str(source))
        files = sorted(folder.glob("*.gguf"))
        return (store.convert_gguf(files[0], dtype) if files else folder), str(source)
    path = Path(source).expanduser()
    if path.suffix.lower() == ".gguf":
        return store.convert_gguf(path, dtype), path.stem
    if path.is_dir():
        return path, path.resolve().name
    if isinstance(source, Path) or not store.is_hub_id(source):
        raise LoadError(
            f"there is no model '{source}': it is not a folder or GGUF file here, not a hub id (owner/name), "
            f"and none of {', '.join(known)}"
        )
    return store.hub_folder(str(source), revision=revision), str(source)


def _config(folder: Path) -> Path:
    path = folder / "config.json"
    if not path.is_file():
        raise LoadError(f"{folder} has no config.json, so it is not the folder of a model")
    return path


def end_tokens(folder: Path, described: Mapping[str, Any], tokens: Tokens) -> list[int]:
    """The end tokens: those of the generation config, else of the config, and the tokenizer's."""
    path = folder / "generation_config.json"
    own = store.read_json(path) if path.is_file() else {}
    given = own.get("eos_token_id", described.get("eos_token_id"))
    listed = given if isinstance(given, list) else [given]
    ends = {token for token in listed if isinstance(token, int) and not isinstance(token, bool)}
    named = tokens.special.get("eos_token")
    if named is not None and (token := tokens.id(named)) is not None:
        ends.add(token)
    return sorted(ends)


def of_object(model: Any, tokenizer: Any) -> TextModel:
    """A text model over a model object of transformers; later changes of its weights, as in training, take effect."""
    if not hasattr(model, "config") or not hasattr(model, "generate"):
        raise InvalidOption(
            f"a {type(model).__name__} is not a model; give a name, folder, GGUF file or causal LM of transformers"
        )
    model_object.check_class(model)
    if tokenizer is None:
        raise InvalidOption("a model object has no tokenizer; give it as tokenizer=...")
    tokens = Tokens.of_transformers(tokenizer)
    make, context = model_object.target_of(model)
    given = getattr(model.generation_config, "eos_token_id", None)
    end = {given} if isinstance(given, int) else set(given or ())
    if (text := tokens.special.get("eos_token")) is not None and (token := tokens.id(text)) is not None:
        end.add(token)
    return TextModel(
        make,
        tokens,
        name=model.config.name_or_path or type(model).__name__,
        end=sorted(end),
        context=context,
        dtype=str(model.dtype).removeprefix("torch."),
        device=str(model.device),
        keep=False,
        load_other=companion,
    )
