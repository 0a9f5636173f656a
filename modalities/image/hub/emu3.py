"""Emu3 of transformers: image codes are tokens of a language model, with a marker at the end of each row and further
markers at the end of the image.

The grid determines which tokens are allowed at each position: codes within a row, then the end-of-row marker. The final
markers carry no information and are not decoded; `sequence` appends them. Guidance uses a negative prompt of any
length. The guidance processor of transformers keeps a second cache that cannot be rewound; here both streams are rows
of one batch. Weights: BAAI/Emu3-Gen-hf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.engine.adapters.model_parts import of_ids, shared_weights
from outrider.core.engine.network import Network
from outrider.core.errors import InvalidOption
from outrider.core.vocab_mask import RepeatingRanges
from outrider.image.grid import Grid
from outrider.image.tokenizer import images, most_frequent

if TYPE_CHECKING:
    from PIL.Image import Image

NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_FAR = 1e3  # coordinate of the end-of-row marker in the codebook, far from every code


class Emu3:
    """A model with its processor, for images of the aspect `ratio` (width:height) and about `area` pixels."""

    guidance = 3.0

    def __init__(
        self, model: Any, processor: Any, *, ratio: str = "1:1", area: int = 518400, negative: str = NEGATIVE
    ) -> None:
        self.model, self.processor, self.negative = model, processor, negative
        try:
            rows, columns = processor.calculate_generate_size(ratio, area, processor.downsample_ratio)
        except ValueError:
            raise InvalidOption(f"ratio is {ratio!r}; it must be width:height, such as 4:3") from None
        if rows < 1 or columns < 1:
            raise InvalidOption(f"area is {area} pixels, too few for an image of ratio {ratio}")
        self.raster = Grid(rows, columns, end_markers=1)
        self._size = {"ratio": ratio, "image_area": area}
        mapping = model.vocabulary_mapping
        if mapping.eol_token_id is None:
            raise InvalidOption("the model's vocabulary has no end-of-row marker, <|extra_200|>")
        code_ids = mapping.img2bpe_mapping_tensor.long()  # [codes]
        self.codes, self.vocabulary = len(code_ids), len(code_ids) + 1
        model_ids = torch.cat([code_ids, torch.tensor([mapping.eol_token_id])]).to(model.device)  # [vocabulary]
        self._model_ids, count = model_ids, self.vocabulary

        def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            picture_ids = model_ids[ids.clamp(0, count - 1)]
            return {"input_ids": torch.where(ids < count, picture_ids, ids - count), "position_ids": positions}

        trunk, head = model.model.text_model, nn.Linear(1, 1, bias=False)  # the head's rows of image tokens only
        head.weight = nn.Parameter(model.lm_head.weight.detach()[model_ids], requires_grad=False)
        self._interface = ModelInterface(
            trunk=trunk,
            vocabulary=count,
            inputs=trunk_inputs,
            logits=lambda out: head(out.last_hidden_state),
            weights=(trunk, head),
            lookup_tables=(model.get_input_embeddings().weight,),
        )
        self._trees = TransformersTarget(model, interface=self._interface).trees
        self._slots = RepeatingRanges.raster(columns, self.codes)

    def read(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise InvalidOption("the prompt is empty; give at least one word")
        inputs = self.processor(text=[prompt], return_for_image_generation=True, return_tensors="pt", **self._size)
        return [int(token) + self.vocabulary for token in inputs["input_ids"][0]]

    def unconditional(self, prompt: Sequence[int]) -> list[int]:
        return self.read(self.negative)

    def target(
        self, prompts: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Guided:
        inner = TransformersTarget(self.model, trees=self._trees, interface=self._interface)
        free = [unconditional or self.unconditional(prompts[0])] * len(prompts)
        return Guided(inner, prompts, free, guidance, skip_first=True, allowed=self._slots)

    @cached_property
    def network(self) -> Network:
        return of_ids(shared_weights(self.model), self._model_ids)

    def sequence(self, tokens: Sequence[int]) -> list[int]:
        """An image's tokens as ids of the model, with the markers that end the image."""
        tokenizer = self.processor.tokenizer
        end = [tokenizer.eof_token_id, tokenizer.eoi_token_id, tokenizer.eos_token_id]
        return [*self._model_ids.cpu()[list(tokens)].tolist(), *end]

    def to_images(self, grids: Tensor) -> list[Image]:
        return images(self.model.model.vqmodel.decode(grids.to(self.model.device)))

    @cached_property
    def white(self) -> int:
        codec = self.model.model.vqmodel
        size = 8 * codec.vision_spatial_factor
        blank = torch.ones(1, 3, size, size, dtype=self.model.dtype, device=self.model.device)
        with torch.no_grad():
            return most_frequent(codec.encode(blank, torch.tensor([[size, size]])).image_tokens[0])

    @property
    def code_vectors(self) -> Tensor:
        codes: Tensor = self.model.model.vqmodel.quantize.embedding.weight.detach().float()
        return torch.cat([codes, codes.new_full((1, codes.shape[1]), _FAR)])
