"""Orpheus: a Llama that continues a text with codes of SNAC, seven a frame of 85 ms: one of its first codebook, two of
the second and four of the third, each place with tokens of its own.

Weights: canopylabs/orpheus-3b-0.1-ft and others of its kind, and hubertsiuzdak/snac_24khz. A text may begin with a
voice's name, as in "tara: Good morning."; the authors recommend temperature 0.6, top_p 0.8 and a repetition penalty of
at least 1.1 (`logits_processor`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets import store
from outrider.core.assets.hub_models import folder_of
from outrider.core.errors import Incompatible, OutriderError, install_command
from outrider.speech.hub.code_stream import CodeStream

_FIRST = 10  # the number of the first code's token
_BOOKS = ((0,), (1, 4), (2, 3, 5, 6))  # places in a frame, by codebook of SNAC
_BEGIN, _BETWEEN = "<custom_token_3>", ("<|eot_id|>", "<custom_token_4>", "<custom_token_5>", "<custom_token_1>")


class Orpheus(CodeStream):
    """`codec` is a SNAC of the package `snac`, or the folder or hub id of one."""

    sample_rate, temperature = 24000, 0.6
    longest = 1200  # fourteen seconds
    code = r"<custom_token_(\d+)>"
    ends = ("<custom_token_2>", "<|eot_id|>")
    books = 7
    needed_codec = "a SNAC"

    @classmethod
    def numbered(cls, tokenizer: Any) -> dict[int, int]:
        return {token: number - _FIRST for token, number in super().numbered(tokenizer).items() if number >= _FIRST}

    def ids(self, text: str) -> list[int]:
        named = [self.tokenizer.convert_tokens_to_ids(word) for word in (_BEGIN, *_BETWEEN)]
        return [named[0], *(int(token) for token in self.tokenizer(text)["input_ids"]), *named[1:]]

    def outcome(self, numbers: list[int]) -> list[list[int]]:
        """Whole frames of seven codes. A code of another place than the next one's is left out."""
        codes = list[int]()
        for number in numbers:
            book, code = divmod(number, self.per_book)
            if book == len(codes) % self.books:
                codes.append(code)
        return [codes[first : first + self.books] for first in range(0, len(codes) - self.books + 1, self.books)]

    def open_codec(self, name: str | Path, device: torch.device) -> Any:
        try:
            from snac import SNAC
        except ImportError:
            raise OutriderError(f"Orpheus's codec needs snac: {install_command('speech')}") from None
        folder = folder_of(name)
        described, tensors = store.read_json(folder / "config.json"), store.tensors_of(folder / "pytorch_model.bin")
        try:
            with torch.device("meta"):  # takes no memory that the file does not fill
                codec = SNAC(**described)
            codec.load_state_dict(dict(tensors), assign=True)
            return codec.eval().to(device)
        except Exception as error:  # a wrong configuration can fail in any way
            raise Incompatible(f"{folder} is no SNAC: {' '.join(str(error).split())[:200]}") from None

    def decoded(self, outcome: Sequence[Sequence[int]]) -> Tensor:
        device = next(self.codec.parameters()).device
        frames = torch.tensor(outcome, device=device)
        books = [frames[:, list(places)].flatten()[None] for places in _BOOKS]
        with torch.random.fork_rng(devices=[]):  # the decoder adds noise
            torch.manual_seed(0)
            samples: Tensor = self.codec.decode(books)[0, 0]
        return samples
