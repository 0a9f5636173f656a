"""What text drafters learn from: the target's own answers, and ordinary text that it only reads.

Prompts come from files, from the target (an instruct model that is given nothing but the header of a user's turn
writes one), or are tasks about passages of ordinary text. Answers are decoded in batches by our own loop. All is kept
as JSON lines of token ids, added to as it comes, so that what was broken off goes on. States are never stored.
"""

from __future__ import annotations

import gzip
import html
import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.protocol import Target
from outrider.core.rules.exact import Exact
from outrider.core.step_recorder import Record
from outrider.core.training.dataset import Lesson
from outrider.text.model import TextModel

OPENINGS = (  # how prompts that the target writes may begin; an empty one is its own choice
    *[""] * 8,
    *("What is ", "Who ", "When did ", "Where ", "How many ", "Why ", "How does ", "What are the "),
    *("Write a ", "Write an email ", "Imagine you are ", "Explain ", "Compare ", "Give me ", "Describe ", "Suggest "),
    *("Can you ", "Create a Python function ", "Write a program ", "Summarize the following", "Rewrite ", "Extract "),
    *("If ", "Solve ", "A train ", "Pretend ", "Provide ", "Design ", "Tell me ", "In the ", "My ", "Which "),
)
_TASKS = (
    ("summary", "Summarize: {text}"),
    ("summary", "Summarize the following text in a few sentences.\n\n{text}"),
    ("reading", "{text}\nWhat is this text about?"),
    ("reading", "{text}\n{more}\nWhat does the text say about {topic}?"),
    ("reading", "{text}\n{more}\nWho or what is {topic}?"),
    ("rewriting", "Rewrite this more simply:\n\n{text}"),
    ("extraction", "List the main points of this text.\n\n{text}"),
)
_PLACES = re.compile(r"\b(?:[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*|[a-z]{7,})\b")
_BATCH_TOKENS = 24_000  # prompt and answer of all rows that are decoded together


class DataError(OutriderError):
    """A file of training data that can't be read."""


def read(path: Path) -> list[Lesson]:
    """The lessons of a file that `Writer` wrote; a last line that was cut off is left out."""
    found = []
    for line in _lines(path):
        try:
            one = json.loads(line)
            found.append(Lesson(tuple(one["prompt"]), tuple(one["answer"]), one["kind"], one["temperature"]))
        except (ValueError, KeyError, TypeError):
            continue
    return found


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} can't be read: {error}") from None


def prompts_of(path: Path) -> list[str]:
    """The prompts of a file of JSON lines with "prompt" (or "turns", of which the first is taken)."""
    found = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            one = json.loads(line)
            text = one["prompt"] if "prompt" in one else one["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise DataError(f'{path}, line {number}: expected a JSON object with "prompt": "..."') from None
        found.append(str(text))
    if not found:
        raise DataError(f"{path} holds no prompts; it should have JSON lines with a prompt each")
    return found


def write_prompts(lm: TextModel, count: int, *, seed: int = 0, batch: int = 64) -> Iterator[str]:
    """Prompts by the target itself: what it takes to be a user's turn, drawn at its own temperature (Magpie, arXiv
    2406.08464, in miniature; the openings keep it from writing the same few)."""
    if lm.tokens.template is None:
        raise InvalidOption(f"{lm.name} is no chat model, so it writes no prompts; give some (--prompts), or answers")
    marker = "\x00"
    before, _, after = lm.tokens.render([{"role": "user", "content": marker}]).partition(marker)
    closing = after.strip().split("\n")[0] or None
    ends = set(lm.end) | ({one} if closing and (one := lm.tokens.id(closing)) is not None else set())
    draw, made = random.Random(seed), 0
    while made < count:
        openings = sorted((draw.choice(OPENINGS) for _ in range(min(batch, count - made))), key=len)
        prompts = [lm.tokens.encode(before + one.rstrip(), special=False) for one in openings]
        sampling = Sampling(temperature=0.9, top_p=0.95, end=tuple(ends))
        for opening, ids in zip(openings, outputs(lm, prompts, sampling, 96, seed=draw.getrandbits(31)), strict=True):
            text = (opening.rstrip() + lm.tokens.decode(ids)).strip()
            if not ids or ids[-1] not in ends:  # unfinished: up to its last whole sentence
                text = text[: max(text.rfind(sign) for sign in ".?!") + 1] or text
            if 12 <= len(text) <= 1200:
                yield text
        made += len(openings)


def passages(folders: Sequence[Path], *, words: tuple[int, int] = (60, 260), seed: int = 0) -> Iterator[str]:
    """Paragraphs of ordinary text, joined until they are long enough, from .txt, .rst, .html and manual pages (.gz)
    anywhere below the folders; each file is visited once, in a seeded order."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if _readable(path)]
    draw = random.Random(seed)
    draw.shuffle(files)
    for path in files:
        wanted, held = draw.randint(*words), list[str]()
        for paragraph in paragraphs(path):
            held.append(paragraph)
            if sum(len(one.split()) for one in held) >= wanted:
                text = " ".join(" ".join(held).split()[: words[1]])
                yield text
                wanted, held = draw.randint(*words), []


def _readable(path: Path) -> bool:
    return path.suffix in (".txt", ".rst", ".html", ".md") or (path.suffix == ".gz" and "man" in path.parts)


def paragraphs(path: Path) -> Iterator[str]:
    """Prose alone: no markup, no code, no tables."""
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        text = raw.decode("utf-8")
    except (OSError, UnicodeDecodeError, EOFError):
        return
    if path.suffix == ".html":
        text = re.sub(r"(?s)<(script|style|pre|head|nav).*?</\1>", " ", text)
        text = re.sub(r"(?i)</?(p|div|h\d|li|td|dd|dt|section)\b[^>]*>", "\n\n", text)
        text = html.unescape(re.sub(r"<[^>]+>", "", text))
    elif path.suffix == ".gz":
        text = re.sub(r"(?m)^\.(PP|P|TP|SH|SS|IP|LP|br|RE|RS).*$", "\n", text)
        text = re.sub(r'(?m)^\.(B|I|BR|IR|RB|RI|BI|IB) "?(.*?)"?$', r"\2", text)
        text = re.sub(r"(?m)^[.'].*$", "", text)
        text = re.sub(r"\\f\(?..?\[?|\\\(..|\\[&|,/^%:c]|\\\[[^]]*\]", "", text).replace("\\-", "-").replace("\\", "")
    for one in re.split(r"\n\s*\n", text):
        flat = " ".join(one.split())
        letters = sum(char.isalpha() or char == " " for char in flat)
        if len(flat) > 80 and letters > 0.9 * len(flat) and flat[-1] in '.!?:"”':
            yield flat


def tasks(texts: Sequence[str], foreign: Sequence[str], count: int, *, seed: int = 0) -> Iterator[tuple[str, str]]:
    """(kind, prompt): something to do with passages, and sentences of another language to translate."""
    draw = random.Random(seed)
    for number in range(count):
        if foreign and number % 3 == 0:
            sentences = [one for one in re.split(r"(?<=[.!?]) ", draw.choice(foreign)) if 30 < len(one) < 280]
            if sentences:
                yield "translation", f"Translate German to English: {draw.choice(sentences)}"
            continue
        text, more = draw.choice(texts), draw.choice(texts)
        kind, form = draw.choice(_TASKS)
        topics = _PLACES.findall(text) or ["it"]
        if "{more}" in form:
            text, more = " ".join(text.split()[:130]), " ".join(more.split()[:100])
        yield kind, form.format(text=text, more=more, topic=draw.choice(topics))


def outputs(
    lm: TextModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limit: int,
    *,
    seed: int = 0,
    model: Target | None = None,
) -> list[list[int]]:
    """What the target, or another model of its vocabulary, makes of prompts, decoded side by side."""
    found: list[list[int]] = [[] for _ in prompts]
    record = Record(nodes=False)
    for step in decode(
        model or lm.target(), None, Exact(), prompts, sampling=sampling, max_new_tokens=limit, seed=seed, record=record
    ):
        found[step.row] += step.emitted
    return found


class Writer:
    """Answers prompts and adds them to a file; goes on behind what the file holds already."""

    def __init__(self, lm: TextModel, path: Path, *, limit: int = 128, rows: int = 64, seed: int = 0) -> None:
        if limit < 1 or rows < 1:
            raise InvalidOption(f"limit={limit}, rows={rows}: each must be 1 or more")
        self.lm, self.path, self.limit, self.rows, self.seed = lm, path, limit, rows, seed
        path.parent.mkdir(parents=True, exist_ok=True)
        self.known = {one.prompt for one in read(path)}

    def answer(
        self, prompts: Sequence[tuple[str, str]], temperature: float = 0.0, until: float | None = None
    ) -> Iterator[Lesson]:
        """Answers (kind, prompt), those of about the same length together, which wastes the least; begins no batch
        once `until` (of time.monotonic) has passed."""
        rows = []
        for kind, text in prompts:
            ids = tuple(self.lm.encode(text))
            if ids not in self.known and len(ids) + self.limit <= self.lm.context:
                self.known.add(ids)
                rows.append((ids, kind))
        rows.sort(key=lambda row: len(row[0]))
        while rows and (until is None or time.monotonic() < until):
            size = max(min(self.rows, _BATCH_TOKENS // (len(rows[-1][0]) + self.limit)), 1)
            together, rows = rows[-size:], rows[:-size]
            yield from self._batch(together, temperature)

    def _batch(self, rows: Sequence[tuple[tuple[int, ...], str]], temperature: float) -> Iterator[Lesson]:
        self.seed += 1
        sampling = Sampling(temperature=temperature, end=self.lm.end)
        ids = [prompt for prompt, _ in rows]
        with self.path.open("a", encoding="utf-8") as file:
            answers = outputs(self.lm, ids, sampling, self.limit, seed=self.seed)
            for (prompt, kind), answer in zip(rows, answers, strict=True):
                one = {"prompt": prompt, "answer": answer, "kind": kind, "temperature": temperature}
                file.write(json.dumps(one, separators=(",", ":")) + "\n")
                yield Lesson(prompt, tuple(answer), kind, temperature)


def ordinary(lm: TextModel, texts: Sequence[str], length: int) -> Iterator[Lesson]:
    """Text that the target reads and doesn't write: every token of it counts, behind the first."""
    held: list[int] = []
    for text in texts:
        held += lm.tokens.encode(text + "\n\n", special=False)
        while len(held) >= length:
            yield Lesson(tuple(held[:1]), tuple(held[1:length]), "text")
            held = held[length:]


def commonest(lessons: Sequence[Lesson], size: int, kept: int, always: torch.Tensor | None = None) -> torch.Tensor:
    """The ids that a reduced vocabulary keeps, sorted: those of `always`, then the most frequent ones of answers and,
    counting less, of prompts and text; what was never seen goes by its id, as tokenizers number what they learn by its
    frequency."""
    counts = torch.zeros(size, dtype=torch.double)
    for one in lessons:
        weight = 0.3 if one.kind == "text" else 1.0
        counts += weight * torch.bincount(torch.tensor(one.answer), minlength=size)
        counts += 0.2 * torch.bincount(torch.tensor(one.prompt), minlength=size)
    counts += 0.2 * counts.sum() * torch.softmax(-torch.log(torch.arange(size) + 2000.0), 0)
    if always is not None:
        counts[always] += counts.sum()
    return counts.argsort(descending=True, stable=True)[:kept].sort().values
