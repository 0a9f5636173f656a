"""Retrievers that rank passages by similarity to a query: sparse (BM25) and dense, exact or approximate.

Each scores a subset of passages exactly as it scores all of them, so that a cache in front of it ranks as it would. A
query is encoded once and can then be used repeatedly. Independent of generation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.core.assets.store import extract_zip, transformers_model
from outrider.core.errors import Incompatible, InvalidOption, install_command, unknown
from outrider.core.paths import cache_folder

Numbers = NDArray[np.float32]
_BATCH = 32  # passages per embedding batch
_MAX_TOKENS = 256  # the embedder's context
_SEARCH_BATCH = 16  # queries per call; from 20 on faiss sums in another order


class Retriever(Protocol):
    """`search` ranks all passages for several queries at once; `score` rates a subset in the same way."""

    name: str
    passages: Sequence[str]

    def encode(self, query: str) -> Any: ...
    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        """Return for each query the indices of the most similar passages, best first."""

    def score(self, query: Any, numbers: Sequence[int]) -> Numbers: ...


class BM25:
    """BM25: words in common, weighted by rarity (package bm25s)."""

    name = "bm25"

    def __init__(self, passages: Sequence[str]) -> None:
        import bm25s

        self.passages = passages
        self._tokenize: Any = bm25s.tokenize
        self._index: Any = bm25s.BM25()
        words = self._tokenize(list(passages), show_progress=False)
        if not words.vocab:
            raise InvalidOption("no passage has a word that BM25 counts (it leaves out 'the', 'a' ...); use 'dense'")
        self._index.index(words, show_progress=False)

    def encode(self, query: str) -> list[int]:
        """Return the ids of the query's words; words that occur in no passage are dropped."""
        (words,) = self._tokenize([query], return_ids=False, show_progress=False)
        ids: list[int] = self._index.get_tokens_ids(words)
        return ids

    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        results = []
        for query in queries:
            scores = self._index.get_scores_from_ids(query) if query else np.zeros(len(self.passages), np.float32)
            best = np.argsort(-scores, kind="stable")[:count]  # ties go to the lowest index
            results.append([int(index) for index in best])
        return results

    def score(self, query: Any, numbers: Sequence[int]) -> Numbers:
        scores = np.zeros(len(numbers), np.float32)
        if not len(numbers):
            return scores
        order = np.argsort(numbers)
        requested = np.asarray(numbers)[order]
        index = self._index.scores
        for word in query:  # summed in the same order as in search, for equal rounding
            entries = slice(index["indptr"][word], index["indptr"][word + 1])
            passages, values = index["indices"][entries], index["data"][entries]
            slots = np.searchsorted(requested, passages)
            matches = (slots < len(requested)) & (requested[np.minimum(slots, len(requested) - 1)] == passages)
            np.add.at(scores, order[slots[matches]], values[matches])
        return scores


class Embedder:
    """all-MiniLM-L6-v2: the normalised mean of a text's last hidden states."""

    name = "minilm"
    width = 384

    def __init__(self) -> None:
        from tokenizers import Tokenizer

        folder = extract_zip("minilm")
        self._model = transformers_model(folder, "float32", kind="AutoModel").eval()
        self._tokens = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokens.enable_truncation(_MAX_TOKENS)
        self._tokens.enable_padding()

    @torch.inference_mode()
    def __call__(self, texts: Sequence[str]) -> Numbers:
        encodings = self._tokens.encode_batch(list(texts))
        mask = torch.tensor([encoding.attention_mask for encoding in encodings])
        states = self._model(
            torch.tensor([encoding.ids for encoding in encodings]), attention_mask=mask
        ).last_hidden_state
        weights = mask[..., None].to(states.dtype)
        mean = (states * weights).sum(1) / weights.sum(1)
        result: Numbers = torch.nn.functional.normalize(mean, dim=1).float().numpy()
        return result


Embed = Callable[[Sequence[str]], Numbers]


class Dense:
    """Dense retrieval by inner product (faiss): exact over all passages, or `approximate` over an HNSW graph, which can
    miss the best passage."""

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
        vector: Numbers = self.embed([query])[0]
        return vector

    def search(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        results: list[list[int]] = []
        for start in range(0, len(queries), _SEARCH_BATCH):
            _, indices = self._index.search(
                np.stack(queries[start : start + _SEARCH_BATCH]), min(count, len(self.passages))
            )
            results += [[int(index) for index in row if index >= 0] for row in indices]
        return results

    def score(self, query: Any, numbers: Sequence[int]) -> Numbers:
        scores: Numbers = self.vectors[np.asarray(numbers, dtype=np.int64)] @ query
        return scores


def vectors(embed: Embed, passages: Sequence[str]) -> Numbers:
    """Embed all passages, with a progress bar; vectors of a named embedder are cached on disk."""
    digest = hashlib.sha256("\0".join((getattr(embed, "name", ""), *passages)).encode()).hexdigest()[:16]
    path = cache_folder() / "retrieval" / f"{digest}.npy"
    cached = hasattr(embed, "name")
    if cached and path.is_file():
        result: Numbers = np.load(path, allow_pickle=False)
        if result.shape[:1] == (len(passages),):
            return result
    result = np.concatenate(list(_embed_batches(embed, passages)))
    if cached:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npy")
        np.save(partial, result)
        partial.replace(path)
    return result


def _embed_batches(embed: Embed, passages: Sequence[str]) -> Iterator[Numbers]:
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
    """Build one of RETRIEVERS over the passages."""
    if name not in RETRIEVERS:
        raise unknown("retriever", name, RETRIEVERS)
    try:
        return RETRIEVERS[name](passages)
    except ModuleNotFoundError as error:
        raise Incompatible(
            f"the retriever '{name}' needs the package {error.name}, which is not installed: "
            f"{install_command('retrieval')}"
        ) from None
