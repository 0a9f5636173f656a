"""Generation with a document that is retrieved again every few tokens; speculative lookups (RaLMSpec).

RaLMSpec ("Accelerating Retrieval-Augmented Language Model Serving with Speculation", arXiv 2401.14021) takes documents
from a small local cache. The true store then verifies several lookups in one call; from the first difference on, the
text is discarded and generated again with the correct document. Each call prefetches documents into the cache, a
scheduler sets the number of lookups to speculate, and verification can overlap generation. The output is exactly that
of querying the store every time. Ours also drafts tokens between lookups with any drafter, and keeps the KV cache while
the document stays the same. The paper's kNN-LM, with a lookup for each token, is left out.
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
from outrider.core.trace import Finish, FinishReason, Step, Trace, finish_reason, machine, versions
from outrider.text.model import TextModel
from outrider.text.options import Given, Options
from outrider.text.prefix_cache import PrefixCache
from outrider.text.rag.retrievers import Retriever
from outrider.text.resolve_drafter import resolve_drafter, resolve_rule

PROMPT = "Here is a note:\n{document}\n\n{question}"
_HISTORY = 20  # measurements that the scheduler averages over
_MAX_AHEAD = 8  # most lookups to speculate between verifications


@dataclass
class Lookups:
    """Counts of calls to the true store and of speculative lookups."""

    calls: int = 0
    queries: int = 0  # a call can contain several
    guesses: int = 0  # lookups answered by the local cache
    right: int = 0  # guesses confirmed by the store
    rollbacks: int = 0
    taken_back: int = 0  # tokens discarded in rollbacks


@dataclass(frozen=True)
class Answer:
    """The generated text and the documents it used."""

    text: str
    tokens: list[int]
    trace: Trace  # of the committed tokens
    documents: list[int]  # index of each interval's document
    lookups: Lookups
    finish_reason: FinishReason | None


@dataclass(frozen=True)
class _Interval:
    """The tokens generated with one document."""

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
    """Options of speculative lookups. `ahead`: lookups between two verifications (None: chosen from measured times and
    hit rates). `prefetch`: documents fetched per verified lookup. `overlap`: verify while generating."""

    ahead: int | None = None
    prefetch: int = 20
    overlap: bool = False

    def __post_init__(self) -> None:
        if self.ahead is not None and self.ahead < 1:
            raise InvalidOption(f"ahead is {self.ahead}; it must be 1 lookup or more, or None")
        if self.prefetch < 1:
            raise InvalidOption(f"prefetch is {self.prefetch}; it must be 1 document or more")


class Stride:
    """Scheduler: the number of lookups to speculate that maximises verified lookups per second.

    Maximises the paper's objective (1 - g^s) / ((1 - g) (s a + b)), with hit rate g, a seconds per interval and b per
    verification. With overlap, a verification costs only the time by which it exceeds an interval, and a failed one
    also costs that interval."""

    def __init__(self, overlap: bool = False, clock: Callable[[], float] = time.perf_counter) -> None:
        self.overlap, self.clock = overlap, clock
        self._hits: deque[bool] = deque(maxlen=_HISTORY)
        self._writing: deque[float] = deque(maxlen=_HISTORY)
        self._verifying: deque[float] = deque(maxlen=_HISTORY)

    def wrote(self, seconds: float) -> None:
        self._writing.append(seconds)

    def verified(self, right: int, of: int, seconds: float) -> None:
        """Record a verification in which the first `right` of `of` lookups were correct."""
        self._hits.extend([True] * right + [False] * (right < of))
        self._verifying.append(seconds)

    def best(self) -> int:
        if not self._hits or not self._writing:
            return 1
        hit_rate = sum(self._hits) / len(self._hits)
        write = sum(self._writing) / len(self._writing)
        verify = sum(self._verifying) / len(self._verifying)

        def rate(ahead: int) -> float:
            """Verified lookups per second: g^0 + ... + g^(s - 1); the last is the store's own."""
            all_right = hit_rate**ahead
            waiting = (
                all_right * max(verify - write, 0.0) + (1 - all_right) * max(verify, write) if self.overlap else verify
            )
            return expected_tokens(hit_rate, ahead - 1) / (ahead * write + waiting)

        return max(range(1, _MAX_AHEAD + 1), key=rate)


class Writer:
    """Generates with a retriever: every `stride` tokens it looks up the last `window` tokens of question and answer and
    puts the best document before the question. Options are those of lm.generate."""

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
            raise InvalidOption("the prompt template must contain {document} and {question}")
        given: dict[str, Any] = {"drafter": None, "max_new_tokens": 64, **options}
        self.options = Options.of(given)
        if self.options.stops:
            raise InvalidOption("stop strings are not supported with repeated lookups; cut the text afterwards")
        if self.options.format is not None:
            raise InvalidOption("an output format is not supported with repeated lookups; leave it out")
        target = lm.target()
        if not isinstance(target, Decoder | TransformersTarget) or not target.rollback:
            raise Incompatible("repeated lookups need a model whose KV cache can be rolled back; this one's cannot")
        self.lm, self.retriever, self.stride, self.window, self.prompt = lm, retriever, stride, window, prompt
        self._target = PrefixCache(target)

    def plain(self, question: str) -> Answer:
        """Generate with a lookup in the true store before every interval."""
        run = _Run(self, question)
        while run.open:
            query = run.query()
            run.append(run.write(query, run.find([query], 1)[0][0]))
        return run.answer("plain")

    def speculative(self, question: str, speculation: Speculation | None = None) -> Answer:
        """Generate the same answer with RaLMSpec."""
        speculation = speculation or Speculation()
        run = _Run(self, question)
        with ThreadPoolExecutor(1) as pool:
            _speculate(run, speculation, pool)
        return run.answer("ralm-spec")

    def interval(self, ids: Sequence[int], limit: int, seed: int) -> Iterator[Step]:
        """Decode up to `limit` tokens after a prompt, reusing the cached prefix."""
        options = self.options
        drafter, rule = resolve_drafter(self.lm, options).made, resolve_rule(options).made
        record = Record(logprobs=options.logprobs, alternatives=options.alternatives)
        sampling = options.sampling(self.lm.end)
        return decode(
            self._target, drafter, rule, [ids], sampling=sampling, max_new_tokens=limit, seed=seed, record=record
        )


@dataclass
class _Run:
    """The state of one answer being generated."""

    writer: Writer
    question: str
    intervals: list[_Interval] = field(default_factory=list)
    lookups: Lookups = field(default_factory=Lookups)

    def __post_init__(self) -> None:
        self._seed = self.writer.options.drawn_seed()
        self._question_ids = self.writer.lm.tokens.encode(self.question, special=False)

    @property
    def tokens(self) -> list[int]:
        return [token for interval in self.intervals for token in interval.tokens]

    @property
    def open(self) -> bool:
        if not self.intervals:
            return True
        ended = self.intervals[-1].finish == "end"
        return not ended and len(self.tokens) < self.writer.options.max_new_tokens

    def query(self) -> Any:
        """Return the next query: the last tokens of question and answer."""
        last = [*self._question_ids, *self.tokens][-self.writer.window :]
        return self.writer.retriever.encode(self.writer.lm.tokens.decode(last))

    def find(self, queries: Sequence[Any], count: int) -> list[list[int]]:
        self.lookups.calls += 1
        self.lookups.queries += len(queries)
        return self.writer.retriever.search(queries, count)

    def write(self, query: Any, document: int) -> _Interval:
        """Generate the next interval with a document. Its seed depends only on the number of tokens so far, so an
        interval generated again with the correct document equals one generated with it at once."""
        writer, tokens = self.writer, self.tokens
        began = time.perf_counter()
        passage = writer.retriever.passages[document]
        prompt = writer.lm.encode(
            writer.prompt.format(document=passage, question=self.question), raw=writer.options.raw
        )
        left = min(writer.stride, writer.options.max_new_tokens - len(tokens))
        room = writer.lm.context - len(prompt) - len(tokens)
        if room < left:
            raise InvalidOption(
                f"document and question leave room for {room} tokens in the model's context; shorten them"
            )
        seed = mix(mix(self._seed) + len(tokens)) >> 2
        steps = tuple(writer.interval([*prompt, *tokens], left, seed))
        return _Interval(query, document, len(tokens), steps, time.perf_counter() - began)

    def append(self, interval: _Interval) -> None:
        self.intervals.append(interval)

    def roll_back(self, first: int) -> None:
        """Discard the intervals from this one on."""
        self.lookups.rollbacks += 1
        self.lookups.taken_back += sum(len(interval.tokens) for interval in self.intervals[first:])
        del self.intervals[first:]

    def answer(self, method: str) -> Answer:
        writer = self.writer
        rule = resolve_rule(writer.options)
        steps = [
            replace(step, index=number, finish=None)
            for number, step in enumerate(step for interval in self.intervals for step in interval.steps)
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
        documents = [interval.document for interval in self.intervals]
        text = writer.lm.tokens.decode(self.tokens)
        return Answer(text, self.tokens, trace, documents, self.lookups, finish_reason(finish))


def _speculate(run: _Run, speculation: Speculation, pool: ThreadPoolExecutor) -> None:
    """Generate intervals with documents from the local cache, and verify several of them per call."""
    stride = Stride(speculation.overlap)
    local: dict[int, None] = {}  # the local cache, as an ordered set
    query = run.query()
    (documents,) = run.find([query], speculation.prefetch)
    local.update(dict.fromkeys(documents))
    run.append(run.write(query, documents[0]))
    verified = 1  # intervals whose document is confirmed
    while run.open or verified < len(run.intervals):
        goal = verified + (stride.best() if speculation.ahead is None else speculation.ahead)
        while run.open and len(run.intervals) < goal:
            _guess(run, local, stride)
        guessed = run.intervals[verified:]
        start = stride.clock()
        if speculation.overlap:
            pending: Future[list[list[int]]] = pool.submit(
                run.find, [interval.query for interval in guessed], speculation.prefetch
            )
            if run.open:
                _guess(run, local, stride)
            results = pending.result()
        else:
            results = run.find([interval.query for interval in guessed], speculation.prefetch)
        seconds = stride.clock() - start
        for numbers in results:
            local.update(dict.fromkeys(numbers))
        wrong = (n for n, one in enumerate(guessed) if one.document != results[n][0])
        right = next(wrong, len(guessed))
        run.lookups.right += right
        stride.verified(right, len(guessed), seconds)
        verified += right
        if right < len(guessed):
            run.roll_back(verified)
            run.append(run.write(guessed[right].query, results[right][0]))
            verified += 1


def _guess(run: _Run, local: dict[int, None], stride: Stride) -> None:
    """Generate one more interval with the best document in the local cache."""
    query = run.query()
    numbers = sorted(local)  # ties go to the lowest index, as in the store
    document = numbers[int(run.writer.retriever.score(query, numbers).argmax())]
    run.lookups.guesses += 1
    interval = run.write(query, document)
    stride.wrote(interval.seconds)
    run.append(interval)
