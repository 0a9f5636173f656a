"""Published models of speech and sound by name, as people use them.

Every class has a file of its own that says how it is read and what its tokens are; here is what they have in common:
options, drafters and rules by name, the loop. Which classes there are is `FAMILY`; what was proven of each stands in
modalities/PUBLISHED.md. Knows nothing of how a class computes.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from outrider.core.assets.hub_models import Family
from outrider.core.decode import Stop, decode
from outrider.core.distribution import Sampling
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.trace import Step, Trace, machine, versions
from outrider.core.validation import METHODS, NUMBER, WHOLE, Kind, check, options_of
from outrider.speech.audio import Sound
from outrider.speech.resolve_drafter import drafters, resolve_drafter, resolve_rule, rules


@dataclass(frozen=True)
class Part:
    """Something to be decoded by the loop: a stage of a model, for one row."""

    target: Callable[[], Target]
    limit: int
    root: tuple[int, ...] = (0,)  # what the loop sees as its prompt
    end: tuple[int, ...] = ()
    stop: Stop | None = None
    draft: Callable[[], Target] | None = None  # a smaller model's


@dataclass(frozen=True)
class Options:
    """How a generation is run."""

    drafter: str | Drafter | None = None
    rule: str | Rule = "exact"
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, _TYPES)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        return options_of(cls, given)

    def made(self, part: Part) -> tuple[Drafter | None, Rule]:
        """The drafter and the rule, for one part."""
        return resolve_drafter(self, draft_model=lambda: _draft(part)).made, resolve_rule(self).made


def _draft(part: Part) -> Target:
    if part.draft is None:
        raise InvalidOption(
            "this drafter needs a smaller model; name one of the family when loading: load(..., draft_model=...)"
        )
    return part.draft()


_TYPES: dict[str, Kind] = {**METHODS, **dict.fromkeys(("temperature", "top_p"), NUMBER), "top_k": WHOLE, "seed": WHOLE}


@dataclass(frozen=True)
class Said:
    """One prompt's outcome."""

    prompt: Any
    tokens: list[list[int]]  # of each stage
    outcome: Any  # what the class makes of them: codes, text; None: it was broken off
    trace: Trace  # of all stages


class Published(Protocol):
    """A model of a class: a generator of a prompt's stages (`Part`), one after another. What each came to is sent back,
    and it returns what was meant."""

    def stages(self, prompt: Any, limit: int | None) -> Any: ...


class Audible(Protocol):
    """One whose outcome can be heard."""

    @property
    def rate(self) -> int: ...  # samples a second
    def sound(self, outcome: Any) -> torch.Tensor: ...


class PublishedSpeech:
    """A published model as people use it."""

    def __init__(self, published: Published, *, name: str, dtype: str = "float32") -> None:
        self.published, self.name, self.dtype = published, name, dtype

    def __repr__(self) -> str:
        return f"<outrider.speech model {self.name}, {self.dtype}>"

    @property
    def drafters(self) -> list[str]:
        """Names to give as `drafter`."""
        return drafters(ours=False)

    @property
    def rules(self) -> list[str]:
        """Names to give as `rule`."""
        return rules()

    def generate(self, prompt: Any, *, limit: int | None = None, **options: Any) -> Said:
        """Decode to the end. `limit` is in what the class counts: frames, tokens, columns. The options are those of
        `Options`."""
        stream = self.stream(prompt, limit=limit, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Any, *, limit: int | None = None, **options: Any) -> Stream:
        """The same step by step: an iterator of steps, whose `result` is what there is. Closing it ends it."""
        return Stream(self, Options.of(options), prompt, limit)

    @property
    def audible(self) -> bool:
        """Does it make sound (rather than text)?"""
        return hasattr(self.published, "sound")

    def heard(self, said: Said) -> Sound:
        """What was said, through the class's own codec."""
        if not self.audible:
            raise InvalidOption(f"{self.name} says text, which is its outcome; there is nothing to hear")
        maker: Audible = self.published  # type: ignore[assignment]
        samples = maker.sound(said.outcome).detach().float().cpu().flatten()
        return Sound(samples.numpy(), maker.rate)


class Stream(Iterator[Step]):
    """A generation under way, stage after stage; closing it ends it."""

    def __init__(self, model: PublishedSpeech, options: Options, prompt: Any, limit: int | None) -> None:
        self._model, self._options, self._prompt = model, options, prompt
        self._steps: list[Step] = []
        self._tokens: list[list[int]] = []
        self._outcome: Any = None
        self._run = self._decoded(model.published.stages(prompt, limit))

    def __next__(self) -> Step:
        return next(self._run)

    def close(self) -> None:
        """End it here."""
        self._run.close()

    def _decoded(self, stages: Any) -> Generator[Step]:
        answer: list[int] | None = None
        while True:
            try:
                part: Part = stages.send(answer)
            except StopIteration as last:
                self._outcome = last.value
                return
            answer = []
            self._tokens.append(answer)
            yield from self._stage(part, answer)

    def _stage(self, part: Part, tokens: list[int]) -> Generator[Step]:
        options = self._options
        drafter, rule = options.made(part)
        sampling = Sampling(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, end=part.end)
        first = 1 + max((step.index for step in self._steps), default=-1)
        steps = decode(
            part.target(),
            drafter,
            rule,
            [list(part.root)],
            sampling=sampling,
            max_new_tokens=part.limit,
            stop=part.stop,
            seed=options.seed * 1_000_003 + len(self._tokens) - 1,
        )
        try:
            for step in steps:
                tokens += step.emitted
                self._steps.append(replace(step, index=first + step.index))
                yield self._steps[-1]
        finally:
            if isinstance(steps, Generator):
                steps.close()

    @property
    def trace(self) -> Trace:
        """Of all stages, as far as it has come."""
        wanted = self._options
        drafter = wanted.drafter if isinstance(wanted.drafter, str) else type(wanted.drafter).__name__
        rule = wanted.rule if isinstance(wanted.rule, str) else type(wanted.rule).__name__
        facts: dict[str, str | int | float | bool | None] = {
            "model": self._model.name,
            "dtype": self._model.dtype,
            "temperature": wanted.temperature,
            "top_k": wanted.top_k,
        }
        return Trace(
            steps=tuple(self._steps),
            method="plain" if wanted.drafter is None else drafter,
            rule=rule,
            lossless=resolve_rule(wanted).made.lossless,
            seed=wanted.seed,
            options=facts,
            machine=machine(),
            versions=versions(),
        )

    @property
    def result(self) -> Said:
        """What was said; where it was broken off, the tokens alone."""
        return Said(self._prompt, self._tokens, self._outcome, self.trace)


FAMILY: Family[Published] = Family(
    package="outrider.speech.hub",
    what="speech models",
    classes={
        "csm": ("csm", "CsmForConditionalGeneration"),
        "musicgen": ("musicgen", "MusicgenForConditionalGeneration"),
        "bark": ("bark", "BarkModel"),
        "whisper": ("whisper", "WhisperForConditionalGeneration"),
        "llama": ("llasa", "LlamaForCausalLM"),
    },
    refused={
        "dia": "under guidance its class samples the conditional distribution cut to the top codes of the guided "
        "logits, where guidance here mixes both streams into one distribution; and where its first codebook ends, the "
        "others are forced to end on a schedule counted from there",
        "vibevoice": "its head draws continuous numbers by diffusion; there are no tokens to accept",
        "speecht5": "it says spectrograms, not tokens",
        "vits": "it says a whole utterance at once; there is nothing to draft",
    },
    bare=True,
)


published = FAMILY.of  # a model object of transformers, with its processor


def load(
    source: str | Path,
    *,
    draft_model: str | Path | None = None,
    device: str | torch.device = "cpu",
    dtype: str = "float32",
    revision: str | None = None,
    **options: Any,
) -> PublishedSpeech:
    """Load a published model by its hub id or folder. `draft_model` names a smaller model of its family; further
    options are those of the class."""
    if draft_model is not None:
        options["draft"] = FAMILY.model(draft_model, device=device, dtype=dtype)
    made = FAMILY.open(source, device=device, dtype=dtype, revision=revision, options=options)
    return PublishedSpeech(made, name=str(source), dtype=dtype)


def ids_of(text: Sequence[int] | torch.Tensor) -> list[int]:
    """One row of token ids as a list."""
    held = torch.as_tensor(text)
    return [int(one) for one in (held[0] if held.dim() == 2 else held)]
