"""Whisper of transformers: sound to text. The encoder runs once; the decoder's self-attention cache is rewound after
each draft, and its cross-attention cache is kept.

A prompt is a Sound or the processor's features. Weights: openai/whisper-tiny to -large-v3; a smaller or distilled model
with the same vocabulary can draft.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.adapters.hf import ModelInterface, TransformersTarget
from outrider.core.errors import InvalidOption
from outrider.speech.audio import Sound
from outrider.speech.hub.model import Stage

_HZ = 16000


@dataclass(frozen=True)
class Suppressed:
    """Masks ids that are suppressed everywhere, and those suppressed at the first position."""

    always: tuple[int, ...]
    first: tuple[int, ...]

    def apply(self, logits: Tensor, position: Tensor) -> Tensor:
        for ids, where in ((self.always, position >= 0), (self.first, position == 0)):
            suppressed = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
            suppressed[list(ids)] = True
            logits = logits.masked_fill(where[..., None] & suppressed, -torch.inf)
        return logits


class Whisper:
    """A model with its processor. `prefix` are the ids before the text, for language and task; None: the
    processor's."""

    def __init__(
        self, model: Any, processor: Any = None, *, prefix: Sequence[int] | None = None, draft: Any = None
    ) -> None:
        self.model, self.processor, self._draft = model, processor, draft
        if prefix is None:
            tokenizer = None if processor is None else processor.tokenizer
            prefix = [model.config.decoder_start_token_id] if tokenizer is None else tokenizer.prefix_tokens
        self.prefix = list(prefix)
        config = model.generation_config
        self.slots = Suppressed(tuple(config.suppress_tokens or ()), tuple(config.begin_suppress_tokens or ()))
        end = config.eos_token_id if config.eos_token_id is not None else model.config.eos_token_id
        self.end = tuple(end) if isinstance(end, list) else (end,)

    def stages(self, prompt: Any, limit: int | None) -> Generator[Stage, list[int], str | list[int]]:
        """One stage, whose outcome is text, or ids without a processor."""
        features = self._features(prompt)
        room = self.model.config.max_target_positions - len(self.prefix)
        small = self._draft
        tokens = yield Stage(
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
                raise InvalidOption("the prompt is a Sound, and there is no processor for it; give features instead")
            inputs = self.processor(prompt.resample(_HZ).samples, sampling_rate=_HZ, return_tensors="pt")
            prompt = inputs["input_features"]
        features = torch.as_tensor(prompt["input_features"] if isinstance(prompt, dict) else prompt)
        return features.to(self.model.device, self.model.dtype)

    @torch.no_grad()
    def _target(self, model: Any, features: Tensor) -> Guided:
        from transformers import DynamicCache, EncoderDecoderCache

        states = model.model.encoder(features).last_hidden_state
        decoder, cross, count = model.model.decoder, DynamicCache(), int(model.config.vocab_size)
        last = model.config.max_target_positions - 1

        def trunk_inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
            encoder = {"encoder_hidden_states": states.expand(len(ids), -1, -1)}
            return {"input_ids": ids.clamp(0, count - 1), "position_ids": positions.clamp(max=last), **encoder}

        interface = ModelInterface(
            trunk=decoder,
            vocabulary=count,
            inputs=trunk_inputs,
            logits=lambda out: model.proj_out(out.last_hidden_state),
            new_cache=DynamicCache,
            wrap_cache=lambda cache, rows: EncoderDecoderCache(cache, cross),
        )
        inner = TransformersTarget(model, trees="mask", interface=interface)
        return Guided(inner, [self.prefix], [self.prefix], 1.0, skip_first=True, allowed=self.slots)
