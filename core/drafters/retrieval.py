"""Retrieval: what follows the end of the text in a corpus, found by exact suffix in a datastore.

REST (He et al., "REST: retrieval-based speculative decoding", arXiv 2311.08252): a suffix array over a tokenised
corpus; of the text's last tokens the longest run that occurs in it; the continuations there, merged into a trie
weighted by how often each was seen, of which the heaviest nodes are verified as a tree. Ours compares suffixes to a
fixed depth, which numpy sorts by doubling, takes evenly spread continuations where there are very many, and keeps the
store in one file that is mapped into memory. Knows token ids only.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.trie import Trie, planted
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.laws import Sampling
from outrider.core.target import Prefill, Prompts, Scores

Ids = NDArray[np.int32]
_DEPTH = 32  # suffixes are told apart by so many tokens
_HEADER = 1 << 20  # bytes of a file's description, at most


class DatastoreError(OutriderError):
    """A file that is no datastore, or not one for this model."""


class Datastore:
    """A corpus as one row of token ids, and the places in it sorted by what stands there. Between texts stands -1."""

    def __init__(self, tokens: Ids, order: Ids, about: Mapping[str, str] | None = None) -> None:
        self.tokens, self.order, self.about = tokens, order, dict(about or {})

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(
        cls,
        texts: Sequence[Sequence[int]],
        about: Mapping[str, str] | None = None,
        progress: Callable[[int], object] = lambda done: None,
    ) -> Datastore:
        """Sort every place of the texts; `progress` is told of each doubling, of which there are `rounds()`."""
        joined = [np.append(np.asarray(text, dtype=np.int32), np.int32(-1)) for text in texts if len(text)]
        tokens = np.concatenate(joined) if joined else np.zeros(0, np.int32)
        if len(tokens) >= 1 << 31:
            raise InvalidOption(f"a datastore holds up to {(1 << 31) - 1:,} tokens; these texts have {len(tokens):,}")
        return cls(tokens, _sorted_places(tokens, progress), about)

    @staticmethod
    def rounds() -> int:
        return _DEPTH.bit_length()

    def save(self, path: Path) -> None:
        """One safetensors file, written beside and put in place when whole."""
        parts = {"tokens": self.tokens, "order": self.order}
        header: dict[str, Any] = {"__metadata__": {"kind": "outrider datastore", **self.about}}
        start = 0
        for name, part in parts.items():
            header[name] = {"dtype": "I32", "shape": [len(part)], "data_offsets": [start, start + 4 * len(part)]}
            start += 4 * len(part)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        beside = path.with_name(path.name + ".part")
        with beside.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for part in parts.values():
                file.write(part.astype("<i4", copy=False).tobytes())
        os.replace(beside, path)

    @classmethod
    def load(cls, path: Path, vocabulary: int | None = None) -> Datastore:
        """Map a file into memory. All that is in it is checked but the order, which can only make guesses worse."""
        try:
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header: Any = json.loads(file.read(size)) if size <= _HEADER else None
            count = _count(header)
            if 8 + size + 8 * count != path.stat().st_size:
                raise ValueError("it is cut short or too long")
            parts = [_mapped(path, 8 + size + start, count) for start in (0, 4 * count)]
            about = {str(key): str(value) for key, value in header["__metadata__"].items()}
        except OSError as error:
            raise DatastoreError(f"{path} can't be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, struct.error, RecursionError, AttributeError) as error:
            raise DatastoreError(
                f"{path} is no datastore ({error}); make one with `outrider datastore build FILES -o {path.name}`"
            ) from None
        tokens, order = parts
        if len(tokens) and (order.min() < 0 or order.max() >= len(tokens) or tokens.min() < -1):
            raise DatastoreError(f"{path} is damaged: it points outside of itself; build it again")
        if vocabulary is not None and len(tokens) and tokens.max() >= vocabulary:
            raise DatastoreError(
                f"{path} holds token {int(tokens.max())} and the model's vocabulary ends at {vocabulary - 1}: "
                "it was built with another model's tokenizer"
            )
        return cls(tokens, order, about)

    def find(self, query: Sequence[int], longest: int, shortest: int) -> tuple[int, int, int]:
        """Length of the longest end of `query` that occurs, and the places in the order [first, last) where it does."""
        low, high, best = shortest, min(longest, len(query), _DEPTH), (0, 0, 0)
        while low <= high:  # what occurs at one length occurs at all shorter ones
            length = (low + high) // 2
            first, last = self._range(np.asarray(query[len(query) - length :], dtype=np.int32))
            if first < last:
                best, low = (length, first, last), length + 1
            else:
                high = length - 1
        return best

    def _range(self, query: Ids) -> tuple[int, int]:
        wanted = tuple(query.tolist())
        ends = []
        for after in (False, True):
            low, high = 0, len(self.order)
            while low < high:
                middle = (low + high) // 2
                place = int(self.order[middle])
                here = tuple(self.tokens[place : place + len(wanted)].tolist())
                if here < wanted or (after and here == wanted):
                    low = middle + 1
                else:
                    high = middle
            ends.append(low)
        return ends[0], ends[1]

    def continuations(self, found: tuple[int, int, int], most: int, length: int) -> list[list[int]]:
        """What follows a match, at up to `most` of its places."""
        size, first, last = found
        chosen = np.unique(np.linspace(first, last - 1, min(most, last - first)).astype(np.int64))
        places = self.order[chosen].astype(np.int64)[:, None] + size + np.arange(length)
        inside = places < len(self.tokens)
        table = np.where(inside, self.tokens[np.minimum(places, len(self.tokens) - 1)], -1)
        return [_until(row) for row in table.tolist()]


def _until(row: list[int]) -> list[int]:
    """Up to the end of the text."""
    return row[: row.index(-1)] if -1 in row else row


def _sorted_places(tokens: Ids, progress: Callable[[int], object]) -> Ids:
    """Places sorted by the `_DEPTH` tokens that stand there, in rounds that each look twice as far."""
    size = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    order = np.argsort(rank, kind="stable")
    progress(1)
    reach = 1
    while reach < _DEPTH:
        behind = np.zeros(size, dtype=np.int64)
        behind[: max(size - reach, 0)] = rank[reach:]
        key = rank * (size + 2) + behind
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank = np.empty(size, dtype=np.int64)
        rank[order] = np.cumsum(np.concatenate([[1], ordered[1:] != ordered[:-1]])) if size else 0
        reach *= 2
        progress(1)
    return order.astype(np.int32)


def _count(header: Any) -> int:
    """How many tokens a file's description promises, both parts being where `save` puts them."""
    if header["__metadata__"]["kind"] != "outrider datastore":
        raise ValueError("it holds something else")
    (count,) = header["tokens"]["shape"]
    if type(count) is not int or count < 0:
        raise ValueError("it has no size")
    for number, name in enumerate(("tokens", "order")):
        where = [4 * count * number, 4 * count * (number + 1)]
        if header[name] != {"dtype": "I32", "shape": [count], "data_offsets": where}:
            raise ValueError(f"its {name} are not as they should be")
    return count


def _mapped(path: Path, start: int, count: int) -> Ids:
    if not count:
        return np.zeros(0, np.int32)
    return np.memmap(path, dtype="<i4", mode="r", offset=start, shape=(count,))


class REST:
    """`store` is a datastore, the path of one, or texts as lists of token ids. Of the text's last `longest` to
    `shortest` tokens the longest run that the store has counts; `nodes` of what followed there are tried."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()
    bytes_read = 0

    def __init__(
        self,
        *,
        store: Datastore | Path | str | Sequence[Sequence[int]] = (),
        nodes: int = 64,
        length: int = 10,
        longest: int = 16,
        shortest: int = 2,
        least: float = 0.0,
        sample: int = 64,
    ) -> None:
        if min(nodes, length, shortest, sample) < 1 or not shortest <= longest <= _DEPTH or not 0 <= least <= 1:
            raise InvalidOption(
                f"nodes={nodes}, length={length}, shortest={shortest}, longest={longest}, least={least}, "
                f"sample={sample}: all must be 1 or more, shortest up to longest, longest up to {_DEPTH}, and least "
                "from 0 to 1"
            )
        if isinstance(store, str | Path):
            store = Datastore.load(Path(store))
        self.store = store if isinstance(store, Datastore) else Datastore.build(store)
        self.nodes, self.length, self.longest, self.shortest = nodes, length, longest, shortest
        self.least, self.sample = least, sample

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._ends = [list(prompt)[-self.longest :] for prompt in prompts]

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        tries = [self._guess(end, min(self.length, left)) for end, left in zip(self._ends, room.tolist(), strict=True)]
        return planted(tries, dice.device)

    def _guess(self, end: list[int], most: int) -> Trie:
        trie = Trie()
        found = self.store.find(end, self.longest, self.shortest) if most > 0 else (0, 0, 0)
        if not found[0]:
            return trie
        chains = self.store.continuations(found, self.sample, most)
        for chain in chains:
            trie.add(chain, 1 / len(chains))
        likely = sum(weight >= self.least for weight in trie.weights)
        return trie.best(min(self.nodes, likely))

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, dice: Dice) -> None:
        self._ends = [
            [*end, *tokens][-self.longest :] for end, tokens in zip(self._ends, verdict.rows(draft), strict=True)
        ]

    def end(self) -> None:
        self._ends = []
