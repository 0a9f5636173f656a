"""Documents to look things up in: passages of texts that travel in packages, or of files of one's own; and questions
about them.

Knows texts; how a passage is found is outrider.text.rag.retrievers' affair.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from outrider.core.assets.archives import members
from outrider.core.errors import InvalidOption, OutriderError, unknown

_WORDS = 90  # of a passage, about
_SUFFIXES = (".txt", ".md", ".rst", ".py")
_LEAST = 2  # passages that something can be looked up in


class DocumentError(OutriderError):
    """Documents that can't be read, or hold nothing."""


@dataclass(frozen=True)
class Question:
    """Something that the documents answer, and what a right answer has in it: one of `answers`."""

    id: str
    text: str
    answers: tuple[str, ...]

    def answered_by(self, text: str) -> bool:
        """Does it say one of the answers, as words of their own, in either case?"""
        return any(re.search(rf"(?<!\w){re.escape(one)}(?!\w)", text, re.IGNORECASE) for one in self.answers)


def documents(source: str) -> list[str]:
    """The passages of "named-things" (people, places and events of WordNet), of "speeches", or of a file or folder of
    text files."""
    found = list(SOURCES[source]()) if source in SOURCES else _files(Path(source).expanduser(), source)
    if len(found) < _LEAST:
        raise DocumentError(f"{source} holds {len(found)} passages; there is nothing to look up in so few")
    return found


def questions(path: Path | None = None, limit: int | None = None) -> list[Question]:
    """Our own fifty about named things, or those of a file of JSON lines with "question" and "answers"."""
    if path is None:
        text, source = resources.files("outrider.text").joinpath("questions.jsonl").read_text("utf-8"), "questions"
    else:
        source = str(path)
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{source} can't be read: {error}") from None
    found = [_question(line, f"{source}, line {n}", n) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not found:
        raise DocumentError(f'{source} holds no questions; it should have JSON lines with "question" and "answers"')
    return found[:limit]


def _question(line: str, where: str, number: int) -> Question:
    try:
        one = json.loads(line)
        text, answers = one["question"], one["answers"]
        fits = isinstance(text, str) and text.strip() and isinstance(answers, list)
        fits = fits and bool(answers) and all(isinstance(answer, str) and answer for answer in answers)
    except (ValueError, KeyError, TypeError, RecursionError):
        fits = False
    if not fits:
        raise DocumentError(f'{where}: expected a JSON object with "question": "..." and "answers": ["...", ...]')
    return Question(str(number), text, tuple(answers))


# ---- where passages come from


def _named() -> Iterator[str]:
    """One passage for each named thing: its names, and what WordNet says of it without its examples."""
    (text,) = members("wordnet", r"/dict/data\.noun$")
    for line in text.splitlines():
        data, bar, gloss = line.partition(" | ")
        fields = data.split()
        if not bar or " @i " not in data:  # an instance of something
            continue
        names = [fields[place].replace("_", " ") for place in range(4, 4 + 2 * int(fields[3], 16), 2)]
        said = re.sub(r'\s*"[^"]*"?', "", gloss).strip().strip(";").strip()
        if said:
            yield f"{', '.join(names)}: {said}"


def _speeches() -> Iterator[str]:
    for text in members("speeches", r"/data/\d.*\.json$"):
        yield from passages(json.loads(text)["text"])


SOURCES: Mapping[str, Callable[[], Iterator[str]]] = {"named-things": _named, "speeches": _speeches}


def _files(path: Path, source: str) -> list[str]:
    if not path.exists():
        raise unknown("documents", source, (*SOURCES, "a file", "a folder"))
    inside = sorted(one for one in path.rglob("*") if one.suffix in _SUFFIXES and one.is_file())
    found: list[str] = []
    for one in inside if path.is_dir() else [path]:
        try:
            found += passages(one.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise DocumentError(f"{one} can't be read as text: {error}") from None
    return found


def passages(text: str, words: int = _WORDS) -> Sequence[str]:
    """A text in pieces of whole sentences, of about so many words each."""
    if words < 1:
        raise InvalidOption(f"a passage of {words} words holds nothing; it must be 1 or more")
    found, held = list[str](), list[str]()
    for sentence in re.split(r"(?<=[.!?])\s+|\n\s*\n", text):
        held += sentence.split()
        while len(held) >= 2 * words:  # a sentence without an end
            found.append(" ".join(held[:words]))
            held = held[words:]
        if len(held) >= words:
            found.append(" ".join(held))
            held = []
    if held:
        found.append(" ".join(held))
    return found
