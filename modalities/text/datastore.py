"""Datastores for retrieval made of text files, and whether one was made with this model's tokenizer.

Knows files and tokenizers; how places are sorted and found is outrider.core.drafters.lookup.retrieval's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from outrider.core.drafters.lookup.retrieval import Datastore, DatastoreError
from outrider.text.tokenizer import Tokens

_PIECE = 1 << 16  # characters that are tokenised at once


def build(tokens: Tokens, files: Sequence[Path], *, progress: bool = True) -> Datastore:
    """Every file is one text. A progress bar on stderr says how far it is."""
    whole = [(path, _read(path)) for path in files]
    texts: list[list[int]] = []
    total = sum(len(text) for _, text in whole)
    with tqdm(total=total, unit="char", unit_scale=True, desc="Tokenising", disable=not progress) as bar:
        for _, text in whole:
            ids: list[int] = []
            for piece in _pieces(text):
                ids += tokens.encode(piece, special=False)
                bar.update(len(piece))
            texts.append(ids)
    if not any(texts):
        raise DatastoreError("the files hold no text; give at least one that does")
    with tqdm(total=Datastore.rounds(), desc="Sorting", disable=not progress) as bar:
        return Datastore.build(texts, {"tokenizer": tokens.fingerprint}, bar.update)


def load(path: Path, tokens: Tokens) -> Datastore:
    """A store for this tokenizer; one made with another is refused."""
    store = Datastore.load(path, tokens.size)
    if store.about.get("tokenizer") != tokens.fingerprint:
        raise DatastoreError(
            f"{path} was built with another tokenizer, so its token ids mean something else here; "
            "build it again with `outrider datastore build --model ...`"
        )
    return store


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise DatastoreError(f"{path} can't be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise DatastoreError(f"{path} is not UTF-8 text") from None


def _pieces(text: str) -> list[str]:
    """A text cut behind line ends, where tokenizers would have cut too."""
    found, start = [], 0
    while start < len(text):
        stop = min(start + _PIECE, len(text))
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        found.append(text[start:stop])
        start = stop
    return found
