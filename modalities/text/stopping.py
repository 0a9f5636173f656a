"""Where a row's text ends: at stop strings, and by stopping criteria as transformers has them, applied after every
token, however many a target pass commits. Independent of models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from outrider.core.errors import InvalidOption
from outrider.text.detokenizer import Decode, Detokenizer

StoppingCriterion = Callable[[torch.Tensor, Any], Any]  # (token ids [1, L], None for the scores) -> whether to stop


def criteria_of(given: StoppingCriterion | Sequence[StoppingCriterion]) -> tuple[StoppingCriterion, ...]:
    """The option stopping_criteria, a function or a list of functions, as a tuple."""
    criteria = tuple(given) if isinstance(given, Sequence) else (given,)
    if not all(map(callable, criteria)):
        raise InvalidOption(
            f"stopping_criteria is {given!r:.80}; it must be a function of token ids [1, L] and None that says whether "
            "to stop, or a list of such functions"
        )
    return criteria


class Criteria:
    """The stopping criteria of one row."""

    def __init__(
        self, criteria: Sequence[StoppingCriterion], prompt: Sequence[int], device: torch.device | str = "cpu"
    ) -> None:
        self._criteria, self._prompt, self._device = criteria, list(prompt), device
        self._checked = 0

    def cut(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens after which the row stops; None: it goes on. `tokens` are all that it has emitted."""
        for count in range(self._checked + 1, len(tokens) + 1) if self._criteria else ():
            ids = torch.tensor([[*self._prompt, *tokens[:count]]], device=self._device)
            if any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in self._criteria):
                return count
        self._checked = len(tokens)
        return None


class Ending:
    """One row's text, up to where it ends."""

    def __init__(
        self, decode: Decode, prompt: Sequence[int], stops: Sequence[str], criteria: Sequence[StoppingCriterion]
    ) -> None:
        self._reader, self._criteria = Detokenizer(decode, stops), Criteria(criteria, prompt)
        self._cuts = bool(stops or criteria)

    def cut(self, tokens: Sequence[int]) -> int | None:
        """The number of tokens to keep of all that the row has emitted; None: all, and it goes on."""
        end = self._criteria.cut(tokens)
        self._reader.feed(tokens[len(self._reader.ids) : end])
        return end if self._reader.cut is None else self._reader.cut

    def text(self, emitted: Sequence[int], *, last: bool) -> str:
        """The text that committed tokens add."""
        if not self._cuts:  # else `cut` has read them
            self._reader.feed(emitted)
        return self._reader.take(last=last)
