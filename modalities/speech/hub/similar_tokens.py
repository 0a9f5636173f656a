"""Which tokens of a published model are alike, for the rules that accept a guess's neighbours.

Tokens are compared by vectors: the model's embeddings, or the steps of a codec's axes. Codes of different codebooks,
and tokens that are no codes, are alike to none. No table of all pairs is made. Independent of rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from outrider.core.errors import InvalidOption
from outrider.core.methods import RULES, Input

NEAREST = 200  # neighbours of each code, the most that rules may use
STEP = 0.45  # distance of neighbouring steps of an axis: rules call up to 0.5 alike
_FAR = 1e3  # between codebooks, and between tokens that are no codes
_PAIRS = 1 << 24  # compared at a time


class SimilarTokens:
    """The tokens `ids` (None: all) of a vocabulary of `size`, with their vectors [C, D], in order. `books` codebooks
    have equally many of them, one after another."""

    def __init__(
        self, size: int, vectors: Callable[[], Tensor], *, books: int = 1, ids: Sequence[int] | None = None
    ) -> None:
        self.size, self.books, self._vectors = size, books, vectors
        self._ids = None if ids is None else torch.tensor(ids)
        self.nearest = min(NEAREST, (size if ids is None else len(ids)) // books - 1)  # neighbours of each code

    @cached_property
    def ids(self) -> Tensor:
        return torch.arange(self.size) if self._ids is None else self._ids

    @cached_property
    def _codes(self) -> Tensor:
        return self._vectors().detach().float().cpu()

    @cached_property
    def codes(self) -> Tensor:
        """[V, D + 1] the vector of each token; the last number keeps books and other tokens apart."""
        vectors = self._codes
        apart = -_FAR * torch.arange(1, self.size + 1.0)
        apart[self.ids] = _FAR * (torch.arange(len(vectors)) // (len(vectors) // self.books))
        every = vectors.new_zeros(self.size, vectors.shape[1] + 1)
        every[self.ids, :-1], every[:, -1] = vectors, apart
        return every

    @cached_property
    def embeddings(self) -> Tensor:
        """[V, D B] vectors whose cosine is 0 for tokens of different books, and for tokens that are no codes."""
        vectors, book = self._codes, len(self._codes) // self.books
        every = vectors.new_zeros(self.size, self.books, vectors.shape[1])
        every[self.ids, torch.arange(len(vectors)) // book] = vectors - vectors.mean(0)
        return every.flatten(1)

    @cached_property
    def neighbours(self) -> Tensor:
        """[V, K] the nearest codes of each code of its book, nearest first; of other tokens themselves."""
        vectors, book = self._codes, len(self._codes) // self.books
        count = self.nearest
        table = torch.arange(self.size)[:, None].repeat(1, max(count, 1))
        for first in range(0, len(vectors), book):
            own, ids = vectors[first : first + book], self.ids[first : first + book]
            for start in range(0, book, max(_PAIRS // book, 1)):
                rows = torch.arange(start, min(start + max(_PAIRS // book, 1), book))
                far = torch.cdist(own[rows], own)
                far[torch.arange(len(rows)), rows] = torch.inf  # a code is not its own neighbour
                near = far.topk(count, largest=False).indices if count else far.argsort(1)[:, :0]
                table[ids[rows], :count] = ids[near]
        return table

    def inputs(self) -> dict[Input, Callable[[], Tensor]]:
        """The rules' inputs."""
        return {
            Input.NEIGHBOURS: lambda: self.neighbours,
            Input.CODES: lambda: self.codes,
            Input.EMBEDDINGS: lambda: self.embeddings,
        }


def rule_inputs(
    similar: SimilarTokens | None, rule: Any, given: Mapping[str, Any]
) -> Mapping[Input, Callable[[], Tensor]]:
    """The inputs of a rule for these tokens; an error if it compares tokens and nothing says which are alike."""
    if similar is not None:
        return similar.inputs()
    method = RULES.get(rule) if isinstance(rule, str) else None
    wanted = {Input.NEIGHBOURS, Input.CODES, Input.EMBEDDINGS}
    lacking = [option for option, kind in (method.inputs.items() if method else ()) if kind in wanted]
    for option in lacking:
        if option not in given:
            raise InvalidOption(
                f"the rule {rule} accepts codes in place of similar ones, and this model's tokens are words; "
                f"choose another rule, or give {option}="
            )
    return {}


def unit(rows: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Embedding rows as unit vectors."""
    return partial(_unit, rows)


def _unit(rows: Callable[[], Tensor]) -> Tensor:
    return torch.nn.functional.normalize(rows().detach().float(), dim=-1)


def grid_points(count: int, levels: Sequence[int]) -> Tensor:
    """[C, D] the places of codes whose digits, the first axis fastest, are steps of a codec's axes."""
    codes, axes = torch.arange(count), []
    for size in levels:
        axes.append(codes % size)
        codes = codes // size
    return torch.stack(axes, 1) * STEP
