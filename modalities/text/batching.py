"""Continuous batching of text requests: each joins when there is room, and gives the same output as alone.

Adds text, stop strings and traces to outrider.core.batching; independent of the layout of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

from outrider.core.batching import PREFIX_MEMORY, ContinuousBatch
from outrider.core.constraint import Constraint, Free
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.protocol import BatchedTarget, Drafter
from outrider.core.step_recorder import Record
from outrider.core.trace import FinishReason, Step, finish_reason
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter, resolve_rule
from outrider.text.stopping import Ending
from outrider.text.stream import About, Piece, Result, result_of

if TYPE_CHECKING:
    from outrider.text.model import TextModel


@dataclass(eq=False)
class Request:
    """One prompt in a batch, with its answer so far."""

    number: int
    prompt: list[int] = field(repr=False)
    seed: int = 0
    reused: int = 0  # prompt tokens that another request has read, so that they were copied
    text: str = ""
    finish_reason: FinishReason | None = None
    cancelled: bool = False
    error: OutriderError | None = None  # why it ended, if its format let nothing follow
    steps: list[Step] = field(default_factory=list, repr=False)
    ending: Ending = field(default=cast(Ending, None), repr=False)
    batch: TextBatch = field(default=cast(Any, None), repr=False)
    options: Options = field(default=cast(Options, None), repr=False)  # the batch's, with the request's own format
    grammar: Constraint | None = field(default=None, repr=False)

    @property
    def done(self) -> bool:
        """Whether the request is finished, failed or cancelled."""
        return self.cancelled or self.error is not None or self.finish_reason is not None

    @property
    def tokens(self) -> list[int]:
        return [token for step in self.steps for token in step.emitted]

    def cancel(self) -> None:
        """Cancel the request."""
        self.batch.cancel(self)

    @property
    def result(self) -> Result:
        """The result so far, as `generate` returns it. Raises the error of a request that failed."""
        if self.error is not None:
            raise self.error
        batch, facts = self.batch, {"request": self.number, "reused": self.reused}
        trace = batch.about.trace(self.steps, self.options, self.seed, batch.weight_bytes, facts)
        return result_of(batch.model, self.text, trace, self.finish_reason, self.prompt, self.options, self.grammar)


class TextBatch:
    """A batch to which requests can be added at any time. Iterating decodes until all are finished and yields pieces of
    text; the caller keeps the finished requests. Closing it cancels the rest."""

    def __init__(
        self,
        model: TextModel,
        options: Options,
        *,
        rows: int,
        memory: int | None,
        prefix_memory: int | None = PREFIX_MEMORY,
        own_formats: bool = False,
    ) -> None:
        if options.drafter is not None and not isinstance(options.drafter, str):
            raise InvalidOption("a batch makes one drafter per request; give a drafter's name or None")
        self.model, self.options = model, options
        first, rule = resolve_drafter(model, options, rows, continuous=True), resolve_rule(options)
        self.about = About(model, first, rule)
        spare = [first.made]

        def make() -> Drafter:
            made = spare.pop() if spare else resolve_drafter(model, options, rows, continuous=True).made
            assert made is not None
            return made

        self._requests: dict[int, Request] = {}
        target = cast(BatchedTarget, model.target())
        self.weight_bytes = target.weight_bytes
        sampling = model.sampling(options, target.vocabulary)
        self._vocabulary, self._grammar, self._own_formats = target.vocabulary, sampling.constraint, own_formats
        if own_formats and sampling.constraint is None:
            sampling = replace(sampling, constraint=Free())
        self._core = ContinuousBatch(
            target,
            None if first.made is None else make,
            rule.made,
            sampling=sampling,
            rows=rows,
            memory=memory,
            prefix_memory=prefix_memory,
            stop=self._stop if options.cuts else None,
            failed=self._failed,
            record=Record(nodes=False, logprobs=options.logprobs, alternatives=options.alternatives),
        )

    def add(
        self,
        prompt: Any,
        max_new_tokens: int | None = None,
        *,
        seed: int | None = None,
        response_format: Any = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Request:
        """Add a prompt as `generate` takes it; what is given besides overrides the batch's options. A format of its own
        needs a batch with `own_formats`."""
        options, constraint = self.options, None
        if not (response_format is regex is grammar is None):
            if not self._own_formats:
                raise InvalidOption(
                    "requests of this batch have no formats of their own; open it with own_formats=True"
                )
            options = replace(options, response_format=response_format, regex=regex, grammar=grammar)
            if options.format is not None:
                constraint = options.format.constraint(self.model.grammars, self._vocabulary)
        ids = self.model.encode(prompt, raw=options.raw, tools=options.offered)
        room = self.model.room(ids, options.max_new_tokens if max_new_tokens is None else max_new_tokens, "the prompt")
        request_seed = options.drawn_seed() if seed is None else seed
        number = self._core.add(ids, room, seed=request_seed, constraint=constraint)
        ending = Ending(self.model.tokens.decode, ids, options.stops, options.criteria)
        request = self._requests[number] = Request(
            number, ids, request_seed, ending=ending, batch=self, options=options, grammar=constraint or self._grammar
        )
        return request

    def cancel(self, request: Request) -> None:
        if not request.done:
            request.cancelled = True
            del self._requests[request.number]
            self._core.cancel(request.number)

    def _failed(self, number: int, error: OutriderError) -> None:
        self._requests.pop(number).error = error

    def _stop(self, number: int, tokens: Sequence[int]) -> int | None:
        return self._requests[number].ending.cut(tokens)

    @property
    def idle(self) -> bool:
        return self._core.idle

    @property
    def active(self) -> int:
        """The number of requests being decoded; others wait."""
        return self._core.active

    @property
    def cache_bytes(self) -> int:
        """Bytes of cache for all rows."""
        return self._core.cache_bytes

    @property
    def prefix_bytes(self) -> int:
        """Bytes that are held of what requests have read, for those that begin with the same tokens."""
        return self._core.prefix_bytes

    @property
    def reused_tokens(self) -> int:
        """Prompt tokens of all requests that were copied, not read."""
        return self._core.reused_tokens

    def __iter__(self) -> Iterator[Piece]:
        while not self.idle:
            yield from self.round()

    def round(self) -> list[Piece]:
        """Run one round for all active requests; return their new pieces."""
        pieces = []
        for step in self._core.round():
            request = self._requests.get(step.row)
            if request is None:  # cancelled by the reader of earlier pieces
                continue
            if not request.steps:
                request.reused = self._core.reused(request.number)
            request.steps.append(replace(step, row=0))
            text = request.ending.text(step.emitted, last=step.finish is not None)
            request.text, request.finish_reason = request.text + text, finish_reason(step.finish)
            if step.finish is not None:
                del self._requests[step.row]
            pieces.append(Piece(text, step.row, step, request.finish_reason))
        return pieces

    def close(self) -> None:
        """Cancel all unfinished requests."""
        for request in list(self._requests.values()):
            self.cancel(request)
        self._core.close()

    def __enter__(self) -> TextBatch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
