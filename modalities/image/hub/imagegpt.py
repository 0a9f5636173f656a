"""ImageGPT of transformers: unconditional generation of pixels, each one of 512 colours, in raster order.

There is no guidance, and prompts are ignored. The colours serve as the codebook, so neighbour rules group similar
colours. Weights: openai/imagegpt-small, -medium and -large; they share the colours, so a smaller one can draft for a
larger one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import isqrt
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.engine.adapters.model_parts import of_ids, shared_weights
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.module_surgery import extend_causal_mask
from outrider.core.errors import InvalidOption
from outrider.image.grid import Grid
from outrider.image.tokenizer import images

if TYPE_CHECKING:
    from PIL.Image import Image

_DRAFT_OVERHANG = 256  # attention columns for draft nodes beyond the image's end


class ImageGPT:
    """A model with its image processor, which holds the colours."""

    guidance = 1.0

    def __init__(self, model: Any, processor: Any) -> None:
        self.model = model
        self.vocabulary = int(model.config.vocab_size) - 1  # the last id only starts an image
        if processor.clusters is None:
            raise InvalidOption("the image processor has no clusters, which define the colours of the codes")
        self.colours = torch.as_tensor(processor.clusters, dtype=torch.float32)  # [K, 3] in [-1, 1]
        if len(self.colours) != self.vocabulary:
            raise InvalidOption(
                f"the processor has {len(self.colours)} colours and the model {self.vocabulary}; they must be equal"
            )
        side = isqrt(model.config.n_positions)
        self.raster = Grid(side, side)
        wider = extend_causal_mask(model, _DRAFT_OVERHANG)
        self._interface = ModelInterface(
            trunk=wider,
            vocabulary=self.vocabulary,
            inputs=lambda ids, positions: {"input_ids": ids.clamp(min=0), "position_ids": positions},
            logits=lambda out: out.logits,
            lookup_tables=(model.transformer.wte.weight,),
        )

    def read(self, prompt: str) -> list[int]:
        return [self.vocabulary]

    def unconditional(self, prompt: Sequence[int]) -> list[int]:
        return list(prompt)

    def target(
        self, prompts: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Guided:
        # the class reduces a 4D attention mask to 2D, so trees are scored branch by branch
        inner = TransformersTarget(self.model, trees="branches", interface=self._interface)
        return Guided(inner, prompts, prompts, 1.0, skip_first=True)

    @cached_property
    def network(self) -> Network:
        return of_ids(shared_weights(self.model), torch.arange(self.vocabulary, device=self.model.device))

    def to_images(self, grids: Tensor) -> list[Image]:
        return images(self.colours[grids.cpu()].permute(0, 3, 1, 2))

    @cached_property
    def white(self) -> int:
        return int((self.colours - 1).square().sum(-1).argmin())

    @property
    def code_vectors(self) -> Tensor:
        return self.colours
