"""From a name to a model of speech: our own voice, or a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

import torch

from outrider.core.errors import unknown
from outrider.core.published import named
from outrider.speech import model, published, recipes


@overload  # "heart" is a string too: the first that fits counts
def load(  # type: ignore[overload-overlap]
    name: Literal["heart"] = "heart",
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    folder: Path | None = None,
) -> model.SpeechModel: ...
@overload
def load(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    draft: str | Path | None = None,
    revision: str | None = None,
    **options: Any,
) -> published.PublishedSpeech: ...
def load(name: str | Path = recipes.MODEL, **options: Any) -> model.SpeechModel | published.PublishedSpeech:
    """A voice: "heart" (`folder` holds weights of one's own training, in place of those that ship), or a published
    model of speech or sound by its hub id or folder, as outrider.speech.published takes it.

    >>> load().generate("Good morning.", seed=1).save("morning.wav")
    """
    if name == recipes.MODEL:
        return model.load(str(name), **options)
    if named(name):
        return published.load(name, **options)
    raise unknown("voice", name, (recipes.MODEL, "an id on the hub (owner/name)", "a folder"))
