"""Passages to retrieve from (bundled texts or the user's files), and questions about them.

Independent of retrieval; see outrider.text.rag.retrievers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from outrider.core.assets.archives import members
from outrider.core.errors import InvalidOption, OutriderError, unknown, unreadable

_PASSAGE_WORDS = 90  # approximate length of a passage
_SUFFIXES = (".txt", ".md", ".rst", ".py")
_MIN_PASSAGES = 2


class DocumentError(OutriderError):
    """Documents that cannot be read or are empty."""


@dataclass(frozen=True)
class Question:
    """A question that the documents answer. A correct answer contains one of `answers`."""

    id: str
    text: str
    answers: tuple[str, ...]

    def answered_by(self, text: str) -> bool:
        """Whether the text contains one of the answers as whole words, ignoring case."""
        return any(re.search(rf"(?<!\w){re.escape(answer)}(?!\w)", text, re.IGNORECASE) for answer in self.answers)


def documents(source: str) -> list[str]:
    """Return the passages of "named-things" (people, places and events of WordNet), of "speeches", or of a file or
    folder of text files."""
    result = list(SOURCES[source]()) if source in SOURCES else _files(Path(source).expanduser(), source)
    if len(result) < _MIN_PASSAGES:
        raise DocumentError(f"{source} has {len(result)} passages; retrieval needs at least {_MIN_PASSAGES}")
    return result


def questions(path: Path | None = None, limit: int | None = None) -> list[Question]:
    """Return our fifty questions about named things, or those of a JSON lines file with "question" and "answers"."""
    if path is None:
        text, source = resources.files("outrider.text").joinpath("questions.jsonl").read_text("utf-8"), "questions"
    else:
        source = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(unreadable(source, error)) from None
    result = [_question(line, f"{source}, line {n}", n) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not result:
        raise DocumentError(f'{source} contains no questions; expected JSON lines with "question" and "answers"')
    return result[:limit]


def _question(line: str, where: str, number: int) -> Question:
    try:
        record = json.loads(line)
        text, answers = record["question"], record["answers"]
        valid = isinstance(text, str) and text.strip() and isinstance(answers, list)
        valid = valid and bool(answers) and all(isinstance(answer, str) and answer for answer in answers)
    except (ValueError, KeyError, TypeError, RecursionError):
        valid = False
    if not valid:
        raise DocumentError(f'{where}: expected a JSON object with "question": "..." and "answers": ["...", ...]')
    return Question(str(number), text, tuple(answers))


# ---- where passages come from


def _named() -> Iterator[str]:
    """Yield one passage for each named thing: its names and WordNet's definition without examples."""
    (text,) = members("wordnet", r"/dict/data\.noun$")
    for line in text.splitlines():
        entry, separator, gloss = line.partition(" | ")
        fields = entry.split()
        if not separator or " @i " not in entry:  # keep instances only, such as a person or a place
            continue
        names = [fields[position].replace("_", " ") for position in range(4, 4 + 2 * int(fields[3], 16), 2)]
        definition = re.sub(r'\s*"[^"]*"?', "", gloss).strip().strip(";").strip()
        if definition:
            yield f"{', '.join(names)}: {definition}"


def _speeches() -> Iterator[str]:
    for text in members("speeches", r"/data/\d.*\.json$"):
        yield from passages(json.loads(text)["text"])


SOURCES: Mapping[str, Callable[[], Iterator[str]]] = {"named-things": _named, "speeches": _speeches}


def _files(path: Path, source: str) -> list[str]:
    if not path.exists():
        raise unknown("documents", source, (*SOURCES, "a file", "a folder"))
    files = sorted(file for file in path.rglob("*") if file.suffix in _SUFFIXES and file.is_file())
    result: list[str] = []
    for file in files if path.is_dir() else [path]:
        try:
            result += passages(file.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(unreadable(file, error)) from None
    return result


def passages(text: str, words: int = _PASSAGE_WORDS) -> Sequence[str]:
    """Split a text into passages of whole sentences with about `words` words each."""
    if words < 1:
        raise InvalidOption(f"words is {words}; a passage must have 1 word or more")
    result, pending = list[str](), list[str]()
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
        pending += sentence.split()
        while len(pending) >= 2 * words:  # a very long sentence
            result.append(" ".join(pending[:words]))
            pending = pending[words:]
        if len(pending) >= words:
            result.append(" ".join(pending))
            pending = []
    if pending:
        result.append(" ".join(pending))
    return result
