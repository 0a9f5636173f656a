"""Training data of text drafters: the target's own answers, and ordinary text that it only reads.

Prompts come from files, from the target itself (an instruct model given only the header of a user's turn), or are tasks
about passages of text. Answers are decoded in batches and appended to a file of JSON lines with token ids, so that
generation can be resumed.
"""

from __future__ import annotations

import gzip
import html
import json
import os
import random
import re
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path

import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption, OutriderError, unreadable
from outrider.core.protocol import Target
from outrider.core.rules.exact import Exact
from outrider.core.step_recorder import Record
from outrider.core.training.dataset import Lesson
from outrider.core.training.kept_states import KeptStates
from outrider.core.training.state_recorder import StateRecorder
from outrider.text.model import TextModel
from outrider.text.training.generation import continue_rows, draws_simply

OPENINGS = (  # beginnings of prompts that the target writes; empty: its own choice
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
_TOPICS = re.compile(r"\b(?:[A-Z][a-z]{3,}(?: [A-Z][a-z]+)*|[a-z]{7,})\b")
_BATCH_TOKENS = (24_000, 600_000)  # prompts and answers of one batch, on a CPU and elsewhere


class DataError(OutriderError):
    """A file of training data that cannot be read."""


def read(path: Path) -> list[Lesson]:
    """Read the lessons of a file written by `Writer`; incomplete lines are skipped."""
    lessons = []
    for line in _lines(path) if path.exists() else []:
        try:
            record = json.loads(line)
            lessons.append(
                Lesson(tuple(record["prompt"]), tuple(record["answer"]), record["kind"], record["temperature"])
            )
        except (ValueError, KeyError, TypeError):
            continue
    return lessons


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(unreadable(path, error)) from None


def prompts_of(path: Path) -> list[tuple[str, str]]:
    """Read the kinds and prompts of a JSON lines file with "prompt" or "turns" (the first is used), and perhaps
    "category"."""
    prompts = []
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            text = record["prompt"] if "prompt" in record else record["turns"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            raise DataError(f'{path}, line {number}: expected a JSON object with "prompt": "..."') from None
        prompts.append((str(record.get("category", "given")), str(text)))
    if not prompts:
        raise DataError(f"{path} contains no prompts; expected JSON lines with a prompt each")
    return prompts


def write_prompts(lm: TextModel, count: int, *, seed: int = 0, batch: int = 64) -> Iterator[str]:
    """Yield prompts written by the target itself, sampled as a user's turn (after Magpie, arXiv 2406.08464); random
    openings make them varied."""
    if lm.tokens.template is None:
        raise InvalidOption(f"{lm.name} is not a chat model, so it cannot write prompts; give --prompts or --data")
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
            if not ids or ids[-1] not in ends:  # unfinished: cut after the last whole sentence
                text = text[: max(text.rfind(sign) for sign in ".?!") + 1] or text
            if 12 <= len(text) <= 1200:
                yield text
        made += len(openings)


def passages(folders: Sequence[Path], *, words: tuple[int, int] = (60, 260), seed: int = 0) -> Iterator[str]:
    """Paragraphs of ordinary text, joined until they are long enough, from .txt, .rst, .html and manual pages (.gz)
    anywhere below the folders; each file is visited once, in a seeded order."""
    files = [path for folder in folders for path in sorted(folder.rglob("*")) if _readable(path)]
    rng = random.Random(seed)
    rng.shuffle(files)
    for path in files:
        goal, paragraphs_so_far = rng.randint(*words), list[str]()
        for paragraph in paragraphs(path):
            paragraphs_so_far.append(paragraph)
            if sum(len(part.split()) for part in paragraphs_so_far) >= goal:
                text = " ".join(" ".join(paragraphs_so_far).split()[: words[1]])
                yield text
                goal, paragraphs_so_far = rng.randint(*words), []


def _readable(path: Path) -> bool:
    return path.suffix in (".txt", ".rst", ".html", ".md") or (path.suffix == ".gz" and "man" in path.parts)


def paragraphs(path: Path) -> Iterator[str]:
    """Yield the paragraphs of prose in a file, without markup, code and tables."""
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
    for paragraph in re.split(r"\n\s*\n", text):
        flat = " ".join(paragraph.split())
        letters = sum(char.isalpha() or char == " " for char in flat)
        if len(flat) > 80 and letters > 0.9 * len(flat) and flat[-1] in '.!?:"”':
            yield flat


def tasks(texts: Sequence[str], foreign: Sequence[str], count: int, *, seed: int = 0) -> Iterator[tuple[str, str]]:
    """Yield (kind, prompt): tasks about passages, and sentences of another language to translate."""
    rng = random.Random(seed)
    for number in range(count):
        if foreign and number % 3 == 0:
            sentences = [
                sentence for sentence in re.split(r"(?<=[.!?]) ", rng.choice(foreign)) if 30 < len(sentence) < 280
            ]
            if sentences:
                yield "translation", f"Translate German to English: {rng.choice(sentences)}"
            continue
        text, more = rng.choice(texts), rng.choice(texts)
        kind, template = rng.choice(_TASKS)
        topics = _TOPICS.findall(text) or ["it"]
        if "{more}" in template:
            text, more = " ".join(text.split()[:130]), " ".join(more.split()[:100])
        yield kind, template.format(text=text, more=more, topic=rng.choice(topics))


def outputs(
    lm: TextModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    limit: int,
    *,
    seed: int = 0,
    model: Target | None = None,
    recorder: StateRecorder | None = None,
) -> list[list[int]]:
    """Decode prompts in one batch with the target, or with another model of its vocabulary."""
    target = model or lm.target()
    if recorder is None and type(target) is Decoder and target.device.type != "cpu" and draws_simply(sampling):
        return continue_rows(target, prompts, sampling, limit, seed=seed)
    answers: list[list[int]] = [[] for _ in prompts]
    record = Record(nodes=False)
    for step in decode(
        target, recorder, Exact(), prompts, sampling=sampling, max_new_tokens=limit, seed=seed, record=record
    ):
        answers[step.row] += step.emitted
    return answers


class Writer:
    """Answers prompts and appends the answers to a file, skipping prompts that the file already contains. The states at
    the taps `needs` of what a CPU reads are kept, if there is a place for them."""

    def __init__(
        self,
        lm: TextModel,
        path: Path,
        *,
        limit: int = 128,
        rows: int = 64,
        seed: int = 0,
        states: KeptStates | None = None,
        needs: frozenset[str] = frozenset(),
    ) -> None:
        if limit < 1 or rows < 1:
            raise InvalidOption(f"limit={limit}, rows={rows}: each must be 1 or more")
        self.states, self.needs = states if lm.device == "cpu" else None, needs
        self.lm, self.path, self.limit, self.rows, self.seed = lm, path, limit, rows, seed
        path.parent.mkdir(parents=True, exist_ok=True)
        self.known = {one.prompt for one in read(path)}

    def answer(
        self, prompts: Sequence[tuple[str, str]], temperature: float = 0.0, until: float | None = None
    ) -> Iterator[Lesson]:
        """Answer (kind, prompt) pairs in batches of similar length; start none after `until` (of time.monotonic)."""
        rows = []
        for kind, text in prompts:
            ids = tuple(self.lm.encode(text))
            if ids not in self.known and len(ids) + self.limit <= self.lm.context:
                self.known.add(ids)
                rows.append((ids, kind))
        rows.sort(key=lambda row: len(row[0]))
        tokens = _BATCH_TOKENS[self.lm.device != "cpu"]
        while rows and (until is None or time.monotonic() < until):
            size = max(min(self.rows, tokens // (len(rows[-1][0]) + self.limit)), 1)
            batch, rows = rows[-size:], rows[:-size]
            yield from self._batch(batch, temperature)

    def _batch(self, rows: Sequence[tuple[tuple[int, ...], str]], temperature: float) -> Iterator[Lesson]:
        self.seed += 1
        sampling = Sampling(temperature=temperature, end=self.lm.end)
        ids = [prompt for prompt, _ in rows]
        with self.path.open("a", encoding="utf-8") as file:
            if _cut(self.path):
                file.write("\n")  # a process that was killed left part of a line, which is passed over
            recorder = None if self.states is None else StateRecorder(self.needs)
            answers = outputs(self.lm, ids, sampling, self.limit, seed=self.seed, recorder=recorder)
            for row, ((prompt, kind), answer) in enumerate(zip(rows, answers, strict=True)):
                if self.states is not None and recorder is not None:
                    whole = [*prompt, *answer]
                    self.states.add(whole, self.needs, recorder.states(row, len(whole)))
                record = {"prompt": prompt, "answer": answer, "kind": kind, "temperature": temperature}
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
                yield Lesson(prompt, tuple(answer), kind, temperature)


def _cut(path: Path) -> bool:
    """Whether a file ends within a line."""
    with path.open("rb") as file:
        return bool(file.seek(0, os.SEEK_END)) and file.seek(-1, os.SEEK_END) >= 0 and file.read(1) != b"\n"


def ordinary(lm: TextModel, texts: Sequence[str], length: int) -> Iterator[Lesson]:
    """Yield lessons of ordinary text; every token after the first counts."""
    pending: list[int] = []
    for text in texts:
        pending += lm.tokens.encode(text + "\n\n", special=False)
        while len(pending) >= length:
            yield Lesson(tuple(pending[:1]), tuple(pending[1:length]), "text")
            pending = pending[length:]


def commonest(lessons: Sequence[Lesson], size: int, kept: int, always: torch.Tensor | None = None) -> torch.Tensor:
    """Return the sorted ids of a reduced vocabulary: those of `always`, then the most frequent in answers and, with
    less weight, in prompts and text. Unseen tokens are ranked by id, because tokenizers number tokens by frequency."""
    counts = torch.zeros(size, dtype=torch.double)
    for weight, parts in (
        (1.0, [lesson.answer for lesson in lessons if lesson.kind != "text"]),
        (0.3, [lesson.answer for lesson in lessons if lesson.kind == "text"]),
        (0.2, [lesson.prompt for lesson in lessons]),
    ):
        ids = torch.tensor(list(chain.from_iterable(parts)), dtype=torch.long)
        counts += weight * torch.bincount(ids, minlength=size)
    counts += 0.2 * counts.sum() * torch.softmax(-torch.log(torch.arange(size) + 2000.0), 0)
    if always is not None:
        counts[always] += counts.sum()
    return counts.argsort(descending=True, stable=True)[:kept].sort().values
