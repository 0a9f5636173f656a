"""The likeliest successors of every token of a model: those that ship, or those in the cache folder, where they are
kept once they are computed. Independent of how drafters use bigrams."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from outrider.core.assets.files import AssetError, write_tensors
from outrider.core.assets.store import Checkpoint
from outrider.core.drafters.lookup.ngram import bigram_table
from outrider.core.drafters.lookup.token_recycling import Successors
from outrider.core.paths import cache_folder
from outrider.core.protocol import Target

if TYPE_CHECKING:
    from outrider.text.model import TextModel

_SUCCESSORS = 8  # of each token
_SOON = 2e13  # bytes of weights times tokens of the vocabulary: about two minutes on two cores
# how often each of them came next in answers to the built-in prompts
_CHANCES = (0.131, 0.057, 0.068, 0.026, 0.026, 0.020, 0.019, 0.015)


class Bigrams(Mapping[int, Successors]):
    """The successors of each token and the chance of each, read off a table [V, K] on demand."""

    def __init__(self, table: Tensor) -> None:
        self._table = table.numpy()
        self._chances = list(_CHANCES[: table.shape[1]])

    def __getitem__(self, token: int) -> Successors:
        if not 0 <= token < len(self._table):
            raise KeyError(token)
        return self._table[token].tolist(), self._chances

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self._table)))

    def __len__(self) -> int:
        return len(self._table)


def bigrams(model: TextModel) -> Tensor:
    """[V, 8] the likeliest successors of each token, computed if they are not known."""
    target = model.target()
    table = known_bigrams(model, target.vocabulary)
    if table is not None:
        return table
    from tqdm import tqdm

    with tqdm(total=target.vocabulary, unit=" tokens", desc="Bigrams, once for this model", leave=False) as bar:
        table = bigram_table(target, _SUCCESSORS, progress=bar.update)
    with suppress(OSError, AssetError):  # a cache that can't be written costs the same the next time
        write_tensors(_cached(model), {"successors": table.int().cpu()})
    return table.cpu()


def known_bigrams(model: TextModel, vocabulary: int) -> Tensor | None:
    """The same if nothing has to be computed; else None."""
    shape = vocabulary, min(_SUCCESSORS, vocabulary)
    shipped = Path(str(resources.files("outrider.text"))) / "weights" / f"{model.name}.bigrams.safetensors"
    if shipped.is_file():
        table = Checkpoint(shipped)["successors"].long()
        return table if tuple(table.shape) == shape else None
    with suppress(OSError, AssetError, KeyError):
        table = Checkpoint(_cached(model))["successors"].long()
        if tuple(table.shape) == shape and int(table.min()) >= 0 and int(table.max()) < vocabulary:
            return table
    return None


def quick(target: Target) -> bool:
    """Are bigrams computed in a minute or two?"""
    return target.device.type != "cpu" or target.weight_bytes * target.vocabulary < _SOON


def _cached(model: TextModel) -> Path:
    place = hashlib.sha256(str(model.folder or model.name).encode()).hexdigest()[:8]
    return cache_folder() / "bigrams" / f"{model.name.replace('/', '--')[:60]}-{place}.safetensors"
