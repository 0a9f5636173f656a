"""Emu3 of transformers: a picture's codes are words of a language model, a mark ends each row, and after the last one
come the marks that end the picture.

What may stand where is settled by the grid: codes in a row, the mark behind it; the marks that end a picture say
nothing and are left to whoever writes the whole sequence down (`sequence`). Guidance is against a negative prompt of
any length, which ends in the same grid. The class's own processor for guidance keeps a cache of its own, which cannot
be cut back; here both streams are rows of one batch. Weights: BAAI/Emu3-Gen-hf.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.errors import InvalidOption
from outrider.core.vocab_mask import Slots
from outrider.image.grid import Grid
from outrider.image.tokenizer import images, most_frequent

if TYPE_CHECKING:
    from PIL.Image import Image

NEGATIVE = (
    "lowres, bad anatomy, bad hands, text, error, missing fingers, extra digit, fewer digits, cropped, worst quality, "
    "low quality, normal quality, jpeg artifacts, signature, watermark, username, blurry."
)
_FAR = 1e3  # from a mark to the codes


class Emu3:
    """A model with its processor; pictures of `ratio` (width to height) and about `area` pixels."""

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
            raise InvalidOption(f"{area} pixels are too few for a picture of {ratio}")
        self.raster = Grid(rows, columns, end_markers=1)
        self._size = {"ratio": ratio, "image_area": area}
        mapping = model.vocabulary_mapping
        if mapping.eol_token_id is None:
            raise InvalidOption("the model's vocabulary has no <|extra_200|>, the mark that ends a row")
        words = mapping.img2bpe_mapping_tensor.long()  # [codes]
        self.codes, self.vocabulary = len(words), len(words) + 1
        device = model.device
        self._words = torch.cat([words, torch.tensor([mapping.eol_token_id])]).to(device)  # of tokens, marks included
        table, count = self._words, self.vocabulary

        def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            own = table[ids.clamp(0, count - 1)]
            return {"input_ids": torch.where(ids < count, own, ids - count), "position_ids": positions}

        trunk, head = model.model.text_model, nn.Linear(1, 1, bias=False)  # rows of what a picture may hold alone
        head.weight = nn.Parameter(model.lm_head.weight.detach()[table], requires_grad=False)
        self._reading = Reading(
            trunk=trunk,
            vocabulary=count,
            read=read,
            say=lambda out: head(out.last_hidden_state),
            weights=(trunk, head),
            looked_up=(model.get_input_embeddings().weight,),
        )
        self._trees = TransformersTarget(model, reading=self._reading).trees
        self._slots = Slots.rows(columns, self.codes)

    def read(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise InvalidOption("the prompt is empty; give at least one word")
        found = self.processor(text=[prompt], return_for_image_generation=True, return_tensors="pt", **self._size)
        return [int(one) + self.vocabulary for one in found["input_ids"][0]]

    def free(self, asked: Sequence[int]) -> list[int]:
        return self.read(self.negative)

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Guided:
        inner = TransformersTarget(self.model, trees=self._trees, reading=self._reading)
        free = [self.free(one) for one in asked[:1]] * len(asked)
        return Guided(inner, asked, free, guidance, instead=True, slots=self._slots)

    def sequence(self, tokens: Sequence[int]) -> list[int]:
        """A picture's tokens as the class itself writes them, with the marks that end it."""
        words = self.processor.tokenizer
        last = [words.eof_token_id, words.eoi_token_id, words.eos_token_id]
        return [*self._words.cpu()[list(tokens)].tolist(), *last]

    def pictures(self, grids: Tensor) -> list[Image]:
        return images(self.model.model.vqmodel.decode(grids.to(self.model.device)))

    @cached_property
    def white(self) -> int:
        codec = self.model.model.vqmodel
        size = 8 * codec.vision_spatial_factor
        blank = torch.ones(1, 3, size, size, dtype=self.model.dtype, device=self.model.device)
        with torch.no_grad():
            return most_frequent(codec.encode(blank, torch.tensor([[size, size]])).image_tokens[0])

    @property
    def looks(self) -> Tensor:
        codes: Tensor = self.model.model.vqmodel.quantize.embedding.weight.detach().float()
        return torch.cat([codes, codes.new_full((1, codes.shape[1]), _FAR)])


of = Emu3  # what outrider.core.assets.hub_models asks for
