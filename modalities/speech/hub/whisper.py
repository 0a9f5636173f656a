"""Whisper of transformers: sound in, text out. The encoder's states are read once; the decoder's own cache is cut back
as any, and what it keeps of the encoder stays.

A prompt is a Sound, or the features that the processor makes of one. Weights: openai/whisper-tiny to -large-v3; a
smaller one with the same vocabulary, or a distilled one, drafts.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import Reading, TransformersTarget
from outrider.core.errors import InvalidOption
from outrider.speech.audio import Sound
from outrider.speech.hub.model import Part

_HZ = 16000


@dataclass(frozen=True)
class Suppressed:
    """Ids that are never said, and those that are not said first."""

    always: tuple[int, ...]
    first: tuple[int, ...]

    def only(self, logits: Tensor, place: Tensor) -> Tensor:
        for ids, where in ((self.always, place >= 0), (self.first, place == 0)):
            struck = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            struck[list(ids)] = True
            logits = logits.masked_fill(where[..., None] & struck, -torch.inf)
        return logits


class Whisper:
    """A model with its processor. `before` are the ids that stand before what is said: language, task; None: those of
    the processor."""

    def __init__(
        self, model: Any, processor: Any = None, *, before: Sequence[int] | None = None, draft: Any = None
    ) -> None:
        self.model, self.processor, self._draft = model, processor, draft
        if before is None:
            words = None if processor is None else processor.tokenizer
            before = [model.config.decoder_start_token_id] if words is None else words.prefix_tokens
        self.before = list(before)
        given = model.generation_config
        self.slots = Suppressed(tuple(given.suppress_tokens or ()), tuple(given.begin_suppress_tokens or ()))
        end = given.eos_token_id if given.eos_token_id is not None else model.config.eos_token_id
        self.end = tuple(end) if isinstance(end, list) else (end,)

    def stages(self, prompt: Any, limit: int | None) -> Generator[Part, list[int], str | list[int]]:
        """Comes to text; without a processor, to ids."""
        features = self._features(prompt)
        room = self.model.config.max_target_positions - len(self.before)
        small = self._draft
        tokens = yield Part(
            lambda: self._target(self.model, features),
            min(limit or room, room),
            end=self.end,
            draft=None if small is None else lambda: self._target(small, features),
        )
        if self.processor is None:
            return tokens
        return str(self.processor.tokenizer.decode(tokens, skip_special_tokens=True))

    def _features(self, prompt: Any) -> Tensor:
        if isinstance(prompt, Sound):
            if self.processor is None:
                raise InvalidOption("a Sound was given and there is no processor; give features, or load with one")
            heard = self.processor(prompt.at(_HZ).samples, sampling_rate=_HZ, return_tensors="pt")
            prompt = heard["input_features"]
        features = torch.as_tensor(prompt["input_features"] if isinstance(prompt, dict) else prompt)
        return features.to(self.model.device, self.model.dtype)

    @torch.no_grad()
    def _target(self, model: Any, features: Tensor) -> Guided:
        from transformers import DynamicCache, EncoderDecoderCache

        states = model.model.encoder(features).last_hidden_state
        decoder, cross, count = model.model.decoder, DynamicCache(), int(model.config.vocab_size)
        last = model.config.max_target_positions - 1

        def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            places = positions.clamp(max=last)
            heard = states.expand(len(ids), -1, -1)
            return {"input_ids": ids.clamp(0, count - 1), "position_ids": places, "encoder_hidden_states": heard}

        reading = Reading(
            trunk=decoder,
            vocabulary=count,
            read=read,
            say=lambda out: model.proj_out(out.last_hidden_state),
            cache=DynamicCache,
            through=lambda cache, rows: EncoderDecoderCache(cache, cross),
        )
        inner = TransformersTarget(model, trees="mask", reading=reading)
        return Guided(inner, [self.before], [self.before], 1.0, instead=True, slots=self.slots)


of = Whisper  # what outrider.core.assets.hub_models asks for
