"""Retrievers: which passages are most like a query. Sparse (BM25) and dense, exact or over an approximate index.

Each scores any few passages just as it scores all of them, so that a small cache in front of it ranks as it would
itself. A query is encoded once, whoever asks then. Knows texts, nothing of language models that write.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.assets.store import transformers_model, unpacked
from outrider.core.errors import Incompatible, unknown
from outrider.core.paths import cache_folder

Numbers = NDArray[np.float32]
_BATCH = 32  # passages that are embedded at once
_LONGEST = 256  # tokens that the embedder was made for
_FEW = 16  # queries of one call: faiss adds up in another order from 20 on


class Retriever(Protocol):
    """`search` looks through everything, for several queries at once; `score` rates a few passages in the same way."""

    name: str
    passages: Sequence[str]

    def encode(self, query: str) -> Any: ...
    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        """For each query the numbers of the passages most like it, best first."""

    def score(self, query: Any, numbers: Sequence[int]) -> Numbers: ...


class BM25:
    """Words in common, rare ones counting more (the package bm25s)."""

    name = "bm25"

    def __init__(self, passages: Sequence[str]) -> None:
        import bm25s

        self.passages = passages
        self._tokenize: Any = bm25s.tokenize
        self._index: Any = bm25s.BM25()
        self._index.index(self._tokenize(list(passages), show_progress=False), show_progress=False)

    def encode(self, query: str) -> list[int]:
        """The ids of its words; those that no passage has say nothing."""
        (words,) = self._tokenize([query], return_ids=False, show_progress=False)
        ids: list[int] = self._index.get_tokens_ids(words)
        return ids

    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        found = []
        for query in queries:
            scores = self._index.get_scores_from_ids(query) if query else np.zeros(len(self.passages), np.float32)
            best = np.argsort(-scores, kind="stable")[:count]  # of equal ones the first
            found.append([int(one) for one in best])
        return found

    def score(self, query: Any, numbers: Sequence[int]) -> Numbers:
        found = np.zeros(len(numbers), np.float32)
        if not len(numbers):
            return found
        order = np.argsort(numbers)
        wanted = np.asarray(numbers)[order]
        held = self._index.scores
        for word in query:  # in the order in which all passages are scored, which rounds alike
            part = slice(held["indptr"][word], held["indptr"][word + 1])
            places, values = held["indices"][part], held["data"][part]
            at = np.searchsorted(wanted, places)
            hit = (at < len(wanted)) & (wanted[np.minimum(at, len(wanted) - 1)] == places)
            np.add.at(found, order[at[hit]], values[hit])
        return found


class Embedder:
    """all-MiniLM-L6-v2: the mean of a text's last states, of length 1."""

    name = "minilm"
    width = 384

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        folder = unpacked("minilm")
        self._model = transformers_model(folder, "float32", kind="AutoModel").eval()
        self._tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokens.enable_truncation(_LONGEST)
        self._tokens.enable_padding()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Numbers:
        read = self._tokens.encode_batch(list(texts))
        mask = torch.tensor([one.attention_mask for one in read])
        states = self._model(torch.tensor([one.ids for one in read]), attention_mask=mask).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        found: Numbers = torch.nn.functional.normalize(mean, dim=1).float().numpy()
        return found


Embed = Callable[[Sequence[str]], Numbers]


class Dense:
    """Vectors that point the same way. `approximate` goes through a graph of neighbours (HNSW) and may miss the best;
    else every passage is looked at. Both are faiss's."""

    def __init__(self, passages: Sequence[str], *, approximate: bool = False, embed: Embed | None = None) -> None:
        import faiss

        self.name = "dense-approximate" if approximate else "dense"
        self.passages = passages
        self.embed = Embedder() if embed is None else embed
        self.vectors = vectors(self.embed, passages)
        width = self.vectors.shape[1]
        self._index = (
            faiss.IndexHNSWFlat(width, 32, faiss.METRIC_INNER_PRODUCT) if approximate else faiss.IndexFlatIP(width)
        )
        self._index.add(self.vectors)

    def encode(self, query: str) -> Numbers:
        found: Numbers = self.embed([query])[0]
        return found

    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        found: list[list[int]] = []
        for start in range(0, len(queries), _FEW):
            _, numbers = self._index.search(np.stack(queries[start : start + _FEW]), min(count, len(self.passages)))
            found += [[int(one) for one in row if one >= 0] for row in numbers]
        return found

    def score(self, query: Any, numbers: Sequence[int]) -> Numbers:
        found: Numbers = self.vectors[np.asarray(numbers, dtype=np.int64)] @ query
        return found


def vectors(embed: Embed, passages: Sequence[str]) -> Numbers:
    """The vectors of all passages: made once, under a progress bar, then kept in the cache."""
    digest = hashlib.sha256("\0".join((getattr(embed, "name", ""), *passages)).encode()).hexdigest()[:16]
    path = cache_folder() / "retrieval" / f"{digest}.npy"
    kept = hasattr(embed, "name")
    if kept and path.is_file():
        found: Numbers = np.load(path, allow_pickle=False)
        if found.shape[:1] == (len(passages),):
            return found
    found = np.concatenate(list(_pieces(embed, passages)))
    if kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npy")
        np.save(partial, found)
        partial.replace(path)
    return found


def _pieces(embed: Embed, passages: Sequence[str]) -> Iterator[Numbers]:
    from tqdm import tqdm

    starts = range(0, len(passages), _BATCH)
    for start in tqdm(starts, desc="Embedding", unit="batch", disable=None, leave=False):
        yield embed(passages[start : start + _BATCH])


RETRIEVERS: Mapping[str, Callable[[Sequence[str]], Retriever]] = {
    "dense": Dense,
    "dense-approximate": lambda passages: Dense(passages, approximate=True),
    "bm25": BM25,
}


def retriever(name: str, passages: Sequence[str]) -> Retriever:
    """One of RETRIEVERS over these passages."""
    if name not in RETRIEVERS:
        raise unknown("retriever", name, RETRIEVERS)
    try:
        return RETRIEVERS[name](passages)
    except ModuleNotFoundError as error:
        raise Incompatible(
            f"the retriever '{name}' needs the package {error.name}, which is not installed: "
            "pip install 'outrider[retrieval]'"
        ) from None
