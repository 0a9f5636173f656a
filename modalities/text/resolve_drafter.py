"""What only a text model knows and its drafters are given: documents as token ids, a datastore by its path, the
model's own bigrams.

Options of drafters come in as people write them, and go out as outrider.core.methods takes them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from outrider.core.assets.store import AssetError, Checkpoint
from outrider.core.drafters.combined.ensemble import MEMBERS
from outrider.core.drafters.lookup.ngram import bigram_table
from outrider.core.drafters.lookup.retrieval import Datastore
from outrider.core.drafters.lookup.token_recycling import Successors
from outrider.core.errors import InvalidOption
from outrider.core.paths import cache_folder
from outrider.core.protocol import Target
from outrider.text import datastore

if TYPE_CHECKING:
    from outrider.text.model import TextModel

_SUCCESSORS = 8  # of each token
_SOON = 2e13  # bytes of weights times tokens of the vocabulary: two minutes or so on two cores
# how often each of them came next in answers to the built-in prompts
_CHANCES = (0.131, 0.057, 0.068, 0.026, 0.026, 0.020, 0.019, 0.015)


def prepared(model: TextModel, drafter: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """A drafter's options with texts as token ids, and what it must have of the model added."""
    given = dict(options)
    prepare = _PREPARED.get(drafter)
    return given if prepare is None else prepare(model, given)


def _lookup(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    references = given.get("references")
    if references is not None:
        if isinstance(references, str):
            references = [references]
        given["references"] = [_ids(model, one) for one in references]
    return given


def _guided(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    if given.get("source") is not None:
        given["source"] = _ids(model, given["source"])
    return given


def _rest(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    store = given.get("store")
    if store is None:
        raise InvalidOption(
            "the drafter 'rest' needs store=..., the path of a datastore; make one of text files with "
            "`outrider datastore build FILES -o my.store`"
        )
    if isinstance(store, str | Path):
        given["store"] = datastore.load(Path(store).expanduser(), model.tokens)
    elif not isinstance(store, Datastore):
        given["store"] = [_ids(model, one) for one in store]
    return given


def _grammys(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    given.setdefault("model", model.target())
    given.setdefault("bigrams", bigrams(model))
    return given


def _recycling(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    """The table starts with the model's bigrams, which measured best; `initial_table=None` leaves it empty. Bigrams
    that a large model would take long to compute are computed only if `initial_table="bigrams"` is given."""
    asked = "initial_table" in given
    if given.setdefault("initial_table", "bigrams") == "bigrams":
        wanted = asked or _soon(model.target())
        table = bigrams(model) if wanted else known_bigrams(model, model.target().vocabulary)
        given["initial_table"] = None if table is None else Bigrams(table)
    return given


def _soon(target: Target) -> bool:
    """Are bigrams worked out in a minute or two?"""
    return target.device.type != "cpu" or target.weight_bytes * target.vocabulary < _SOON


class Bigrams(Mapping[int, Successors]):
    """The successors of each token and the chance of each, read off a table [V, K] as they are asked for."""

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


def _ensemble(model: TextModel, given: dict[str, Any]) -> dict[str, Any]:
    """Its members' options are theirs."""
    options = given.get("options") or {}
    if not isinstance(options, Mapping):
        raise InvalidOption(f"options is {options!r:.60}; give a dictionary of each drafter's options by its name")
    names = [one for one in given.get("drafters", MEMBERS) if isinstance(one, str)]
    made = {name: model.equipped(name, options.get(name, {})) for name in names}
    given["options"] = {**options, **{name: one for name, one in made.items() if one}}
    return given


_PREPARED: dict[str, Callable[[TextModel, dict[str, Any]], dict[str, Any]]] = {
    "prompt-lookup": _lookup,
    "input-guided": _guided,
    "rest": _rest,
    "n-grammys": _grammys,
    "token-recycling": _recycling,
    "ensemble": _ensemble,
}


def _ids(model: TextModel, text: str | Sequence[int]) -> list[int]:
    return model.tokens.encode(text, special=False) if isinstance(text, str) else list(text)


def bigrams(model: TextModel) -> Tensor:
    """[V, 8] the likeliest successors of each token: those that ship with us, or those in the cache folder, where they
    are kept once they are worked out."""
    target = model.target()
    found = known_bigrams(model, target.vocabulary)
    if found is not None:
        return found
    from tqdm import tqdm

    with tqdm(total=target.vocabulary, unit="token", desc="Bigrams, once for this model", leave=False) as bar:
        found = bigram_table(target, _SUCCESSORS, progress=bar.update)
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    path = _kept(model)
    with suppress(OSError, SafetensorError):  # a cache that can't be written costs the same the next time
        path.parent.mkdir(parents=True, exist_ok=True)
        beside = path.with_suffix(".part")
        save_file({"successors": found.int().cpu()}, beside)
        beside.replace(path)
    return found.cpu()


def known_bigrams(model: TextModel, vocabulary: int) -> Tensor | None:
    """The same where nothing has to be worked out; else None."""
    shape = vocabulary, min(_SUCCESSORS, vocabulary)
    shipped = Path(str(resources.files("outrider.text"))) / "weights" / f"{model.name}.bigrams.safetensors"
    if shipped.is_file():
        table = Checkpoint(shipped)["successors"].long()
        return table if tuple(table.shape) == shape else None
    with suppress(OSError, AssetError, KeyError):
        kept = Checkpoint(_kept(model))["successors"].long()
        if tuple(kept.shape) == shape and int(kept.min()) >= 0 and int(kept.max()) < vocabulary:
            return kept
    return None


def _kept(model: TextModel) -> Path:
    place = hashlib.sha256(str(model.folder or model.name).encode()).hexdigest()[:8]
    return cache_folder() / "bigrams" / f"{model.name.replace('/', '--')[:60]}-{place}.safetensors"


def for_auto(model: TextModel, drafter: str) -> Mapping[str, Any]:
    """Options of one of the drafters of "auto": bigrams where they are known, as nobody waits for them."""
    if drafter != "token-recycling":
        return model.equipped(drafter, {})
    table = known_bigrams(model, model.target().vocabulary)
    return {} if table is None else {"initial_table": Bigrams(table)}
