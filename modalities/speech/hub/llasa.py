"""Llasa: a Llama that continues a text with codes of X-Codec2, 50 per second, which are tokens of its vocabulary.

The distribution is the model's own over its whole vocabulary; generated tokens that are not codes are left out of the
sound. Weights: HKUSTAudio/Llasa-1B, -3B and -8B, of which a smaller one can draft for a larger one, and
HKUSTAudio/xcodec2-hf.
"""

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
from outrider.speech.hub.model import Stage
from outrider.speech.hub.similar_tokens import SimilarTokens, grid_points, unit

_MAX_CODES = 1000  # by default: twenty seconds
_LEVELS, _AXES = 4, 8  # X-Codec2's codes are points of a grid
_END = "<|SPEECH_GENERATION_END|>"


class Llasa:
    """A model with its tokenizer. `codec` is an X-Codec2 of transformers or the name of one; `draft` is a smaller model
    with the same vocabulary."""

    def __init__(self, model: Any, processor: Any, *, codec: Any = None, draft: Any = None) -> None:
        if processor is None:
            raise InvalidOption("there is no tokenizer, which defines the codes; load Llasa with its tokenizer")
        self.model, self.tokenizer, self._draft = model, processor, draft
        if isinstance(codec, str | Path):
            codec = store.transformers_model(folder_of(codec), "float32", model.device, "Xcodec2Model")
        self.codec = codec
        matches = {word: re.fullmatch(r"<\|s_(\d+)\|>", word) for word in processor.get_vocab()}
        self.codes = {processor.convert_tokens_to_ids(word): int(match[1]) for word, match in matches.items() if match}
        self.end = processor.convert_tokens_to_ids(_END)
        if not self.codes or self.end in (None, processor.unk_token_id):
            raise InvalidOption(
                f"the tokenizer lacks the tokens <|s_0|>, <|s_1|> ... or {_END}; is this a Llasa model?"
            )
        self._trees = TransformersTarget(model).trees
        ids = sorted(self.codes, key=self.codes.__getitem__)
        rows, axes = model.get_input_embeddings().weight, [_LEVELS] * _AXES
        whole = [self.codes[token] for token in ids] == list(range(_LEVELS**_AXES))  # all codes of X-Codec2
        vectors = (lambda: grid_points(len(ids), axes)) if whole else unit(lambda: rows[ids])
        self.similar = SimilarTokens(int(model.config.vocab_size), vectors, ids=ids)

    def stages(self, prompt: Any, limit: int | None) -> Generator[Stage, list[int], list[int]]:
        """One stage, whose outcome is codes."""
        ids = self.read(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        small = self._draft
        tokens = yield Stage(
            lambda: TransformersTarget(self.model, trees=self._trees),
            limit or _MAX_CODES,
            root=tuple(ids),
            end=(self.end,),
            draft=None if small is None else lambda: TransformersTarget(small, trees=self._trees),
            similar=self.similar,
        )
        return [self.codes[token] for token in tokens if token in self.codes]

    def read(self, text: str) -> list[int]:
        """The prompt ids of a text."""
        request = f"Convert the text to speech:<|TEXT_UNDERSTANDING_START|>{text}<|TEXT_UNDERSTANDING_END|>"
        chat = [
            {"role": "user", "content": request},
            {"role": "assistant", "content": "<|SPEECH_GENERATION_START|>"},
        ]
        prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        return [int(token) for token in self.tokenizer(prompt, add_special_tokens=False)["input_ids"]]

    sample_rate = 16000

    @torch.no_grad()
    def sound(self, codes: Sequence[int]) -> Tensor:
        """Codes -> samples, 16,000 per second."""
        if self.codec is None:
            raise InvalidOption("there is no codec; load the model with codec=, an X-Codec2 of transformers")
        grid = torch.tensor(codes, device=self.codec.device)[None, None]
        samples: Tensor = self.codec.decode(grid).audio_values[0, 0]
        return samples
