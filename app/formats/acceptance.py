"""What an engine reports about one request, in one form: how many draft tokens each verification step accepted.

Engines that report every step in order give a trace; those that report a histogram or totals give a summary. Knows
nothing of any engine's field names.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.core.errors import TraceError

if TYPE_CHECKING:
    from outrider.core.trace import Step, Trace

LARGEST = 2**31 - 1
STEPS = 20_000  # of a request
TEXT = 20_000  # characters
SUMMARY = 1  # the version of a summary's JSON


@dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One request of an engine. What it did not report is None or empty."""

    engine: str
    method: str = ""
    steps: tuple[tuple[int, int], ...] | None = None  # (drafted, accepted) of each verification step, in order
    histogram: tuple[int, ...] | None = None  # how many steps accepted 0, 1, 2, ... draft tokens
    passes: int | None = None  # verification steps
    drafted: int | None = None
    accepted: int | None = None
    longest: int | None = None  # the most tokens that a step may draft
    tokens: int | None = None  # generated, the first one included
    seconds: float | None = None  # of decoding
    prompt: str = ""
    text: str = ""
    pieces: tuple[tuple[int, str], ...] = ()  # the generated tokens: id and text

    def __post_init__(self) -> None:
        counts = {"passes": self.passes, "drafted": self.drafted, "accepted": self.accepted, "tokens": self.tokens}
        for name, count in counts.items():
            if count is not None and not 0 <= count <= LARGEST:
                raise TraceError(f"{self.engine}: {name} is {count}; it must be from 0 to {LARGEST}")
        if self.seconds is not None and not 0 <= self.seconds <= 1e9:
            raise TraceError(f"{self.engine}: the time is {self.seconds} s; it must be from 0 to 1e9")
        if self.drafted is not None and self.accepted is not None and self.accepted > self.drafted:
            raise TraceError(f"{self.engine}: {self.accepted} draft tokens accepted of {self.drafted}")
        if self.steps is not None:
            self._check_steps(self.steps)
        if self.histogram is not None:
            _equal(self.engine, "the histogram's steps", sum(self.histogram), self.passes)
            _equal(self.engine, "its accepted tokens", _weighted(self.histogram), self.accepted)

    def _check_steps(self, steps: tuple[tuple[int, int], ...]) -> None:
        if len(steps) > STEPS:
            raise TraceError(f"{self.engine}: there are {len(steps):,} steps; the limit is {STEPS:,}")
        for number, (drafted, accepted) in enumerate(steps, 1):
            if not 0 <= accepted <= drafted <= 10_000:
                raise TraceError(f"{self.engine}: step {number} accepted {accepted} of {drafted} draft tokens")
        _equal(self.engine, "the steps", len(steps), self.passes)
        _equal(self.engine, "drafted tokens of the steps", sum(drafted for drafted, _ in steps), self.drafted)
        _equal(self.engine, "accepted tokens of the steps", sum(accepted for _, accepted in steps), self.accepted)

    @property
    def placed(self) -> bool:
        """Whether the tokens of every pass are known: the first token, then accepted tokens and one more a step. Passes
        without a draft are not reported, so that they make the count larger."""
        if self.steps is None or self.tokens is None:
            return False
        before = 1 + sum(accepted + 1 for _, accepted in self.steps[:-1])
        last = self.steps[-1][1] + 1 if self.steps else 0
        return before < self.tokens <= before + last if self.steps else self.tokens == before

    def filled(self) -> Acceptance:
        """The same with what follows from what is there."""
        full = self
        if full.steps is not None:
            kept = [accepted for _, accepted in full.steps]
            counts = Counter(kept)
            full = replace(
                full,
                passes=len(kept),
                accepted=sum(kept),
                drafted=sum(drafted for drafted, _ in full.steps),
                histogram=full.histogram or tuple(counts[i] for i in range(max(kept, default=0) + 1)),
            )
        elif full.histogram is not None:
            full = replace(full, passes=sum(full.histogram), accepted=_weighted(full.histogram))
        if full.passes and full.longest is None and full.drafted and not full.drafted % full.passes:
            full = replace(full, longest=full.drafted // full.passes)
        return full

    def trace(self) -> Trace:
        """The steps as a trace, if they were reported in order; a token whose id is unknown is -1."""
        from outrider.core.methods.rules import EXACT
        from outrider.core.trace import Trace

        if self.steps is None:
            raise TraceError(f"{self.engine} reported no ordered steps, so there is a summary but no trace")
        ids = [token for token, _ in self.pieces] if self.placed and len(self.pieces) == self.tokens else []
        total = 1 + sum(accepted + 1 for _, accepted in self.steps)
        if self.placed and self.tokens is not None:
            total = self.tokens
        tokens = iter(ids or [-1] * total)
        left = total
        steps = []
        for index, (drafted, accepted) in enumerate([(0, 0), *self.steps]):
            kept = min(accepted + 1, left)
            left -= kept
            emitted = tuple(next(tokens) for _ in range(kept))
            steps.append(_step(index, drafted, accepted, emitted))
        options: dict[str, str | int | float | bool | None] = {"engine": self.engine}
        if self.longest is not None:
            options["num_draft_tokens"] = self.longest
        if self.text and not ids:
            options["text"] = self.text[:TEXT]
        if self.tokens is not None and not self.placed:
            options["tokens_without_a_place"] = max(self.tokens - total, 0)
        return Trace(tuple(steps), method=self.method or self.engine, rule=EXACT.name, options=options)

    def recording(self) -> dict[str, Any]:
        """The trace with the texts of its tokens, as the page and the viewer open it."""
        names = {str(token): text[:200] for token, text in self.pieces}
        trace = asdict(self.trace())
        return {"recording": 1, "modality": "text", "prompt": self.prompt[:8000], "names": names, "trace": trace}

    def summary(self) -> dict[str, Any]:
        """The totals and the histogram, as the viewer opens them."""
        full = self.filled()
        found = {name: getattr(full, name) for name in ("engine", "method", "passes", "drafted", "accepted", "longest")}
        found |= {"tokens": full.tokens, "seconds": full.seconds, "prompt": full.prompt[:8000]}
        histogram = None if full.histogram is None else list(full.histogram)
        return {"acceptance": SUMMARY, **found, "histogram": histogram, "text": full.text[:TEXT]}

    @classmethod
    def of_trace(cls, trace: Trace, engine: str = "outrider") -> Acceptance:
        """The acceptance of a trace, over all its rows. Passes without a draft are no verification steps. The draft
        tokens of a step are those that one path of the draft could accept: its depth."""
        drafting = [step for step in trace.steps if step.drafted]
        steps = tuple((max(_depth(step), step.accepted), step.accepted) for step in drafting)
        return cls(
            engine=engine,
            method=trace.method,
            steps=steps,
            tokens=sum(len(step.emitted) for step in trace.steps),
            seconds=trace.summary().seconds or None,
        ).filled()


def _depth(step: Step) -> int:
    depths: list[int] = []
    for parent in step.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def _step(index: int, drafted: int, accepted: int, emitted: tuple[int, ...]) -> Step:
    """A chain of which the first tokens were accepted."""
    from outrider.core.trace import Source, Step

    own: Source = "resampled" if accepted < drafted else "bonus"
    sources: list[Source] = ["drafted"] * accepted
    return Step(
        row=0,
        index=index,
        drafted=tuple(emitted[i] if i < min(accepted, len(emitted)) else -1 for i in range(drafted)),
        parents=tuple(range(-1, drafted - 1)),
        fixed=(False,) * drafted,
        tried=tuple(i <= accepted for i in range(drafted)),
        path=tuple(range(min(accepted, len(emitted)))),
        emitted=emitted,
        sources=tuple([*sources, own][: len(emitted)]),
    )


def _weighted(histogram: tuple[int, ...]) -> int:
    return sum(accepted * count for accepted, count in enumerate(histogram))


def _equal(engine: str, what: str, found: int, expected: int | None) -> None:
    if expected is not None and found != expected:
        raise TraceError(f"{engine}: {what} add up to {found}, but the total is {expected}")
