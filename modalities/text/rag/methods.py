"""Ways of answering a question from documents, by name; and all of them measured on the same questions.

Rows of one retriever stand together: looking up again every few tokens, by the store each time and by RaLMSpec, whose
output must be the same; and one lookup, by plain RAG and by Speculative RAG, whose answers are compared by what they
say. Knows no files and draws nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import mean, median
from typing import Any

from outrider.core.bench.runner import SCHEMA
from outrider.core.bench.timing import timed
from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import Method
from outrider.core.trace import Step, Summary, machine, versions
from outrider.text.model import TextModel
from outrider.text.rag import ralm, specrag
from outrider.text.rag.documents import Question
from outrider.text.rag.ralm import Lookups, Speculation, Writer
from outrider.text.rag.retrievers import Dense, Embedder, Retriever

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method(
            name="iterative",
            make=Writer,
            systems=(),
            summary="a document looked up again every few tokens: what ralm-spec is compared with",
            paper="arXiv 2302.00083",
            topology=(),
            modalities=("text",),
            lossless=True,
        ),
        Method(
            name="ralm-spec",
            make=Speculation,
            systems=("RaLMSpec",),
            summary="the same from a local cache, lookups verified by the store several at a time, else taken back",
            paper="arXiv 2401.14021",
            topology=(),
            modalities=("text",),
            lossless=True,
        ),
        Method(
            name="rag",
            make=specrag.plain,
            systems=(),
            summary="one lookup, all documents in one prompt: what speculative-rag is compared with",
            paper="arXiv 2005.11401",
            topology=(),
            modalities=("text",),
            lossless=True,
        ),
        Method(
            name="speculative-rag",
            make=specrag.speculative,
            systems=("Speculative RAG",),
            summary="a small model drafts answers by different documents, the large one says which is best",
            paper="arXiv 2407.08223",
            topology=(),
            modalities=("text",),
            lossless=False,
        ),
    )
}
_BESIDE = {"ralm-spec": "iterative", "speculative-rag": "rag"}  # whose answers each is compared with


@dataclass(frozen=True)
class Said:
    """One answer, and what it took."""

    text: str
    tokens: tuple[int, ...]
    seconds: float
    steps: tuple[Step, ...]
    documents: tuple[int, ...]
    lookups: Lookups
    read: int = 0  # tokens the large model read, where it is one lookup
    wrote: int = 0


@dataclass(frozen=True, kw_only=True)
class AnswerMethod:
    """A method with its options, under the name that its row has."""

    method: str
    how: Speculation | None = None
    drafter: str | None = None  # of tokens
    options: Mapping[str, Any] = field(default_factory=dict)  # of one lookup

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)

    @property
    def name(self) -> str:
        parts = [self.method]
        if self.how is not None:
            parts.append("scheduled" if self.how.ahead is None else f"{self.how.ahead} ahead")
            parts += ["overlapped"] * self.how.overlap
        return ", ".join([*parts, *([self.drafter] if self.drafter else [])])


WAYS = (
    AnswerMethod(method="iterative"),
    AnswerMethod(method="ralm-spec", how=Speculation(ahead=3)),
    AnswerMethod(method="ralm-spec", how=Speculation()),
    AnswerMethod(method="ralm-spec", how=Speculation(ahead=3, overlap=True)),
    AnswerMethod(method="ralm-spec", how=Speculation(ahead=3), drafter="prompt-lookup"),
    AnswerMethod(method="rag"),
    AnswerMethod(method="speculative-rag"),
)


class Answerer:
    """A language model and a retriever, ready to answer in any way. `small` drafts for Speculative RAG."""

    def __init__(
        self,
        lm: TextModel,
        retriever: Retriever,
        *,
        small: TextModel | None = None,
        max_new_tokens: int = 48,
        stride: int = 4,
        window: int = 32,
        seed: int = 0,
    ) -> None:
        self.lm, self.retriever, self.small = lm, retriever, lm if small is None else small
        self.max_new_tokens, self.stride, self.window, self.seed = max_new_tokens, stride, window, seed
        self._writers: dict[str | None, Writer] = {}
        self._embed = retriever.embed if isinstance(retriever, Dense) else None

    def answer(self, way: AnswerMethod, question: str) -> Said:
        if way.method in ("iterative", "ralm-spec"):
            return self._again(way, question)
        given = {"max_new_tokens": self.max_new_tokens, **way.options}
        if way.method == "rag":
            reply = specrag.plain(self.lm, self.retriever, question, **given)
        else:
            self._embed = self._embed or Embedder()
            given = {"seed": self.seed, **given}
            reply = specrag.speculative(self.lm, self.small, self.retriever, self._embed, question, **given)
        seconds = sum(reply.seconds.values())
        looked = Lookups(calls=1, queries=1)
        documents = tuple(reply.documents)
        return Said(reply.text, tuple(reply.tokens), seconds, reply.steps, documents, looked, reply.read, reply.wrote)

    def _again(self, way: AnswerMethod, question: str) -> Said:
        if way.drafter not in self._writers:
            self._writers[way.drafter] = Writer(
                self.lm,
                self.retriever,
                stride=self.stride,
                window=self.window,
                drafter=way.drafter,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
            )
        writer, found = self._writers[way.drafter], list[ralm.Answer]()

        def run() -> tuple[list[int], tuple[Step, ...]]:
            speculates = way.method == "ralm-spec"
            found.append(writer.speculative(question, way.how) if speculates else writer.plain(question))
            return found[0].tokens, found[0].trace.steps

        tokens, seconds, steps, _ = timed(run)
        return Said(found[0].text, tokens, seconds, steps, tuple(found[0].documents), found[0].lookups)


@dataclass
class Measured:
    """Every way on every question of one retriever, in turns; what is done so far can be read at any time."""

    answerer: Answerer
    questions: Sequence[Question]
    ways: Sequence[AnswerMethod] = WAYS
    said: dict[str, list[Said]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.questions or not self.ways:
            raise InvalidOption("there is nothing to measure: give questions and methods")
        self.said = {way.name: [] for way in self.ways}

    def go(self) -> Iterator[str]:
        """Answers all; yields the name of each way that had its turn."""
        for number, question in enumerate(self.questions):
            start = number % len(self.ways)
            for way in [*self.ways[start:], *self.ways[:start]]:
                self.said[way.name].append(self.answerer.answer(way, question.text))
                yield way.name

    def rows(self) -> list[dict[str, Any]]:
        done = min(map(len, self.said.values()))
        return [self._row(way, done) for way in self.ways] if done else []

    def _row(self, way: AnswerMethod, done: int) -> dict[str, Any]:
        said, asked = self.said[way.name][:done], self.questions[:done]
        total = Lookups()
        for one in said:
            for name, value in asdict(one.lookups).items():
                setattr(total, name, getattr(total, name) + value)
        steps = [step for one in said for step in one.steps]
        found: dict[str, Any] = {"name": way.name, "method": way.method, "retriever": self.answerer.retriever.name}
        found |= {"questions": done, "lossless": METHODS[way.method].lossless}
        found |= {"correct": sum(one.answered_by(it.text) for one, it in zip(asked, said, strict=True))}
        found |= {"tokens": sum(len(one.tokens) for one in said), "lookups": asdict(total)}
        found |= {"tokens_per_pass": Summary.of(steps).tokens_per_pass if steps else None}
        found |= {"read": mean(one.read for one in said), "wrote": mean(one.wrote for one in said)}
        found |= {"seconds": median(one.seconds for one in said), "identical": None, "speedup": None}
        if base := self.said.get(_BESIDE.get(way.method, ""), [])[:done]:
            pairs = list(zip(base, said, strict=True))
            found["speedup"] = median(one.seconds / max(it.seconds, 1e-9) for one, it in pairs)
            if found["lossless"]:
                alike = (one.tokens == it.tokens and one.documents == it.documents for one, it in pairs)
                found["identical"] = sum(alike)
        return found


def report(measured: Sequence[Measured], about: Mapping[str, Any]) -> dict[str, Any]:
    """All that was measured, as the JSON that is written."""
    one = measured[0].answerer
    facts: dict[str, Any] = {
        "model": one.lm.name,
        "dtype": one.lm.dtype,
        "small": f"{one.small.name}:{one.small.dtype}",
    }
    facts |= {"max_new_tokens": one.max_new_tokens, "stride": one.stride, "window": one.window, "seed": one.seed}
    rows = [row for one in measured for row in one.rows()]
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {**facts, **about},
        "rows": rows,
    }
