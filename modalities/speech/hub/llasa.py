"""Llasa: a Llama that goes on from a text with the codes of X-Codec2, one stream of 50 a second, each code a word of
its vocabulary.

The distribution is the model's own over all of its words; what it says that is no code is left out of the sound.
Weights: HKUSTAudio/Llasa-1B, -3B and -8B, of which a smaller drafts for a larger, and HKUSTAudio/xcodec2-hf."""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets import store
from outrider.core.assets.hub_models import folder_of
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.errors import InvalidOption
from outrider.speech.hub.model import Part

_MOST = 1000  # twenty seconds
_END = "<|SPEECH_GENERATION_END|>"


class Llasa:
    """A model with its tokenizer; `codec` is an X-Codec2 of transformers or the name of one, `draft` a model of the
    same words."""

    def __init__(self, model: Any, processor: Any, *, codec: Any = None, draft: Any = None) -> None:
        if processor is None:
            raise InvalidOption("Llasa is wanted with its tokenizer; it says which words are codes")
        self.model, self.tokenizer, self._draft = model, processor, draft
        if isinstance(codec, str | Path):
            codec = store.transformers_model(folder_of(codec), "float32", model.device, "Xcodec2Model")
        self.codec = codec
        found = {word: re.fullmatch(r"<\|s_(\d+)\|>", word) for word in processor.get_vocab()}
        self.codes = {processor.convert_tokens_to_ids(word): int(one[1]) for word, one in found.items() if one}
        self.end = processor.convert_tokens_to_ids(_END)
        if not self.codes or self.end in (None, processor.unk_token_id):
            raise InvalidOption(f"the tokenizer has no words <|s_0|>, <|s_1|> ... and {_END}: this is no Llasa")
        self._trees = TransformersTarget(model).trees

    def stages(self, prompt: Any, limit: int | None) -> Generator[Part, list[int], list[int]]:
        """Comes to codes."""
        ids = self.read(prompt) if isinstance(prompt, str) else [int(one) for one in prompt]
        small = self._draft
        tokens = yield Part(
            lambda: TransformersTarget(self.model, trees=self._trees),
            limit or _MOST,
            root=tuple(ids),
            end=(self.end,),
            draft=None if small is None else lambda: TransformersTarget(small, trees=self._trees),
        )
        return [self.codes[token] for token in tokens if token in self.codes]

    def read(self, text: str) -> list[int]:
        """A text as what the model goes on from."""
        asked = f"Convert the text to speech:<|TEXT_UNDERSTANDING_START|>{text}<|TEXT_UNDERSTANDING_END|>"
        talk = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": "<|SPEECH_GENERATION_START|>"},
        ]
        given = self.tokenizer.apply_chat_template(talk, tokenize=False, continue_final_message=True)
        return [int(one) for one in self.tokenizer(given, add_special_tokens=False)["input_ids"]]

    rate = 16000

    @torch.no_grad()
    def sound(self, codes: Sequence[int]) -> Tensor:
        """Codes as samples, 16,000 a second."""
        if self.codec is None:
            raise InvalidOption("there is no codec to hear them by; give codec=, an X-Codec2 of transformers")
        held = torch.tensor(codes, device=self.codec.device)[None, None]
        found: Tensor = self.codec.decode(held).audio_values[0, 0]
        return found


of = Llasa  # what outrider.core.assets.hub_models asks for
