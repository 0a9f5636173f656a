"""Builds retrieval datastores from text files, and loads them if they were built with the same tokenizer.

Sorting and search are in outrider.core.drafters.lookup.retrieval.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tqdm import tqdm

from outrider.core.drafters.lookup.retrieval import Datastore, DatastoreError
from outrider.core.errors import unreadable
from outrider.text.tokenizer import Tokens

_CHUNK = 1 << 16  # characters tokenised at once


def build(tokens: Tokens, files: Sequence[Path], *, progress: bool = True) -> Datastore:
    """Build a datastore with each file as one text; shows progress on stderr."""
    texts_by_path = [(path, _read(path)) for path in files]
    texts: list[list[int]] = []
    total = sum(len(text) for _, text in texts_by_path)
    with tqdm(total=total, unit="char", unit_scale=True, desc="Tokenising", disable=not progress) as bar:
        for _, text in texts_by_path:
            ids: list[int] = []
            for chunk in _chunks(text):
                ids += tokens.encode(chunk, special=False)
                bar.update(len(chunk))
            texts.append(ids)
    if not any(texts):
        raise DatastoreError("the files contain no text; give at least one file with text")
    with tqdm(total=Datastore.rounds(), desc="Sorting", disable=not progress) as bar:
        return Datastore.build(texts, {"tokenizer": tokens.fingerprint}, bar.update)


def load(path: Path, tokens: Tokens) -> Datastore:
    """Load a store; raises DatastoreError if it was built with another tokenizer."""
    store = Datastore.load(path, tokens.size)
    if store.about.get("tokenizer") != tokens.fingerprint:
        raise DatastoreError(
            f"{path} was built with another tokenizer, whose token ids are different; "
            "build it again with `outrider datastore build --model ...`"
        )
    return store


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DatastoreError(unreadable(path, error)) from None


def _chunks(text: str) -> list[str]:
    """Split a text at line ends, where tokenizers split as well."""
    chunks, start = [], 0
    while start < len(text):
        stop = min(start + _CHUNK, len(text))
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        chunks.append(text[start:stop])
        start = stop
    return chunks
