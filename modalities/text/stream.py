"""Streams a generation: turns the loop's steps into pieces of text and results.

Independent of how prompts, targets and drafters are made.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from outrider.core.async_stream import pieces
from outrider.core.constraint import Constraint, Walker
from outrider.core.decode import decode
from outrider.core.errors import InvalidOption
from outrider.core.methods.resolve import Resolved
from outrider.core.protocol import Drafter, Rule
from outrider.core.step_recorder import Record
from outrider.core.trace import FinishReason, Step, Trace, conditions, finish_reason
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter, resolve_rule
from outrider.text.stopping import Ending
from outrider.text.structured.response_format import Format
from outrider.text.structured.tools import ToolCall

if TYPE_CHECKING:
    from outrider.text.model import TextModel


@dataclass(frozen=True)
class Result:
    """The output for one prompt."""

    text: str
    tokens: list[int]  # all committed tokens, including the stop string's and the end token, which the text omits
    trace: Trace
    logprobs: list[float] | None  # of each token, if requested
    finish_reason: FinishReason | None  # "stop" or "length"; None: the generation was cancelled
    prompt: list[int] = field(repr=False)  # as token ids
    format: Format | None = field(default=None, repr=False)
    complete: bool | None = None  # whether the text is all that its format asks for; None without a format
    tool_calls: tuple[ToolCall, ...] = ()

    @property
    def parsed(self) -> Any:
        """The value of a text with a format: of JSON the document, or the pydantic model; else the text."""
        if self.format is None:
            raise InvalidOption("the text has no format; give generate() a response_format, a regex or a grammar")
        if not self.complete:
            why = {"length": "max_new_tokens ended it", None: "it was cancelled"}.get(
                self.finish_reason, "it ended early"
            )
            raise InvalidOption(
                f"the text is not complete after {len(self.tokens)} tokens, as {why}: {self.text!r:.99}"
            )
        return self.format.read(self.text)

    def __repr__(self) -> str:
        text = self.text if len(self.text) <= 60 else self.text[:57] + "..."
        return f"Result({text!r}, {len(self.tokens)} tokens, finish_reason={self.finish_reason!r}, {self.trace.method})"


def result_of(
    model: TextModel,
    text: str,
    trace: Trace,
    reason: FinishReason | None,
    prompt: list[int],
    options: Options,
    grammar: Constraint | None,
) -> Result:
    """The result of one row's trace."""
    tokens = [token for step in trace.steps for token in step.emitted]
    logprobs = [logprob for step in trace.steps for logprob in step.logprobs] if options.logprobs else None
    complete = None
    if grammar is not None:
        walker = Walker(grammar)
        complete = walker.reach(tokens) and walker.cursor.complete
    calls = () if options.offered is None else options.offered.calls(model.tokens.decode(tokens, special=True))
    return Result(text, tokens, trace, logprobs, reason, prompt, options.format, complete, calls)


@dataclass(frozen=True)
class About:
    """Model, drafter and rule of a trace."""

    model: TextModel
    drafter: Resolved[Drafter | None]
    rule: Resolved[Rule]

    def trace(
        self, steps: Sequence[Step], options: Options, seed: int, weight_bytes: int, more: Mapping[str, Any]
    ) -> Trace:
        facts = {"model": self.model.name, "dtype": self.model.dtype} | options.facts()
        if self.model.kv_cache_dtype:
            facts["kv_cache_dtype"] = self.model.kv_cache_dtype
        facts |= {f"drafter.{name}": note for name, note in self.drafter.notes.items()}
        return Trace(
            steps=tuple(steps),
            method=self.drafter.name,
            rule=self.rule.name,
            lossless=self.rule.made.lossless,
            seed=seed,
            options=facts | dict(more),
            **conditions(weight_bytes),
        )


@dataclass(frozen=True)
class Piece:
    """The text that one step added to one row."""

    text: str  # final; an incomplete character or stop string waits for the next step
    row: int
    step: Step
    finish_reason: FinishReason | None


class Stream(Iterator[Piece]):
    """A running generation: an iterator of pieces."""

    def __init__(
        self,
        model: TextModel,
        options: Options,
        prompts: list[list[int]],
        limits: list[int],
        *,
        batch: bool,
        samples: int | None,
        conversation: bool,
    ) -> None:
        self.batch, self.prompts = batch or samples is not None, prompts
        self._model, self._options = model, options
        drafter, rule = resolve_drafter(model, options, len(prompts)), resolve_rule(options)
        self._about, self._seed = About(model, drafter, rule), options.drawn_seed()
        self._seeds = [self._seed + row % samples for row in range(len(prompts))] if samples else None
        self._endings = [Ending(model.tokens.decode, prompt, options.stops, options.criteria) for prompt in prompts]
        self._texts, self._steps = ["" for _ in prompts], list[Step]()
        self._reasons: list[FinishReason | None] = [None for _ in prompts]
        self._cache = model.take_prefix_cache() if conversation else None
        target = self._cache or model.target()
        self._weight_bytes = target.weight_bytes
        sampling = model.sampling(options, target.vocabulary)
        self._grammar = sampling.constraint
        self._pieces = self._run(
            decode(
                target,
                drafter.made,
                rule.made,
                prompts,
                sampling=sampling,
                max_new_tokens=limits,
                stop=self._stop if options.cuts else None,
                seed=self._seed if self._seeds is None else self._seeds,
                record=Record(logprobs=options.logprobs, alternatives=options.alternatives),
            )
        )

    def _stop(self, row: int, tokens: Sequence[int]) -> int | None:
        return self._endings[row].cut(tokens)

    def _run(self, steps: Iterator[Step]) -> Generator[Piece]:
        try:
            for step in steps:
                self._steps.append(step)
                text = self._endings[step.row].text(step.emitted, last=step.finish is not None)
                self._texts[step.row] += text
                reason = self._reasons[step.row] = finish_reason(step.finish)
                yield Piece(text, step.row, step, reason)
        finally:
            if isinstance(steps, Generator):
                steps.close()
            if self._cache is not None:
                self._model.return_prefix_cache(self._cache)

    def __next__(self) -> Piece:
        return next(self._pieces)

    def close(self) -> None:
        """End the generation."""
        self._pieces.close()

    def __aiter__(self) -> AsyncGenerator[Piece, None]:
        return pieces(self)

    @property
    def trace(self) -> Trace:
        """The trace of all rows so far."""
        facts = {} if self._cache is None else {"reused": self._cache.reused}
        return self._about.trace(self._steps, self._options, self._seed, self._weight_bytes, facts)

    @property
    def results(self) -> list[Result]:
        """The results so far, one per prompt."""
        trace = self.trace
        results = []
        for row, prompt in enumerate(self.prompts):
            row_trace = trace.row(row) if self.batch else trace
            if self._seeds is not None:
                row_trace = replace(row_trace, seed=self._seeds[row])
            text, reason = self._texts[row], self._reasons[row]
            results.append(result_of(self._model, text, row_trace, reason, prompt, self._options, self._grammar))
        return results
