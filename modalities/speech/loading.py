"""From a name to a model of speech: our own voice, or a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

import torch

from outrider.core.assets.hub_models import load_by_name
from outrider.speech import model, recipes
from outrider.speech.hub import model as hub_model


@overload  # "heart" is a string too: the first that fits counts
def load(  # type: ignore[overload-overlap]
    name: Literal["heart"] = "heart",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "bfloat16",
    folder: Path | None = None,
    vocoder: str = "hifi-gan",
) -> model.SpeechModel: ...
@overload
def load(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "bfloat16",
    draft_model: str | Path | None = None,
    revision: str | None = None,
    **options: Any,
) -> hub_model.PublishedSpeech: ...
def load(name: str | Path = recipes.MODEL, **options: Any) -> model.SpeechModel | hub_model.PublishedSpeech:
    """A voice: "heart" (`folder` holds weights of one's own training, in place of those that ship; `vocoder` is
    "hifi-gan" or "vocos"), or a published model of speech or sound by its hub id or folder, as
    outrider.speech.hub.model takes it.

    >>> load().generate("Good morning.", seed=1).save("morning.wav")
    """
    found: model.SpeechModel | hub_model.PublishedSpeech = load_by_name(
        name, recipes.MODEL, model.load, hub_model.load, "voice", options
    )
    return found
