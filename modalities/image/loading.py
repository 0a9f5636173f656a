"""From a name to a model of images: our own, or a published one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, overload

import torch

from outrider.core.assets.hub_models import load_by_name
from outrider.image import model, recipes
from outrider.image.hub import model as hub_model


@overload  # "emoji" is a string too: the first that fits counts
def load(  # type: ignore[overload-overlap]
    name: Literal["emoji"] = "emoji",
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "bfloat16",
    folder: Path | None = None,
) -> model.ImageModel: ...
@overload
def load(
    name: str | Path,
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "bfloat16",
    draft_model: str | Path | None = None,
    revision: str | None = None,
    folder: Path | None = None,
    **options: Any,
) -> hub_model.PublishedModel: ...
def load(name: str | Path = recipes.MODEL, **options: Any) -> model.ImageModel | hub_model.PublishedModel:
    """A text-to-picture model: "emoji" (`folder` holds weights of one's own training, in place of those that ship), or
    a published one by its hub id or folder, as outrider.image.hub.model takes it (`folder`: draft heads for it).

    >>> load("emoji").generate("red heart", style="noto", seed=1).image.size
    (64, 64)
    """
    found: model.ImageModel | hub_model.PublishedModel = load_by_name(
        name, recipes.MODEL, model.load, hub_model.load, "image model", options
    )
    return found
