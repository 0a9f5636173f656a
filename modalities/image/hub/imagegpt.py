"""ImageGPT of transformers: pixels of one of 512 colours, in raster order, of nothing in particular.

There is no guidance and no prompt; a prompt's text is not read. Colours are their own codebook, so that what a
neighbour rule takes for alike are colours that look alike. Weights: openai/imagegpt-small, -medium and -large, which
share their colours, so that a smaller drafts for a larger.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.engine.trainable.module_surgery import widened
from outrider.core.errors import InvalidOption
from outrider.image.grid import Grid
from outrider.image.tokenizer import images

if TYPE_CHECKING:
    from PIL.Image import Image

_BEYOND = 256  # columns that the nodes of a draft may take beyond the picture's end


class ImageGPT:
    """A model with the colours of its image processor."""

    guidance = 1.0

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.vocabulary = int(model.config.vocab_size) - 1  # the last id is read alone: it begins a picture
        if processor.clusters is None:
            raise InvalidOption("the image processor has no clusters, so nobody knows which colours the codes are")
        self.colours = torch.as_tensor(processor.clusters, dtype=torch.float32)  # [K, 3] in -1..1
        if len(self.colours) != self.vocabulary:
            raise InvalidOption(
                f"the processor has {len(self.colours)} colours and the model {self.vocabulary}: "
                "they don't belong together"
            )
        side = isqrt(model.config.n_positions)
        self.raster = Grid(side, side)
        wider = widened(model, _BEYOND)
        self._reading = Reading(
            trunk=wider,
            vocabulary=self.vocabulary,
            read=lambda ids, positions: {"input_ids": ids.clamp(min=0), "position_ids": positions},
            say=lambda out: out.logits,
            looked_up=(model.transformer.wte.weight,),
        )

    def read(self, prompt: str) -> list[int]:
        return [self.vocabulary]

    def free(self, asked: Sequence[int]) -> list[int]:
        return list(asked)

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Guided:
        # the class folds a mask of four dimensions into one of two, so that trees are scored branch by branch
        inner = TransformersTarget(self.model, trees="branches", reading=self._reading)
        return Guided(inner, asked, asked, 1.0, instead=True)

    def pictures(self, grids: Tensor) -> list[Image]:
        return images(self.colours[grids.cpu()].permute(0, 3, 1, 2))

    @cached_property
    def white(self) -> int:
        return int((self.colours - 1).square().sum(-1).argmin())

    @property
    def looks(self) -> Tensor:
        return self.colours


of = ImageGPT  # what outrider.core.assets.hub_models asks for
