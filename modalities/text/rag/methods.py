"""The methods that answer questions from documents, by name, and a benchmark of them on the same questions.

Two methods retrieve again every few tokens: `iterative` and `ralm-spec`, whose outputs must be identical. Two retrieve
once: `rag` and `speculative-rag`, which are compared by correct answers. Independent of files and plots.
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
from outrider.core.methods.lookup import PROMPT_LOOKUP
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
            summary="retrieves again every few tokens; the baseline of ralm-spec",
            paper="arXiv 2302.00083",
            topology=(),
            modalities=("text",),
            lossless=True,
        ),
        Method(
            name="ralm-spec",
            make=Speculation,
            systems=("RaLMSpec",),
            summary="retrieves from a local cache; the store verifies several lookups at a time, with rollback",
            paper="arXiv 2401.14021",
            topology=(),
            modalities=("text",),
            lossless=True,
        ),
        Method(
            name="rag",
            make=specrag.plain,
            systems=(),
            summary="one lookup, all documents in one prompt; the baseline of speculative-rag",
            paper="arXiv 2005.11401",
            topology=(),
            modalities=("text",),
            lossless=True,
        ),
        Method(
            name="speculative-rag",
            make=specrag.speculative,
            systems=("Speculative RAG",),
            summary="a small model drafts answers from different documents, and the large model selects the best",
            paper="arXiv 2407.08223",
            topology=(),
            modalities=("text",),
            lossless=False,
        ),
    )
}
_BASELINE = {"ralm-spec": "iterative", "speculative-rag": "rag"}


@dataclass(frozen=True)
class MeasuredAnswer:
    """One answer and its cost."""

    text: str
    tokens: tuple[int, ...]
    seconds: float
    steps: tuple[Step, ...]
    documents: tuple[int, ...]
    lookups: Lookups
    read: int = 0  # tokens that the large model read (methods with one lookup)
    wrote: int = 0  # tokens that it wrote


@dataclass(frozen=True, kw_only=True)
class AnswerMethod:
    """A method with its options; `name` is that of its row in the report."""

    method: str
    speculation: Speculation | None = None
    drafter: str | None = None  # for the tokens between lookups
    options: Mapping[str, Any] = field(default_factory=dict)  # of the methods with one lookup

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise unknown("method", self.method, METHODS)

    @property
    def name(self) -> str:
        parts = [self.method]
        if self.speculation is not None:
            parts.append("scheduled" if self.speculation.ahead is None else f"{self.speculation.ahead} ahead")
            parts += ["overlapped"] * self.speculation.overlap
        return ", ".join([*parts, *([self.drafter] if self.drafter else [])])


ANSWER_METHODS = (
    AnswerMethod(method="iterative"),
    AnswerMethod(method="ralm-spec", speculation=Speculation(ahead=3)),
    AnswerMethod(method="ralm-spec", speculation=Speculation()),
    AnswerMethod(method="ralm-spec", speculation=Speculation(ahead=3, overlap=True)),
    AnswerMethod(method="ralm-spec", speculation=Speculation(ahead=3), drafter=PROMPT_LOOKUP.name),
    AnswerMethod(method="rag"),
    AnswerMethod(method="speculative-rag"),
)


class Answerer:
    """Answers questions with a language model and a retriever; `small` drafts for Speculative RAG."""

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

    def answer(self, method: AnswerMethod, question: str) -> MeasuredAnswer:
        if method.method in ("iterative", "ralm-spec"):
            return self._iterative(method, question)
        options = {"max_new_tokens": self.max_new_tokens, **method.options}
        if method.method == "rag":
            reply = specrag.plain(self.lm, self.retriever, question, **options)
        else:
            self._embed = self._embed or Embedder()
            options = {"seed": self.seed, **options}
            reply = specrag.speculative(self.lm, self.small, self.retriever, self._embed, question, **options)
        seconds = sum(reply.seconds.values())
        lookups = Lookups(calls=1, queries=1)
        documents = tuple(reply.documents)
        return MeasuredAnswer(
            reply.text, tuple(reply.tokens), seconds, reply.steps, documents, lookups, reply.read, reply.wrote
        )

    def _iterative(self, method: AnswerMethod, question: str) -> MeasuredAnswer:
        if method.drafter not in self._writers:
            self._writers[method.drafter] = Writer(
                self.lm,
                self.retriever,
                stride=self.stride,
                window=self.window,
                drafter=method.drafter,
                max_new_tokens=self.max_new_tokens,
                seed=self.seed,
            )
        writer, results = self._writers[method.drafter], list[ralm.Answer]()

        def run() -> tuple[list[int], tuple[Step, ...]]:
            speculates = method.method == "ralm-spec"
            results.append(writer.speculative(question, method.speculation) if speculates else writer.plain(question))
            return results[0].tokens, results[0].trace.steps

        tokens, seconds, steps, _ = timed(run)
        return MeasuredAnswer(results[0].text, tokens, seconds, steps, tuple(results[0].documents), results[0].lookups)


@dataclass
class RagBench:
    """Measures every method on every question with one retriever, in turns; `rows` reports what is done so far."""

    answerer: Answerer
    questions: Sequence[Question]
    methods: Sequence[AnswerMethod] = ANSWER_METHODS
    answers: dict[str, list[MeasuredAnswer]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.questions or not self.methods:
            raise InvalidOption("there is nothing to measure; give at least one question and one method")
        self.answers = {method.name: [] for method in self.methods}

    def run(self) -> Iterator[str]:
        """Answer all questions; yield the name of each method after it has answered one."""
        for number, question in enumerate(self.questions):
            start = number % len(self.methods)
            for method in [*self.methods[start:], *self.methods[:start]]:
                self.answers[method.name].append(self.answerer.answer(method, question.text))
                yield method.name

    def rows(self) -> list[dict[str, Any]]:
        count = min(map(len, self.answers.values()))
        return [self._row(method, count) for method in self.methods] if count else []

    def _row(self, method: AnswerMethod, count: int) -> dict[str, Any]:
        answers, questions = self.answers[method.name][:count], self.questions[:count]
        total = Lookups()
        for answer in answers:
            for name, value in asdict(answer.lookups).items():
                setattr(total, name, getattr(total, name) + value)
        steps = [step for answer in answers for step in answer.steps]
        row: dict[str, Any] = {
            "name": method.name,
            "method": method.method,
            "retriever": self.answerer.retriever.name,
        }
        row |= {"questions": count, "lossless": METHODS[method.method].lossless}
        row |= {"correct": sum(one.answered_by(answer.text) for one, answer in zip(questions, answers, strict=True))}
        row |= {"tokens": sum(len(answer.tokens) for answer in answers), "lookups": asdict(total)}
        row |= {"tokens_per_pass": Summary.of(steps).tokens_per_pass if steps else None}
        row |= {"read": mean(answer.read for answer in answers), "wrote": mean(answer.wrote for answer in answers)}
        row |= {"seconds": median(answer.seconds for answer in answers), "identical": None, "speedup": None}
        if baseline := self.answers.get(_BASELINE.get(method.method, ""), [])[:count]:
            pairs = list(zip(baseline, answers, strict=True))
            row["speedup"] = median(base.seconds / max(answer.seconds, 1e-9) for base, answer in pairs)
            if row["lossless"]:
                row["identical"] = sum(
                    base.tokens == answer.tokens and base.documents == answer.documents for base, answer in pairs
                )
        return row


def report(measured: Sequence[RagBench], about: Mapping[str, Any]) -> dict[str, Any]:
    """Return all measurements as JSON data."""
    answerer = measured[0].answerer
    facts: dict[str, Any] = {
        "model": answerer.lm.name,
        "dtype": answerer.lm.dtype,
        "small": f"{answerer.small.name}:{answerer.small.dtype}",
    }
    facts |= {
        "max_new_tokens": answerer.max_new_tokens,
        "stride": answerer.stride,
        "window": answerer.window,
        "seed": answerer.seed,
    }
    rows = [row for bench in measured for row in bench.rows()]
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {**facts, **about},
        "rows": rows,
    }
