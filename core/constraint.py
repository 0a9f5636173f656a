"""Constraints on an output: which token ids may follow which, path by path.

A `Constraint` starts a `Cursor` for each row, whose prompt may have a constraint of its own; a cursor advances by
tokens, retreats, and says which ids may follow. `PathMasks` holds the cursors of a batch and gives a mask for each node
of a draft: a mask belongs to the path that leads to a node, not to its depth. Independent of what a token means and of
how masks are applied.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InvalidOption, OutriderError, Unsatisfied

_WORD = 32  # ids of a mask's word


class Cursor(Protocol):
    """A place in one row's output."""

    def advance(self, token: int) -> bool:
        """Read a token; False if it may not follow, and the place stays."""

    def retreat(self, count: int) -> None:
        """Drop the last tokens read."""

    def fill(self, words: np.ndarray) -> None:
        """Set the bits of the ids that may follow; words [ceil(V / 32)] are int32 zeros, bit i of word w is id
        32 w + i."""

    def forced(self) -> list[int]:
        """The tokens that follow whatever is chosen, as far as they are known. They are used as guesses, so another
        way to write the same is no error."""

    @property
    def complete(self) -> bool: ...  # whether the output may end here, or has ended


class Constraint(Protocol):
    """Restricts the output of each row by itself. An end token is a token like others: where the output may end, it may
    follow."""

    def start(self) -> Cursor: ...


def unsatisfied(whose: str, output: Sequence[int]) -> Unsatisfied:
    """The error of an output whose last token may not be there."""
    return Unsatisfied(
        f"{whose} emitted a token that its constraint forbids, after {max(len(output) - 1, 0)} tokens: the constraint "
        "lets nothing follow there, can't be followed so far, or the logits processors forbid all that it allows"
    )


class Free:
    """Allows every output: for a batch in which requests may have constraints of their own."""

    def start(self) -> Cursor:
        return _Free()


class _Free:
    complete = True

    def advance(self, token: int) -> bool:
        return True

    def retreat(self, count: int) -> None:
        pass

    def fill(self, words: np.ndarray) -> None:
        words[:] = -1

    def forced(self) -> list[int]:
        return []


class ConstrainedPrompt(list[int]):
    """A prompt whose output obeys a constraint of its own instead of that of the other rows."""

    def __init__(self, tokens: Iterable[int], constraint: Constraint) -> None:
        super().__init__(tokens)
        self.constraint = constraint


class Walker:
    """A cursor that goes to any output, by way of the longest common prefix with the last one. After an error of the
    cursor it starts again."""

    def __init__(self, constraint: Constraint) -> None:
        self._constraint = constraint
        self._start(None)

    def _start(self, error: OutriderError | None) -> None:
        self.cursor, self.error = self._constraint.start(), error
        self._place: list[int] = []

    def reach(self, before: list[int], path: Sequence[int] = ()) -> bool:
        """Go to the output `before` followed by `path`; False if the constraint forbids it, and the place is then
        where it first does, or if the cursor can't go there, and `error` says why."""
        try:
            return self._reach(before, path)
        except OutriderError as error:
            self._start(error)
            return False

    def fill(self, words: np.ndarray) -> None:
        """As the cursor's; no ids if it can't."""
        try:
            self.cursor.fill(words)
        except OutriderError as error:
            words[:] = 0
            self._start(error)

    def _reach(self, before: list[int], path: Sequence[int]) -> bool:
        place, wanted = self._place, [*before, *path]
        common = len(before) if place[: len(before)] == before else 0
        while common < min(len(place), len(wanted)) and place[common] == wanted[common]:
            common += 1
        if common < len(place):
            self.cursor.retreat(len(place) - common)
            del place[common:]
        for token in wanted[common:]:
            if not self.cursor.advance(token):
                return False
            place.append(token)
        return True


@dataclass(frozen=True)
class PathMasks:
    """The rows' committed outputs and cursors. Changes return a new object, since marks may hold the old one; cursors
    are shared, as their place is not part of the state."""

    constraint: Constraint
    outputs: tuple[list[int], ...]
    walkers: tuple[Walker, ...]

    @classmethod
    def of(cls, constraint: Constraint, prompts: Sequence[Sequence[int]]) -> PathMasks:
        """A row for each prompt, without output."""
        masks = cls(constraint, (), ()).arranged([-1] * len(prompts))
        for row, prompt in enumerate(prompts):
            masks = masks.entered(row, prompt)
        return masks

    def arranged(self, order: Sequence[int]) -> PathMasks:
        """Row i becomes what row order[i] was; -1: an empty row."""
        outputs = tuple(self.outputs[row] if row >= 0 else [] for row in order)
        walkers = tuple(self.walkers[row] if row >= 0 else Walker(self.constraint) for row in order)
        return PathMasks(self.constraint, outputs, walkers)

    def entered(self, row: int, prompt: Sequence[int]) -> PathMasks:
        """The output of this prompt starts in this row."""
        constraint = prompt.constraint if isinstance(prompt, ConstrainedPrompt) else self.constraint
        outputs, walkers = list(self.outputs), list(self.walkers)
        outputs[row], walkers[row] = [], Walker(constraint)
        return PathMasks(self.constraint, tuple(outputs), tuple(walkers))

    def committed(self, tokens: Sequence[Sequence[int]]) -> PathMasks:
        """Tokens of each row were emitted; -1 is padding."""
        rows = zip(self.outputs, tokens, strict=True)
        outputs = tuple([*before, *(token for token in new if token >= 0)] for before, new in rows)
        return PathMasks(self.constraint, outputs, self.walkers)

    def bits(self, paths: Sequence[Sequence[Sequence[int]]], vocabulary: int) -> Tensor:
        """For K uncommitted paths of each row (-1 pads), the ids that may follow, [B, K, ceil(V / 32)] int32 on the
        host. All ids where the constraint forbids the path or lets nothing follow, as no exact rule goes there."""
        count = max(map(len, paths), default=0)
        words = np.zeros((len(paths), count, -(-vocabulary // _WORD)), dtype=np.int32)
        for row, place, path in self._in_order(paths):
            if self.walkers[row].reach(self.outputs[row], path):
                self.walkers[row].fill(words[row, place])
            if not words[row, place].any():
                words[row, place] = -1
        return torch.from_numpy(words)

    def corrections(
        self, paths: Sequence[Sequence[Sequence[int]]], tokens: Sequence[Sequence[int]], vocabulary: int
    ) -> tuple[list[int], Tensor]:
        """The places at which the constraint allows some row's path and forbids its token there, and their bits as
        above; all ids for the rows whose token is allowed."""
        found = dict[tuple[int, int], np.ndarray]()
        for row, place, path in self._in_order(paths):
            walker, before = self.walkers[row], self.outputs[row]
            if walker.reach(before, path) and not walker.reach(before, [*path, tokens[row][place]]):
                words = found[row, place] = np.zeros(-(-vocabulary // _WORD), dtype=np.int32)
                if walker.reach(before, path):
                    walker.fill(words)
        places = sorted({place for _, place in found})
        bits = np.full((len(paths), len(places), -(-vocabulary // _WORD)), -1, dtype=np.int32)
        for (row, place), words in found.items():
            if words.any():
                bits[row, places.index(place)] = words
        return places, torch.from_numpy(bits)

    def _in_order(self, paths: Sequence[Sequence[Sequence[int]]]) -> Iterator[tuple[int, int, list[int]]]:
        """(row, place, path without padding), each row's depth first, which are short ways for its cursor."""
        for row, given in enumerate(paths):
            wanted = [[token for token in path if token >= 0] for path in given]
            for place in sorted(range(len(wanted)), key=wanted.__getitem__):
                yield row, place, wanted[place]


class _Places:
    """A cursor over numbered states; retreats by remembering them."""

    def __init__(self, start: int) -> None:
        self._states = [start]

    @property
    def state(self) -> int:
        return self._states[-1]

    def go(self, state: int | None) -> bool:
        if state is None:
            return False
        self._states.append(state)
        return True

    def retreat(self, count: int) -> None:
        if count:
            del self._states[-count:]


def _set(words: np.ndarray, ids: Sequence[int]) -> None:
    index = np.asarray(ids, dtype=np.int64)
    bits = np.left_shift(np.uint32(1), (index % _WORD).astype(np.uint32), dtype=np.uint32)
    np.bitwise_or.at(words.view(np.uint32), index // _WORD, bits)


@dataclass(frozen=True, eq=False)
class Automaton:
    """A finite automaton: `moves[state]` maps each token that may follow to the next state; the output starts in state
    0 and may end in the states `ends`, whose end tokens are moves like others."""

    moves: Mapping[int, Mapping[int, int]]
    ends: frozenset[int] = frozenset()

    def start(self) -> Cursor:
        return _AutomatonCursor(self)


class _AutomatonCursor(_Places):
    def __init__(self, automaton: Automaton) -> None:
        super().__init__(0)
        self._automaton = automaton

    def advance(self, token: int) -> bool:
        return self.go(self._automaton.moves.get(self.state, {}).get(token))

    def fill(self, words: np.ndarray) -> None:
        _set(words, [*self._automaton.moves.get(self.state, {})])

    def forced(self) -> list[int]:
        forced, state = list[int](), self.state
        while len(forced) <= len(self._automaton.moves):
            ways = self._automaton.moves.get(state, {})
            if len(ways) != 1:
                break
            ((token, state),) = ways.items()
            forced.append(token)
        return forced

    @property
    def complete(self) -> bool:
        return self.state in self._automaton.ends


@dataclass(frozen=True, eq=False)
class Positions:
    """Token i of the output must be one of `allowed[i]`; None and positions past the end allow every id. For images and
    speech: a border, a region that stays as it is, a fixed ending."""

    allowed: Sequence[Sequence[int] | None]

    def __post_init__(self) -> None:
        for place, ids in enumerate(self.allowed):
            if ids is not None and (not len(ids) or min(ids) < 0):
                raise InvalidOption(f"position {place} allows {ids!r:.60}; give at least one id, none below 0, or None")

    def start(self) -> Cursor:
        return _PositionsCursor(self.allowed)


class _PositionsCursor(_Places):
    def __init__(self, allowed: Sequence[Sequence[int] | None]) -> None:
        super().__init__(0)
        self._allowed = allowed

    def _here(self) -> Sequence[int] | None:
        return self._allowed[self.state] if self.state < len(self._allowed) else None

    def advance(self, token: int) -> bool:
        ids = self._here()
        return self.go(self.state + 1 if ids is None or token in ids else None)

    def fill(self, words: np.ndarray) -> None:
        ids = self._here()
        if ids is None:
            words[:] = -1
        else:
            _set(words, ids)

    def forced(self) -> list[int]:
        forced = []
        for ids in self._allowed[self.state :]:
            if ids is None or len(ids) != 1:
                break
            forced.append(ids[0])
        return forced

    @property
    def complete(self) -> bool:
        return self.state >= len(self._allowed)
