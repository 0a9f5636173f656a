"""Janus and Janus-Pro of transformers: a Llama that reads words and picture codes, with a head and embeddings of its
own for codes, and a VQ decoder of pixels.

Guidance is as the class does it: a second stream whose prompt is padding but for its first token and the one that
begins a picture. Ids of words come behind those of codes. Weights: deepseek-community/Janus-Pro-1B and -7B, which share
codes and words, so that the smaller drafts for the larger.
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
from outrider.core.errors import InvalidOption
from outrider.image.grid import Grid
from outrider.image.tokenizer import images, most_frequent

if TYPE_CHECKING:
    from PIL.Image import Image


class Janus:
    """A model with its processor."""

    guidance = 5.0

    def __init__(self, model: Any, processor: Any) -> None:
        self.model, self.processor = model, processor
        inner = model.model
        count = inner.vision_model.config.num_image_tokens
        side = isqrt(count)
        if side * side != count:
            raise InvalidOption(f"the model draws {count} codes, which is no square")
        self.raster, self.vocabulary = Grid(side, side), int(inner.vqmodel.config.num_embeddings)
        given = model.generation_config
        self.pad = given.pad_token_id
        begins = (getattr(given, "generation_kwargs", None) or {}).get("boi_token_id")  # lost by some loads
        self.kept = (given.bos_token_id, processor.tokenizer.boi_token_id if begins is None else begins)
        words, codes = model.get_input_embeddings(), self.vocabulary

        def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            drawn = model.prepare_embeddings_for_image_generation(ids.clamp(0, codes - 1))
            said = words((ids - codes).clamp(min=0))
            return {"inputs_embeds": torch.where((ids < codes)[..., None], drawn, said), "position_ids": positions}

        self._reading = Reading(
            trunk=inner.language_model,
            vocabulary=codes,
            read=read,
            say=lambda out: inner.generation_head(out.last_hidden_state),
            weights=(inner.language_model, inner.generation_head, inner.generation_aligner),
            looked_up=(words.weight,),
        )
        self._trees = TransformersTarget(model, reading=self._reading).trees

    def read(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise InvalidOption("the prompt is empty; give at least one word")
        text = prompt
        if self.processor.chat_template is not None:
            talk = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
            text = self.processor.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        found = self.processor(text=[text], generation_mode="image", return_tensors="pt")
        return [int(one) + self.vocabulary for one in found["input_ids"][0]]

    def free(self, asked: Sequence[int]) -> list[int]:
        return [one if one - self.vocabulary in self.kept else self.pad + self.vocabulary for one in asked]

    def target(self, asked: Sequence[Sequence[int]], guidance: float) -> Guided:
        inner = TransformersTarget(self.model, trees=self._trees, reading=self._reading)
        return Guided(inner, asked, [self.free(one) for one in asked], guidance, instead=True)

    def pictures(self, grids: Tensor) -> list[Image]:
        drawn = self.model.decode_image_tokens(grids.flatten(1).to(self.model.device))  # [B, H, W, 3]
        return images(drawn.permute(0, 3, 1, 2))

    @cached_property
    def white(self) -> int:
        size = self.model.model.vision_model.config.image_size
        blank = torch.ones(1, 3, size, size, dtype=self.model.dtype, device=self.model.device)
        with torch.no_grad():
            return most_frequent(self.model.model.vqmodel.encode(blank).image_tokens)

    @property
    def looks(self) -> Tensor:
        """Distances as the tokenizer takes them: of codes as vectors of length 1."""
        codes: Tensor = self.model.model.vqmodel.quantize.embedding.weight
        return torch.nn.functional.normalize(codes.detach(), dim=-1)


of = Janus  # what outrider.core.assets.hub_models asks for
