"""Decoding beside documents that are looked up again every few tokens; and RaLMSpec, which speculates on the lookups.

RaLMSpec ("Accelerating Retrieval-Augmented Language Model Serving with Speculation", arXiv 2401.14021): the document is
taken from a small local cache, several lookups later all of them are verified by the true store in one call, and
where the first differs everything behind it is taken back and written again with the right document. With prefetching
(each lookup brings more documents than one into the cache), a scheduler of how far to speculate, and verification
beside the writing. The output is that of looking up each time, token for token.

Ours differs in that any drafter may draft the tokens in between, so that both kinds of speculation go together, and
that what is read already is kept while the document stays the same. Its kNN-LM, a lookup for each token, is left out.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from outrider.core.cost.theory import expected_tokens
from outrider.core.decode import decode
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.rng import mix
from outrider.core.step_recorder import Record
from outrider.core.trace import Finish, Step, Trace, machine, versions
from outrider.text.model import TextModel
from outrider.text.options import Given, Options
from outrider.text.prefix_cache import PrefixCache
from outrider.text.rag.retrievers import Retriever
from outrider.text.resolve_drafter import resolve_drafter, resolve_rule

PROMPT = "Here is a note:\n{document}\n\n{question}"
_SEEN = 20  # lookups that the scheduler remembers
_LONGEST = 8  # how many lookups it speculates at most


@dataclass
class Lookups:
    """What the true store was asked for, and what came of speculation."""

    calls: int = 0
    queries: int = 0  # a call may hold several
    guesses: int = 0  # lookups that the local cache answered first
    right: int = 0
    rollbacks: int = 0
    taken_back: int = 0  # tokens


@dataclass(frozen=True)
class Answer:
    """What was written, and by which documents."""

    text: str
    tokens: list[int]
    trace: Trace  # of the tokens that stayed
    documents: list[int]  # number of each interval's
    lookups: Lookups
    finish: Finish | None


@dataclass(frozen=True)
class _Interval:
    """A few tokens written beside one document."""

    query: Any
    document: int
    start: int  # tokens before it
    steps: tuple[Step, ...]
    seconds: float

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.emitted]

    @property
    def finish(self) -> Finish | None:
        return self.steps[-1].finish


@dataclass(frozen=True, kw_only=True)
class Speculation:
    """How lookups are speculated on. `ahead`: lookups between two verifications, None: as many as measured times and
    hits say is best. `prefetch`: documents that each verified lookup brings. `overlap`: verify while writing on."""

    ahead: int | None = None
    prefetch: int = 20
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.ahead is not None and self.ahead < 1:
            raise InvalidOption(f"ahead is {self.ahead}; it must be 1 lookup or more, or None")
        if self.prefetch < 1:
            raise InvalidOption(f"prefetch is {self.prefetch}; it must be 1 document or more")


class Stride:
    """How many lookups to speculate: those with the most verified in a second, from what was measured lately.

    The paper's objective (1 - g^s) / ((1 - g) (s a + b)), with hits g, the seconds a of an interval and b of a
    verification; beside the writing a verification costs only what an interval leaves of it, and one that fails costs
    that interval too."""

    def __init__(self, overlap: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.overlap, self.clock = overlap, clock
        self._hits: deque[bool] = deque(maxlen=_SEEN)
        self._writing: deque[float] = deque(maxlen=_SEEN)
        self._verifying: deque[float] = deque(maxlen=_SEEN)

    def wrote(self, seconds: float) -> None:
        self._writing.append(seconds)

    def verified(self, right: int, of: int, seconds: float) -> None:
        """The first `right` of so many lookups were right; one that wasn't ends the series."""
        self._hits.extend([True] * right + [False] * (right < of))
        self._verifying.append(seconds)

    def best(self) -> int:
        if not self._hits or not self._writing:
            return 1
        chance = sum(self._hits) / len(self._hits)
        write = sum(self._writing) / len(self._writing)
        verify = sum(self._verifying) / len(self._verifying)

        def pace(ahead: int) -> float:
            """Verified in a second: g^0 + ... + g^(s - 1), the last of which is the true store's own."""
            whole = chance**ahead
            waiting = whole * max(verify - write, 0.0) + (1 - whole) * max(verify, write) if self.overlap else verify
            return expected_tokens(chance, ahead - 1) / (ahead * write + waiting)

        return max(range(1, _LONGEST + 1), key=pace)


class Writer:
    """A language model beside a retriever: a lookup every `stride` tokens by the last `window` tokens of question and
    answer, the best document before the question. Options are those of lm.generate."""

    def __init__(
        self,
        lm: TextModel,
        retriever: Retriever,
        *,
        stride: int = 4,
        window: int = 32,
        prompt: str = PROMPT,
        **options: Unpack[Given],
    ) -> None:
        if stride < 1 or window < 1:
            raise InvalidOption(f"stride={stride}, window={window}: each must be 1 token or more")
        if "{document}" not in prompt or "{question}" not in prompt:
            raise InvalidOption("the prompt must say where {document} and {question} go")
        given: dict[str, Any] = {"drafter": None, "max_new_tokens": 64, **options}
        self.options = Options.of(given)
        if self.options.stops:
            raise InvalidOption("stop strings are not looked for between lookups; cut the text afterwards")
        target = lm.target()
        if not isinstance(target, Decoder | TransformersTarget) or not target.rollback:
            raise Incompatible("looking up again needs a model that can drop what it has read; this one can't")
        self.lm, self.retriever, self.stride, self.window, self.prompt = lm, retriever, stride, window, prompt
        self._target = PrefixCache(target)

    def plain(self, question: str) -> Answer:
        """A lookup in the true store before every interval."""
        run = _Run(self, question)
        while run.open:
            query = run.query()
            run.take(run.write(query, run.find([query], 1)[0][0]))
        return run.answer("plain")

    def speculative(self, question: str, how: Speculation | None = None) -> Answer:
        """The same answer by RaLMSpec."""
        wanted = Speculation() if how is None else how
        run = _Run(self, question)
        with ThreadPoolExecutor(1) as pool:
            _speculate(run, wanted, pool)
        return run.answer("ralm-spec")

    def interval(self, ids: Sequence[int], limit: int, seed: int) -> Iterator[Step]:
        """A few tokens behind a prompt; what of it was read before is not read again."""
        options = self.options
        drafter, rule = resolve_drafter(self.lm, options).made, resolve_rule(options).made
        record = Record(logprobs=options.logprobs, alternatives=options.alternatives)
        sampling = options.sampling(self.lm.end)
        return decode(
            self._target, drafter, rule, [ids], sampling=sampling, max_new_tokens=limit, seed=seed, record=record
        )


@dataclass
class _Run:
    """One answer under way."""

    writer: Writer
    question: str
    intervals: list[_Interval] = field(default_factory=list)
    lookups: Lookups = field(default_factory=Lookups)

    def __post_init__(self) -> None:
        self._seed = self.writer.options.drawn_seed()
        self._asked = self.writer.lm.tokens.encode(self.question, special=False)

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.intervals for token in one.tokens]

    @property
    def open(self) -> bool:
        if not self.intervals:
            return True
        ended = self.intervals[-1].finish == "end"
        return not ended and len(self.tokens) < self.writer.options.max_new_tokens

    def query(self) -> Any:
        """What is looked up next: the last tokens so far."""
        last = [*self._asked, *self.tokens][-self.writer.window :]
        return self.writer.retriever.encode(self.writer.lm.tokens.decode(last))

    def find(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        self.lookups.calls += 1
        self.lookups.queries += len(queries)
        return self.writer.retriever.search(queries, count)

    def write(self, query: Any, document: int) -> _Interval:
        """The next interval beside a document. Its random numbers depend on how many tokens there are and on nothing
        else, so that what is written again with the right document is what would have been written at once."""
        writer, tokens = self.writer, self.tokens
        began = time.perf_counter()
        passage = writer.retriever.passages[document]
        before = writer.lm.encode(
            writer.prompt.format(document=passage, question=self.question), raw=writer.options.raw
        )
        left = min(writer.stride, writer.options.max_new_tokens - len(tokens))
        room = writer.lm.context - len(before) - len(tokens)
        if room < left:
            raise InvalidOption(f"document and question leave {room} tokens of the model's context; shorten them")
        seed = mix(mix(self._seed) + len(tokens)) >> 2
        steps = tuple(writer.interval([*before, *tokens], left, seed))
        return _Interval(query, document, len(tokens), steps, time.perf_counter() - began)

    def take(self, one: _Interval) -> None:
        self.intervals.append(one)

    def back(self, first: int) -> None:
        """The intervals from this one on are taken back."""
        self.lookups.rollbacks += 1
        self.lookups.taken_back += sum(len(one.tokens) for one in self.intervals[first:])
        del self.intervals[first:]

    def answer(self, method: str) -> Answer:
        writer = self.writer
        rule = resolve_rule(writer.options)
        steps = [
            replace(step, index=number, finish=None)
            for number, step in enumerate(step for one in self.intervals for step in one.steps)
        ]
        finish: Finish = "end" if self.intervals[-1].finish == "end" else "limit"
        steps[-1] = replace(steps[-1], finish=finish)
        facts = {"model": writer.lm.name, "dtype": writer.lm.dtype} | writer.options.facts()
        facts |= {"retriever": writer.retriever.name, "stride": writer.stride, "window": writer.window}
        trace = Trace(
            steps=tuple(steps),
            method=method,
            rule=rule.name,
            lossless=rule.made.lossless,
            seed=self._seed,
            options=facts,
            machine=machine(),
            versions=versions(),
        )
        documents = [one.document for one in self.intervals]
        text = writer.lm.tokens.decode(self.tokens)
        return Answer(text, self.tokens, trace, documents, self.lookups, finish)


def _speculate(run: _Run, how: Speculation, pool: ThreadPoolExecutor) -> None:
    """Intervals beside guessed documents, verified several at a time."""
    stride = Stride(how.overlap)
    local: dict[int, None] = {}  # documents at hand, none of them twice
    query = run.query()
    (found,) = run.find([query], how.prefetch)
    local.update(dict.fromkeys(found))
    run.take(run.write(query, found[0]))
    verified = 1  # intervals whose document is known to be right
    while run.open or verified < len(run.intervals):
        wanted = verified + (stride.best() if how.ahead is None else how.ahead)
        while run.open and len(run.intervals) < wanted:
            _guess(run, local, stride)
        guessed = run.intervals[verified:]
        began = stride.clock()
        if how.overlap:
            later: Future[list[list[int]]] = pool.submit(run.find, [one.query for one in guessed], how.prefetch)
            if run.open:
                _guess(run, local, stride)
            true = later.result()
        else:
            true = run.find([one.query for one in guessed], how.prefetch)
        seconds = stride.clock() - began
        for numbers in true:
            local.update(dict.fromkeys(numbers))
        right = next((n for n, (one, f) in enumerate(zip(guessed, true, strict=True)) if one.document != f[0]), -1)
        right = len(guessed) if right < 0 else right
        run.lookups.right += right
        stride.verified(right, len(guessed), seconds)
        verified += right
        if right < len(guessed):
            run.back(verified)
            run.take(run.write(guessed[right].query, true[right][0]))
            verified += 1


def _guess(run: _Run, local: dict[int, None], stride: Stride) -> None:
    """One more interval, beside the best document at hand."""
    query = run.query()
    numbers = sorted(local)  # of equal ones the first, as in the store
    document = numbers[int(run.writer.retriever.score(query, numbers).argmax())]
    run.lookups.guesses += 1
    one = run.write(query, document)
    stride.wrote(one.seconds)
    run.take(one)
