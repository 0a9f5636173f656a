"""Retrieval: drafts what follows the text's longest suffix in a corpus.

REST (He et al., "REST: retrieval-based speculative decoding", arXiv 2311.08252): the longest suffix of the text that
occurs in a tokenised corpus is found in a suffix array; its continuations are merged into a trie, weighted by
frequency, and the heaviest nodes are verified as a tree. Ours sorts suffixes by their first 32 tokens, samples evenly
among many continuations, learns how reliable matches of each length are, and maps the datastore from one file. Works on
token ids alone.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from outrider.core.assets.files import replacing
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter
from outrider.core.errors import InvalidOption, OutriderError, unreadable
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG

Ids = NDArray[np.int32]
_DEPTH = 32  # suffixes are sorted by this many tokens
# how often the next token was among those after a match of 1, 2, ... tokens: a general corpus, the built-in prompts
_RELIABILITY = (0.26, 0.26, 0.24, 0.25, 0.31, 0.35, 0.40, 0.45, 0.50, 0.55, 0.60, 0.65, 0.70, 0.75, 0.80, 0.85)
_PRIOR = 8.0  # weight of the table above, in observations
_MAX_HEADER = 1 << 20  # bytes


class DatastoreError(OutriderError):
    """The file is not a datastore, or belongs to another model."""


class Datastore:
    """A corpus as one array of token ids with -1 after each text, and `order`, its positions sorted by the tokens that
    start there (a suffix array)."""

    def __init__(self, tokens: Ids, order: Ids, about: Mapping[str, str] | None = None) -> None:
        self.tokens, self.order = np.asarray(tokens), np.asarray(order)  # indexing a plain view is faster than a memmap
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
        """A datastore of these texts; `progress(1)` is called after each of `rounds()` sorting rounds."""
        joined = [np.append(np.asarray(text, dtype=np.int32), np.int32(-1)) for text in texts if len(text)]
        tokens = np.concatenate(joined) if joined else np.zeros(0, np.int32)
        if len(tokens) >= 1 << 31:
            raise InvalidOption(f"a datastore holds up to {(1 << 31) - 1:,} tokens; these texts have {len(tokens):,}")
        return cls(tokens, _sorted_positions(tokens, progress), about)

    @staticmethod
    def rounds() -> int:
        return _DEPTH.bit_length()

    def save(self, path: Path) -> None:
        """Write one safetensors file, atomically."""
        parts = {"tokens": self.tokens, "order": self.order}
        header: dict[str, Any] = {"__metadata__": {"kind": "outrider datastore", **self.about}}
        start = 0
        for name, part in parts.items():
            header[name] = {"dtype": "I32", "shape": [len(part)], "data_offsets": [start, start + 4 * len(part)]}
            start += 4 * len(part)
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with replacing(path) as temporary, temporary.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for part in parts.values():
                file.write(part.astype("<i4", copy=False).tobytes())

    @classmethod
    def load(cls, path: Path, vocabulary: int | None = None) -> Datastore:
        """Map a file into memory. Everything is checked except the sort order, which affects the drafts' quality
        only."""
        try:
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ValueError("it is not a regular file")
            with path.open("rb") as file:
                (size,) = struct.unpack("<Q", file.read(8))
                header: Any = json.loads(file.read(size)) if size <= _MAX_HEADER else None
            count = _count(header)
            if 8 + size + 8 * count != path.stat().st_size:
                raise ValueError("its length is not what its header says")
            parts = [_mapped(path, 8 + size + start, count) for start in (0, 4 * count)]
            about = {str(key): str(value) for key, value in header["__metadata__"].items()}
        except OSError as error:
            raise DatastoreError(unreadable(path, error)) from None
        except (ValueError, KeyError, TypeError, struct.error, RecursionError, AttributeError) as error:
            raise DatastoreError(
                f"{path} is not a datastore ({error}); make one with `outrider datastore build FILES -o {path.name}`"
            ) from None
        tokens, order = parts
        if len(tokens) and (order.min() < 0 or order.max() >= len(tokens) or tokens.min() < -1):
            raise DatastoreError(f"{path} is damaged: it has positions outside the corpus; build it again")
        if vocabulary is not None and len(tokens) and tokens.max() >= vocabulary:
            raise DatastoreError(
                f"{path} contains token {int(tokens.max())}, and the model's vocabulary ends at {vocabulary - 1}: it "
                "was built with another model's tokenizer"
            )
        return cls(tokens, order, about)

    def find(self, query: Sequence[int], max_ngram: int, min_ngram: int) -> tuple[int, int, int]:
        """(length, first, last): the longest suffix of `query` that occurs, at `order[first:last]`; length 0: none."""
        low, high, best = min_ngram, min(max_ngram, len(query), _DEPTH), (0, 0, 0)
        while low <= high:  # a suffix that occurs has all its own suffixes occur
            length = (low + high) // 2
            first, last = self._range(np.asarray(query[len(query) - length :], dtype=np.int32))
            if first < last:
                best, low = (length, first, last), length + 1
            else:
                high = length - 1
        return best

    def _range(self, query: Ids) -> tuple[int, int]:
        """The range of `order` whose positions start with `query`, by binary search."""
        key = tuple(query.tolist())
        bounds = []
        for after in (False, True):
            low, high = 0, len(self.order)
            while low < high:
                middle = (low + high) // 2
                start = int(self.order[middle])
                suffix = tuple(self.tokens[start : start + len(key)].tolist())
                if suffix < key or (after and suffix == key):
                    low = middle + 1
                else:
                    high = middle
            bounds.append(low)
        return bounds[0], bounds[1]

    def continuations(self, match: tuple[int, int, int], count: int, length: int) -> list[list[int]]:
        """The `length` tokens after a match of `find`, at up to `count` of its positions."""
        size, first, last = match
        chosen = np.unique(np.linspace(first, last - 1, min(count, last - first)).astype(np.int64))
        positions = self.order[chosen].astype(np.int64)[:, None] + size + np.arange(length)
        inside = positions < len(self.tokens)
        table = np.where(inside, self.tokens[np.minimum(positions, len(self.tokens) - 1)], -1)
        return [row[: row.index(-1)] if -1 in row else row for row in table.tolist()]  # up to the text's end


def _sorted_positions(tokens: Ids, progress: Callable[[int], object]) -> Ids:
    """Positions sorted by the `_DEPTH` tokens that start there, by prefix doubling."""
    size = len(tokens)
    rank = np.unique(tokens, return_inverse=True)[1].astype(np.int64) + 1
    order = np.argsort(rank, kind="stable")
    progress(1)
    reach = 1  # `rank` sorts by this many tokens
    while reach < _DEPTH:
        next_rank = np.zeros(size, dtype=np.int64)
        next_rank[: max(size - reach, 0)] = rank[reach:]
        key = rank * (size + 2) + next_rank
        order = np.argsort(key, kind="stable")
        ordered = key[order]
        rank = np.empty(size, dtype=np.int64)
        rank[order] = np.cumsum(np.concatenate([[1], ordered[1:] != ordered[:-1]])) if size else 0
        reach *= 2
        progress(1)
    return order.astype(np.int32)


def _count(header: Any) -> int:
    """The number of tokens, checked against the layout that `save` writes."""
    if header["__metadata__"]["kind"] != "outrider datastore":
        raise ValueError("its metadata names another kind")
    (count,) = header["tokens"]["shape"]
    if type(count) is not int or count < 0:
        raise ValueError("its number of tokens is invalid")
    for number, name in enumerate(("tokens", "order")):
        offsets = [4 * count * number, 4 * count * (number + 1)]
        if header[name] != {"dtype": "I32", "shape": [count], "data_offsets": offsets}:
            raise ValueError(f"the header of '{name}' is invalid")
    return count


def _mapped(path: Path, start: int, count: int) -> Ids:
    if not count:
        return np.zeros(0, np.int32)
    return np.memmap(path, dtype="<i4", mode="r", offset=start, shape=(count,))


class _Row:
    """One row: the last tokens of its text, its last draft, and how reliable matches of each length have been."""

    def __init__(self, tail: Sequence[int]) -> None:
        self.tail = list(tail)
        self.trie, self.match_length = Trie(), 0
        self.right = [_PRIOR * rate for rate in _RELIABILITY]
        self.seen = [_PRIOR] * len(_RELIABILITY)

    def reliability(self, length: int) -> float:
        """How often the next token is among those that follow a match of this length."""
        bucket = min(length, len(_RELIABILITY)) - 1
        return self.right[bucket] / self.seen[bucket]

    def add(self, tokens: Sequence[int], max_ngram: int) -> None:
        """Add committed tokens, and count which guesses of the last draft they confirm."""
        path = self.trie.follow(tokens)
        inner = {*self.trie.parents}
        for depth, node in enumerate([-1, *path]):
            if depth < len(tokens) and node in inner:
                bucket = min(self.match_length + depth, len(_RELIABILITY)) - 1
                self.seen[bucket] += 1
                self.right[bucket] += depth < len(path)
        self.tail = [*self.tail, *tokens][-max_ngram:]


class REST(WeightFree, TrieDrafter):
    """Drafts a tree of what follows the longest suffix of the text, `min_ngram` to `max_ngram` tokens long, that occurs
    in `store`: a datastore, its path, or texts as lists of token ids. Up to `max_matches` of its places vote; the
    `nodes` heaviest nodes whose estimated probability reaches `min_probability` are kept (the paper: 64 nodes, 0)."""

    def __init__(
        self,
        *,
        store: Datastore | Path | str | Sequence[Sequence[int]],
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

    def _guess(self, row: _Row, max_tokens: int) -> Trie:
        trie = row.trie = Trie()
        match = self.store.find(row.tail, self.max_ngram, self.min_ngram) if max_tokens > 0 else (0, 0, 0)
        row.match_length = match[0]
        if not match[0]:
            return trie
        reach = [1.0]  # by depth: the probability that the path to it is right, an upper bound for its nodes
        while len(reach) <= max_tokens and reach[-1] >= self.min_probability:
            reach.append(reach[-1] * row.reliability(match[0] + len(reach) - 1))
        chains = self.store.continuations(match, self.max_matches, len(reach) - 1)
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
