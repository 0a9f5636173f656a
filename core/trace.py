"""Steps as data, and the definition of every metric, on committed tokens only.

The app, the notebooks and the benchmarks all read traces. A trace written to JSON reads back the same, and any other
file raises TraceError. Independent of tensors.
"""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, Literal, get_args

from outrider.core.errors import TraceError

SCHEMA = 1
_LARGEST = 5_000_000  # characters of JSON
_PROBABILITY = (-0.01, 1.01)  # with room for rounding
_RANGES = {  # of the numbers in a step that is read
    "drafted": (-1, 2**31 - 1),  # -1: a rejected token that an engine did not report
    "emitted": (-1, 2**31 - 1),
    "chance": _PROBABILITY,
    "p": _PROBABILITY,
    "q": _PROBABILITY,
    "total_variation": _PROBABILITY,
}
_LARGEST_NUMBER = 2**62
_READING = {"strict": True, "extra": "forbid", "allow_inf_nan": False}  # how pydantic checks what it reads
Plain = str | int | float | bool | None
Source = Literal["drafted", "relaxed", "resampled", "bonus"]
Finish = Literal["end", "stop", "limit"]
FinishReason = Literal["stop", "length"]  # as serving APIs report it
SOURCES: tuple[Source, ...] = get_args(Source)


def finish_reason(finish: Finish | None) -> FinishReason | None:
    """ "stop": an end token or a stop string; "length": the limit; None: the generation was cancelled."""
    return None if finish is None else "length" if finish == "limit" else "stop"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of one step, shared by all rows that took part in it."""

    __pydantic_config__ = _READING

    draft: float = 0.0
    score: float = 0.0
    rule: float = 0.0
    rest: float = 0.0

    @property
    def total(self) -> float:
        return self.draft + self.score + self.rule + self.rest

    def __add__(self, other: Times) -> Times:
        return Times(self.draft + other.draft, self.score + other.score, self.rule + other.rule, self.rest + other.rest)


@dataclass(frozen=True, slots=True)
class Step:
    """One target pass for one row: what was drafted, tried and committed, with the acceptance probabilities."""

    __pydantic_config__ = _READING

    row: int
    index: int
    drafted: tuple[int, ...] = ()  # token ids, one per live node, in the draft's order
    parents: tuple[int, ...] = ()  # -1: the root
    fixed: tuple[bool, ...] = ()  # a guess that was not drawn
    tried: tuple[bool, ...] = ()
    chance: tuple[float, ...] = ()  # probability of acceptance; like p and q empty for engines that don't report it
    p: tuple[float, ...] = ()
    q: tuple[float, ...] = ()
    path: tuple[int, ...] = ()  # accepted nodes, from the root down
    emitted: tuple[int, ...] = ()  # committed tokens
    sources: tuple[Source, ...] = ()  # of each committed token, one of SOURCES
    total_variation: tuple[float, ...] = ()  # of each committed token: total variation from the target's distribution
    alternatives: tuple[tuple[tuple[int, float], ...], ...] = ()  # if recorded: the target's likeliest at each token
    logprobs: tuple[float, ...] = ()  # if recorded: of each committed token under the model's own softmax
    entropy: tuple[float, ...] = ()  # if recorded: of the distribution that each committed token follows, in nats
    finish: Finish | None = None
    note: str = ""  # of the drafter: which one drafted, or why none did
    times: Times = Times()
    alive: int = 1  # open rows in this round
    cost: float = 1.0  # target passes, including the bytes that the drafter read

    @property
    def accepted(self) -> int:
        """Drafted tokens that were committed."""
        return sum(source in ("drafted", "relaxed") for source in self.sources)


@dataclass(frozen=True)
class Trace:
    """The steps of one generation, of one or several rows, and the conditions under which they were made."""

    __pydantic_config__ = _READING

    steps: tuple[Step, ...] = ()
    method: str = ""
    rule: str = ""
    lossless: bool = True
    seed: int | tuple[int, ...] = 0
    options: dict[str, Plain] = field(default_factory=dict)
    machine: dict[str, Plain] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    memory: int = 0  # peak bytes, 0 where unknown
    weight_bytes: int = 0  # read by one target pass, 0 where unknown
    launches: float = 0.0  # kernels and graphs that the host launches per round; 0: not counted
    waits: float = 0.0  # of the host for the device per round
    schema: int = SCHEMA

    @property
    def rows(self) -> int:
        return len({step.row for step in self.steps})

    @property
    def bytes_per_second(self) -> float:
        """The rate at which weights were read, by all models; 0 where unknown."""
        rounds = {step.index: step for step in self.steps}.values()
        seconds = sum(step.times.total for step in rounds)
        return self.weight_bytes * sum(step.cost for step in rounds) / seconds if seconds else 0.0

    def row(self, row: int) -> Trace:
        """One row's steps alone."""
        return replace(self, steps=tuple(step for step in self.steps if step.row == row))

    def tokens(self, row: int = 0) -> list[int]:
        return [token for step in self.steps if step.row == row for token in step.emitted]

    def sources(self, row: int = 0) -> list[Source]:
        return [source for step in self.steps if step.row == row for source in step.sources]

    def summary(self) -> Summary:
        return Summary.of(self.steps)

    def to_json(self) -> str:
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> Trace:
        """Read what `to_json` wrote; any other input raises TraceError."""
        if len(text) > _LARGEST:
            raise TraceError(f"the trace has {len(text):,} characters; at most {_LARGEST:,} are read")
        from pydantic import TypeAdapter, ValidationError

        try:
            trace = TypeAdapter(cls).validate_json(text)
        except (ValidationError, RecursionError) as error:
            where = error.errors()[0] if isinstance(error, ValidationError) else {"loc": (), "msg": "nested too deep"}
            place = ".".join(str(part)[:40] for part in where["loc"]) or "the file"
            raise TraceError(f"not a trace: {place}: {str(where['msg'])[:100]}") from None
        check(trace)
        return trace


@dataclass(frozen=True)
class Summary:
    """The metrics of a trace. A step is one target pass for one row."""

    tokens: int
    target_passes: int
    tokens_per_pass: float  # mean accepted length, the target's own token included; plain decoding has 1
    equivalents_per_token: float  # passes of all models, weighted by the bytes they read, for each token
    drafted: int  # tokens that the rule may have tried
    accepted: int
    acceptance_rate: float  # accepted / drafted
    histogram: tuple[int, ...]  # how many steps accepted 0, 1, 2, ... drafted tokens
    by_position: tuple[float, ...]  # share of steps with a draft this deep in which position i was accepted
    conditional: tuple[float, ...]  # the same among steps that accepted every position before i
    sources: dict[str, int]
    times: Times
    total_variation: float  # summed total variation; 0 for a lossless rule
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @classmethod
    def of(cls, steps: Iterable[Step]) -> Summary:
        steps = list(steps)
        tokens = sum(len(step.emitted) for step in steps)
        accepted = [step.accepted for step in steps]
        depths = [_depth(step.parents) for step in steps]
        drafted = sum(len(step.drafted) for step in steps)
        rounds = {step.index: step.times for step in steps}
        times = sum(rounds.values(), Times())
        deepest = max(depths, default=0)
        offered, reached = _above(depths, deepest), _above(accepted, deepest)
        before = _above([min(c + 1, d) for c, d in zip(accepted, depths, strict=True)], deepest)
        counts = Counter(accepted)
        return cls(
            tokens=tokens,
            target_passes=len(steps),
            tokens_per_pass=tokens / len(steps) if steps else 0.0,
            equivalents_per_token=sum(step.cost for step in steps) / tokens if tokens else 0.0,
            drafted=drafted,
            accepted=sum(accepted),
            acceptance_rate=sum(accepted) / drafted if drafted else 0.0,
            histogram=tuple(counts[i] for i in range(max(accepted, default=-1) + 1)),
            by_position=tuple(hit / all_ for hit, all_ in zip(reached, offered, strict=True)),
            conditional=tuple(hit / all_ if all_ else 0.0 for hit, all_ in zip(reached, before, strict=True)),
            sources={name: sum(step.sources.count(name) for step in steps) for name in SOURCES},
            times=times,
            total_variation=sum(sum(step.total_variation) for step in steps),
            seconds=times.total,
        )


def _above(values: Iterable[int], limit: int) -> list[int]:
    """How many values are above 0, 1, ... limit - 1."""
    counts = Counter(min(value, limit) for value in values)
    return list(accumulate(counts[i] for i in range(limit, 0, -1)))[::-1]


def _depth(parents: tuple[int, ...]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def machine() -> dict[str, Plain]:
    """The machine on which a trace is made, without names and paths."""
    import os

    import torch

    facts: dict[str, Plain] = {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def conditions(weight_bytes: int = 0) -> dict[str, Any]:
    """The fields of a trace that is made now on this machine."""
    from outrider.core.device import peak_memory

    return {
        "machine": machine(),
        "versions": versions(),
        "memory": peak_memory(),
        "weight_bytes": weight_bytes,
    }


def versions() -> dict[str, str]:
    import torch

    from outrider.core import __version__

    return {"outrider": __version__, "python": platform.python_version(), "torch": torch.__version__}


def check(trace: Trace) -> None:
    """Raise TraceError for a trace of another schema, or with values that contradict each other or are out of range."""
    if trace.schema != SCHEMA:
        raise TraceError(f"the trace has schema {trace.schema}; this version reads schema {SCHEMA}")
    own = {"memory": trace.memory, "weight_bytes": trace.weight_bytes, "launches": trace.launches, "waits": trace.waits}
    for name, values in (("options", trace.options), ("machine", trace.machine), ("trace", own)):
        for key, value in values.items():
            if isinstance(value, int | float) and abs(value) > _LARGEST_NUMBER:
                raise TraceError(f"{name}: {key[:40]!r} is a number with an absolute value above 2^62")
    for step in trace.steps:
        _check(step)


def _check(step: Step) -> None:
    """Refuse a step whose parts contradict each other, or with a number out of its range."""
    nodes = len(step.drafted)
    consistent = (
        all(len(part) == nodes for part in (step.parents, step.fixed, step.tried))
        and len(step.chance) == len(step.p) == len(step.q)
        and len(step.p) in (0, nodes)
        and all(-1 <= parent < node for node, parent in enumerate(step.parents))
        and all(0 <= node < nodes for node in step.path)
        and all(step.parents[node] == above for above, node in pairwise((-1, *step.path)))
        and len(step.path) <= len(step.emitted)
        and len(step.sources) == len(step.emitted)
        and all(
            len(part) in (0, len(step.emitted))
            for part in (step.total_variation, step.logprobs, step.alternatives, step.entropy)
        )
        and 0 <= step.row < 2**31
        and 0 <= step.index < 2**31
    )
    which = f"step {str(step.index)[:12]} of row {str(step.row)[:12]}"
    if not consistent:
        raise TraceError(f"{which} contradicts itself: its lists differ in length or point outside the draft")
    for name, (low, high) in _RANGES.items():
        values = getattr(step, name)
        if values and not (low <= min(values) and max(values) <= high):
            raise TraceError(f"{which} has a value of {name!r} outside {low} to {high}")
    seconds = (step.times.draft, step.times.score, step.times.rule, step.times.rest)
    if not (min(seconds) >= 0 and max(seconds) <= 1e9 and 0 <= step.cost <= 1e9):
        raise TraceError(f"{which} has times or a cost outside 0 to 1e9")
