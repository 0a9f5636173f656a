"""Opens Llamas that speak: Llasa or Orpheus, by their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from outrider.core.assets import store
from outrider.core.assets.hub_models import PROCESSORS
from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.core.engine.loading.folder import target_of_folder
from outrider.core.engine.loading.model_object import target_of
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Target
from outrider.speech.hub.code_stream import CodeStream
from outrider.speech.hub.llasa import Llasa
from outrider.speech.hub.orpheus import Orpheus

_KINDS: tuple[type[CodeStream], ...] = (Llasa, Orpheus)


def of_model(model: Any, processor: Any, *, codec: Any = None, draft: Any = None) -> CodeStream:
    """The model of an object of transformers and its tokenizer; `draft` is a smaller such object."""
    (make, context), kind = target_of(model), _kind(processor)
    small = None if draft is None else target_of(draft)[0]
    return kind(_sharing(make), context, processor, codec=codec, draft=None if small is None else _sharing(small))


def open_folder(
    folder: Path,
    dtype: str,
    device: torch.device | str,
    *,
    codec: Any = None,
    draft: CodeStream | None = None,
    offload: float | None = None,
    kv_cache_dtype: str | None = None,
) -> CodeStream:
    """The model of a folder. The options are those of `outrider.text.load`."""
    bare = not any((folder / file).is_file() for file in PROCESSORS)
    tokenizer = None if bare else store.transformers_processor(folder)
    kind = _kind(tokenizer)
    make, context = target_of_folder(
        folder, dtype, torch.device(device), offload=offload, kv_cache_dtype=kv_cache_dtype
    )
    return kind(_sharing(make), context, tokenizer, codec=codec, draft=None if draft is None else draft.target)


def _sharing(make: Callable[[], Target]) -> Callable[[], SharingTarget]:
    return cast(Callable[[], SharingTarget], make)  # what is loaded or wrapped as a language model has both matrices


def _kind(tokenizer: Any) -> type[CodeStream]:
    if tokenizer is None:
        raise InvalidOption("there is no tokenizer, which defines the codes; load the model with its tokenizer")
    for kind in _KINDS:
        if kind.numbered(tokenizer):
            return kind
    raise InvalidOption(
        "the tokenizer has no codes of speech: neither <|s_0|>, as Llasa's, nor <custom_token_10>, as Orpheus's; for "
        "a language model use outrider.text"
    )
