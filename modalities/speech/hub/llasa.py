"""Llasa: a Llama that continues a text with codes of X-Codec2, 50 per second.

Weights: HKUSTAudio/Llasa-1B, -3B and -8B, of which a smaller one can draft for a larger one, and HKUSTAudio/xcodec2-hf.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets import store
from outrider.core.assets.hub_models import folder_of
from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.speech.hub.code_stream import CodeStream
from outrider.speech.hub.similar_tokens import grid_points

_LEVELS, _AXES = 4, 8  # X-Codec2's codes are points of a grid


class Llasa(CodeStream):
    """`codec` is an X-Codec2 of transformers or the name of one."""

    sample_rate, temperature = 16000, 0.8
    longest = 1000  # twenty seconds
    code = r"<\|s_(\d+)\|>"
    ends = ("<|SPEECH_GENERATION_END|>",)
    needed_codec = "an X-Codec2 of transformers"

    def vectors(self, ids: Sequence[int], target: SharingTarget) -> Callable[[], Tensor]:
        """Points of the grid, where the tokens are all codes of X-Codec2."""
        if [self.codes[token] for token in ids] == list(range(_LEVELS**_AXES)):
            return lambda: grid_points(len(ids), [_LEVELS] * _AXES)
        return super().vectors(ids, target)

    def ids(self, text: str) -> list[int]:
        request = f"Convert the text to speech:<|TEXT_UNDERSTANDING_START|>{text}<|TEXT_UNDERSTANDING_END|>"
        chat = [
            {"role": "user", "content": request},
            {"role": "assistant", "content": "<|SPEECH_GENERATION_START|>"},
        ]
        prompt = self.tokenizer.apply_chat_template(chat, tokenize=False, continue_final_message=True)
        return [int(token) for token in self.tokenizer(prompt, add_special_tokens=False)["input_ids"]]

    def open_codec(self, name: str | Path, device: torch.device) -> Any:
        return store.transformers_model(folder_of(name), "float32", device, "Xcodec2Model")

    def decoded(self, outcome: Sequence[int]) -> Tensor:
        grid = torch.tensor(outcome, device=self.codec.device)[None, None]
        samples: Tensor = self.codec.decode(grid).audio_values[0, 0]
        return samples
