"""Retrieval: what follows the end of the text in a corpus, found by exact suffix in a datastore.

REST (He et al., "REST: retrieval-based speculative decoding", arXiv 2311.08252): a suffix array over a tokenised
corpus; of the text's last tokens the longest run that occurs in it; the continuations there, merged into a trie
weighted by how often each was seen, of which the heaviest nodes are verified as a tree. Ours compares suffixes to a
fixed depth, which numpy sorts by doubling, takes evenly spread continuations where there are very many, learns how far
matches in this store can be trusted, and keeps it in one file that is mapped into memory. Knows token ids only.
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

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Grower, Trie
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG

Ids = NDArray[np.int32]
_DEPTH = 32  # suffixes are told apart by so many tokens
# how often what followed a match of 1, 2, ... tokens held the token that came: a general corpus, the built-in prompts
_TRUST = (0.26, 0.26, 0.24, 0.25, 0.31, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85)
_PRIOR = 8.0  # observations that the table above counts for
_HEADER = 1 << 20  # bytes of a file's description, at most


class DatastoreError(OutriderError):
    """A file that is no datastore, or not one for this model."""


class Datastore:
    """A corpus as one row of token ids, and the places in it sorted by what stands there. Between texts stands -1."""

    def __init__(self, tokens: Ids, order: Ids, about: Mapping[str, str] | None = None) -> None:
        self.tokens, self.order = np.asarray(tokens), np.asarray(order)  # mapped or not, as plain arrays: quicker
        self.about = dict(about or {})

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

    def find(self, query: Sequence[int], max_ngram: int, min_ngram: int) -> tuple[int, int, int]:
        """Length of the longest end of `query` that occurs, and the places in the order [first, last) where it does."""
        low, high, best = min_ngram, min(max_ngram, len(query), _DEPTH), (0, 0, 0)
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


class _Row:
    """The end of one row's text, its last guesses, and how far matches of each length can be trusted."""

    def __init__(self, end: Sequence[int]) -> None:
        self.end = list(end)
        self.trie, self.length = Trie(), 0
        self.right = [_PRIOR * trust for trust in _TRUST]
        self.seen = [_PRIOR] * len(_TRUST)

    def trust(self, length: int) -> float:
        """How often what follows a match this long in the store holds what comes."""
        bucket = min(length, len(_TRUST)) - 1
        return self.right[bucket] / self.seen[bucket]

    def add(self, tokens: Sequence[int], max_ngram: int) -> None:
        """Tokens were committed; the guesses that stood there are known to be right or wrong."""
        reached = len(self.trie.follow(tokens))
        inner = {*self.trie.parents}
        for depth, node in enumerate([-1, *self.trie.follow(tokens)]):
            if depth < len(tokens) and node in inner:
                bucket = min(self.length + depth, len(_TRUST)) - 1
                self.seen[bucket] += 1
                self.right[bucket] += depth < reached
        self.end = [*self.end, *tokens][-max_ngram:]


class REST(WeightFree, Grower):
    """Drafts a tree of what follows the longest suffix of the text, `min_ngram` to `max_ngram` tokens long, that occurs
    in `store`: a datastore, its path, or texts as lists of token ids. Up to `max_matches` of its places vote; the
    `nodes` heaviest nodes whose estimated probability reaches `min_probability` are kept (the paper: 64 nodes, 0)."""

    def __init__(
        self,
        *,
        store: Datastore | Path | str | Sequence[Sequence[int]] = (),
        nodes: int = 64,
        length: int = 10,
        max_ngram: int = 16,
        min_ngram: int = 1,
        min_probability: float = 0.03,
        max_matches: int = 64,
    ) -> None:
        if (
            min(nodes, length, min_ngram, max_matches) < 1
            or not min_ngram <= max_ngram <= _DEPTH
            or not 0 <= min_probability <= 1
        ):
            raise InvalidOption(
                f"nodes={nodes}, length={length}, min_ngram={min_ngram}, max_ngram={max_ngram}, "
                f"max_matches={max_matches}, min_probability={min_probability}: counts and lengths must be 1 or more, "
                f"min_ngram at most max_ngram, max_ngram at most {_DEPTH}, and min_probability from 0 to 1"
            )
        if isinstance(store, str | Path):
            store = Datastore.load(Path(store))
        self.store = store if isinstance(store, Datastore) else Datastore.build(store)
        self.nodes, self.length, self.max_ngram, self.min_ngram = nodes, length, max_ngram, min_ngram
        self.min_probability, self.max_matches = min_probability, max_matches

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._rows = [_Row(list(prompt)[-self.max_ngram :]) for prompt in prompts]

    def tries(self, room: Sequence[int]) -> list[Trie]:
        return [self._guess(row, min(self.length, left)) for row, left in zip(self._rows, room, strict=True)]

    def _guess(self, row: _Row, most: int) -> Trie:
        trie = row.trie = Trie()
        found = self.store.find(row.end, self.max_ngram, self.min_ngram) if most > 0 else (0, 0, 0)
        row.length = found[0]
        if not found[0]:
            return trie
        reach = [1.0]
        while len(reach) <= most and reach[-1] >= self.min_probability:  # deeper, no guess could be likely enough
            reach.append(reach[-1] * row.trust(found[0] + len(reach) - 1))
        chains = self.store.continuations(found, self.max_matches, len(reach) - 1)
        for chain in chains:
            trie.add(chain, 1 / len(chains))
        trie.weights = [weight * reach[depth] for weight, depth in zip(trie.weights, trie.depths, strict=True)]
        likely = sum(weight >= self.min_probability for weight in trie.weights)
        row.trie = trie.best(min(self.nodes, likely))
        return row.trie

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for row, tokens in zip(self._rows, verdict.rows(draft), strict=True):
            row.add(tokens, self.max_ngram)

    def end(self) -> None:
        self._rows = []
