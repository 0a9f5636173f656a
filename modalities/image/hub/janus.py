"""Janus and Janus-Pro of transformers: a Llama with a separate head and embeddings for image codes, and a VQ decoder.

Guidance is that of the class: the unconditional prompt is padding except for its first token and the token that begins
an image. Word ids follow the code ids. Weights: deepseek-community/Janus-Pro-1B and -7B, which share codes and words,
so the smaller one can draft for the larger one.
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
from outrider.core.engine.network import Network
from outrider.core.errors import Incompatible, InvalidOption
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
            raise InvalidOption(f"the model's images have {count} codes, which do not form a square")
        self.raster, self.vocabulary = Grid(side, side), int(inner.vqmodel.config.num_embeddings)
        defaults = model.generation_config
        self.pad = defaults.pad_token_id
        begin = (getattr(defaults, "generation_kwargs", None) or {}).get("boi_token_id")  # some loaders drop it
        self.kept = (defaults.bos_token_id, processor.tokenizer.boi_token_id if begin is None else begin)
        words, codes = model.get_input_embeddings(), self.vocabulary

        def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            of_codes = model.prepare_embeddings_for_image_generation(ids.clamp(0, codes - 1))
            of_words = words((ids - codes).clamp(min=0))
            embeddings = torch.where((ids < codes)[..., None], of_codes, of_words)
            return {"inputs_embeds": embeddings, "position_ids": positions}

        self._interface = ModelInterface(
            trunk=inner.language_model,
            vocabulary=codes,
            inputs=trunk_inputs,
            logits=lambda out: inner.generation_head(out.last_hidden_state),
            weights=(inner.language_model, inner.generation_head, inner.generation_aligner),
            lookup_tables=(words.weight,),
        )
        self._trees = TransformersTarget(model, interface=self._interface).trees

    def read(self, prompt: str) -> list[int]:
        if not prompt.strip():
            raise InvalidOption("the prompt is empty; give at least one word")
        text = prompt
        if self.processor.chat_template is not None:
            chat = [{"role": "user", "content": [{"type": "text", "text": prompt}]}]
            text = self.processor.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        inputs = self.processor(text=[text], generation_mode="image", return_tensors="pt")
        return [int(token) + self.vocabulary for token in inputs["input_ids"][0]]

    def unconditional(self, prompt: Sequence[int]) -> list[int]:
        return [token if token - self.vocabulary in self.kept else self.pad + self.vocabulary for token in prompt]

    def target(
        self, prompts: Sequence[Sequence[int]], guidance: float, unconditional: Sequence[int] | None = None
    ) -> Guided:
        inner = TransformersTarget(self.model, trees=self._trees, interface=self._interface)
        free = [unconditional or self.unconditional(prompt) for prompt in prompts]
        return Guided(inner, prompts, free, guidance, skip_first=True)

    @property
    def network(self) -> Network:
        raise Incompatible(
            "Janus predicts codes from its last state by two layers, and draft heads share output rows of one; use a "
            "drafter that needs no head, such as 'jacobi'"
        )

    def to_images(self, grids: Tensor) -> list[Image]:
        pixels = self.model.decode_image_tokens(grids.flatten(1).to(self.model.device))  # [B, H, W, 3]
        return images(pixels.permute(0, 3, 1, 2))

    @cached_property
    def white(self) -> int:
        size = self.model.model.vision_model.config.image_size
        blank = torch.ones(1, 3, size, size, dtype=self.model.dtype, device=self.model.device)
        with torch.no_grad():
            return most_frequent(self.model.model.vqmodel.encode(blank).image_tokens)

    @property
    def code_vectors(self) -> Tensor:
        """Unit vectors, as the tokenizer compares them."""
        codes: Tensor = self.model.model.vqmodel.quantize.embedding.weight
        return torch.nn.functional.normalize(codes.detach(), dim=-1)
