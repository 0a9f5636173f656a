"""Published speech and audio models by name: the object that `outrider.speech.load` returns for a hub id or a folder.

Each model class has its own module; this one holds what they share: options, drafters and rules by name, and the
stream. `FAMILY` lists the classes; modalities/PUBLISHED.md reports the tests of each. Independent of how a class
computes.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from outrider.core.assets.hub_models import DTYPES, QUANTIZED, Family, HubClass, is_published
from outrider.core.assets.store import head_folder
from outrider.core.async_stream import pieces
from outrider.core.decode import Stop, decode
from outrider.core.device import AUTO, usable_device, usual_dtype
from outrider.core.distribution import LogitsProcessor, Sampling
from outrider.core.drafters.trained.import_checkpoints import read_foreign
from outrider.core.engine.adapters.model_parts import SharingTarget
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods.listing import Listing
from outrider.core.methods.row import Method
from outrider.core.methods.rules import EXACT
from outrider.core.protocol import Drafter, Rule, Target
from outrider.core.trace import Step, Trace, conditions
from outrider.core.validation import (
    METHODS,
    NUMBER,
    WHOLE,
    Kind,
    check,
    dtype_name,
    options_of,
    processor_facts,
    processors_of,
)
from outrider.speech import recipes
from outrider.speech.audio import Sound
from outrider.speech.hub.similar_tokens import SimilarTokens, rule_inputs
from outrider.speech.resolve_drafter import drafters, listed_drafters, listed_rules, resolve_drafter, resolve_rule


@dataclass(frozen=True)
class Stage:
    """One run of the decoding loop, with one row. A model generates in one stage or more."""

    target: Callable[[], Target]
    limit: int  # tokens
    root: tuple[int, ...] = (0,)  # the loop's prompt
    end: tuple[int, ...] = ()  # end tokens
    stop: Stop | None = None
    draft: Callable[[], Target] | None = None  # a smaller model
    similar: SimilarTokens | None = None  # which of its tokens are alike; None: they are words
    heads: str | None = None  # which of the model's heads draft in it; None: none can


@dataclass(frozen=True)
class HeadStage:
    """A stage that draft heads can be trained for. `target` makes its target for some prompt, whose rows they share."""

    target: Callable[[], SharingTarget]
    predicted: Sequence[int] | None = None  # the tokens that are generated, ends included; None: all
    context: int | None = None  # the most tokens, prompt included; None: no limit
    views: bool = False  # whether it has cheaper views of itself
    books: int = 1  # codebooks in each frame


@dataclass(frozen=True)
class Options:
    """The options of a generation."""

    drafter: str | Drafter | None = None  # plain: which drafter pays depends on the model
    rule: str | Rule = EXACT.name
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    logits_processor: LogitsProcessor | Sequence[LogitsProcessor] = ()  # per stage; ids begin with the stage's root
    seed: int = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, _TYPES)
        processors_of(self.logits_processor)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Options:
        return options_of(cls, given)

    def resolve(self, stage: Stage, model: PublishedSpeech) -> tuple[Drafter | None, Rule]:
        """The drafter and the rule for a stage of a model."""
        drafter = resolve_drafter(
            self,
            names=list(model.drafters),
            draft_model=lambda: _draft_model(stage),
            draft_head=partial(model.draft_head, stage.heads),
        )
        return drafter.made, self.resolve_rule(stage)

    def resolve_rule(self, stage: Stage) -> Rule:
        """The rule for a stage."""
        similar = stage.similar
        inputs = rule_inputs(similar, self.rule, self.rule_options)
        return resolve_rule(self, inputs, None if similar is None else 1 + similar.nearest, published=True).made


def _draft_model(stage: Stage) -> Target:
    if stage.draft is None:
        raise InvalidOption(
            "this drafter needs a smaller model; name one of the family when loading: load(..., draft_model=...)"
        )
    return stage.draft()


_TYPES: dict[str, Kind] = {**METHODS, **dict.fromkeys(("temperature", "top_p"), NUMBER), "top_k": WHOLE, "seed": WHOLE}


@dataclass(frozen=True)
class PublishedResult:
    """The result of one prompt."""

    prompt: Any
    tokens: list[list[int]]  # by stage
    outcome: Any  # the model's output, codes or text; None: the stream was closed early
    trace: Trace  # of all stages


class Published(Protocol):
    """A model of one class. `stages` is a generator that yields the stages of a prompt, is sent the tokens of each, and
    returns the outcome."""

    def stages(self, prompt: Any, limit: int | None) -> Any: ...


@runtime_checkable
class TakesHeads(Published, Protocol):
    """A published model that draft heads can be trained for."""

    @property
    def temperature(self) -> float: ...  # at which it is published
    @property
    def head_stages(self) -> Mapping[str, HeadStage]: ...  # by Stage.heads


class SoundModel(Protocol):
    """A published model whose outcome can be converted to sound."""

    @property
    def sample_rate(self) -> int: ...  # samples per second
    def sound(self, outcome: Any) -> torch.Tensor: ...


class PublishedSpeech:
    """A published model with its drafters and rules. `folder` holds draft heads trained for it, in place of those in
    the cache."""

    def __init__(
        self,
        published: Published,
        *,
        name: str,
        dtype: str = "float32",
        draft: bool = False,
        folder: Path | None = None,
    ) -> None:
        self.published, self.name, self.dtype, self._draft, self._folder = published, name, dtype, draft, folder
        stages = published.head_stages if isinstance(published, TakesHeads) else {}
        if folder is not None and not stages:
            raise InvalidOption(f"{name} takes no draft heads")
        views = bool(stages) and all(stage.views for stage in stages.values())
        self._names = drafters(heads=bool(stages), views=views)
        self._heads: dict[tuple[str, str, str], Any] = {}

    def __repr__(self) -> str:
        return f"<outrider.speech model {self.name}, {self.dtype}>"

    @property
    def drafters(self) -> Listing:
        """Names to give as `drafter`, with what each does, needs and lacks here."""
        stages = tuple(self.published.head_stages) if isinstance(self.published, TakesHeads) else ()
        return listed_drafters(self._names, draft=self._draft, folder=self._folder, published=self.name, stages=stages)

    @property
    def rules(self) -> Listing:
        """Names to give as `rule`, with what each does."""
        return listed_rules()

    def draft_head(self, stage: str | None, name: str, method: Method) -> Any:
        """The draft head that a recipe trained for a stage of this model, or that others published in a folder or on
        the hub, laid out for this machine."""
        assert stage is not None and isinstance(self.published, TakesHeads) and isinstance(method.draft_head, type)
        key = (stage, name, method.name)
        if key not in self._heads:
            target = self.published.head_stages[stage].target()
            if is_published(name):
                head = read_foreign(head_folder(name), target)
            else:
                head = recipes.published_head(name, target, self.name, self._folder, stage)
            if not isinstance(head, method.draft_head):
                raise Incompatible(f"{name} holds a {type(head).__name__}, which '{method.name}' can't use")
            self._heads[key] = head.drafts(target)
        return self._heads[key]

    def generate(self, prompt: Any, *, max_new_tokens: int | None = None, **options: Any) -> PublishedResult:
        """Generate until the end or `max_new_tokens`, which is in the class's unit: frames, tokens or columns. The
        options are those of `Options`."""
        stream = self.stream(prompt, max_new_tokens=max_new_tokens, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, prompt: Any, *, max_new_tokens: int | None = None, **options: Any) -> Stream:
        """Like `generate`, as an iterator over steps with the `result` so far."""
        return Stream(self, Options.of(options), prompt, max_new_tokens)

    def lossless(self, options: Mapping[str, Any]) -> bool:
        """Whether the rule of these options changes no distribution."""
        return resolve_rule(Options.of(options), published=True).made.lossless

    @property
    def makes_sound(self) -> bool:
        """Whether the outcome is sound rather than text."""
        return hasattr(self.published, "sound")

    def to_sound(self, result: PublishedResult) -> Sound:
        """The sound of a result, through the model's own codec."""
        if not self.makes_sound:
            raise InvalidOption(f"{self.name} generates text, which is the result's outcome; it has no sound")
        model: SoundModel = self.published  # type: ignore[assignment]
        samples = model.sound(result.outcome).detach().float().cpu().flatten()
        return Sound(samples.numpy(), model.sample_rate)


class Stream(Iterator[Step]):
    """An iterator over the steps of all stages of a running generation; `close` stops it."""

    def __init__(self, model: PublishedSpeech, options: Options, prompt: Any, limit: int | None) -> None:
        self._model, self._options, self._prompt = model, options, prompt
        self._steps: list[Step] = []
        self._weight_bytes = 0
        self._tokens: list[list[int]] = []
        self._outcome: Any = None
        self._run = self._decode(model.published.stages(prompt, limit))

    def __next__(self) -> Step:
        return next(self._run)

    def close(self) -> None:
        """Stop the generation."""
        self._run.close()

    def __aiter__(self) -> AsyncGenerator[Step, None]:
        return pieces(self)

    def _decode(self, stages: Any) -> Generator[Step]:
        tokens: list[int] | None = None
        while True:
            try:
                stage: Stage = stages.send(tokens)
            except StopIteration as stop:
                self._outcome = stop.value
                return
            tokens = []
            self._tokens.append(tokens)
            yield from self._decode_stage(stage, tokens)

    def _decode_stage(self, stage: Stage, tokens: list[int]) -> Generator[Step]:
        options = self._options
        drafter, rule = options.resolve(stage, self._model)
        sampling = Sampling(
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            processors=processors_of(options.logits_processor),
            end=stage.end,
        )
        first = 1 + max((step.index for step in self._steps), default=-1)
        target = stage.target()
        self._weight_bytes = max(self._weight_bytes, target.weight_bytes)  # of the largest stage
        steps = decode(
            target,
            drafter,
            rule,
            [list(stage.root)],
            sampling=sampling,
            max_new_tokens=stage.limit,
            stop=stage.stop,
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
        """The trace of all stages so far."""
        options = self._options
        drafter = options.drafter if isinstance(options.drafter, str) else type(options.drafter).__name__
        rule = options.rule if isinstance(options.rule, str) else type(options.rule).__name__
        facts: dict[str, str | int | float | bool | None] = {
            "model": self._model.name,
            "dtype": self._model.dtype,
            "temperature": options.temperature,
            "top_k": options.top_k,
            **processor_facts(processors_of(options.logits_processor)),
        }
        return Trace(
            steps=tuple(self._steps),
            method="plain" if options.drafter is None else drafter,
            rule=rule,
            lossless=resolve_rule(options, published=True).made.lossless,
            seed=options.seed,
            options=facts,
            **conditions(self._weight_bytes),
        )

    @property
    def result(self) -> PublishedResult:
        """The result so far; its outcome is None until the last stage has ended."""
        return PublishedResult(self._prompt, self._tokens, self._outcome, self.trace)


FAMILY: Family[Published] = Family(
    package="outrider.speech.hub",
    what="speech models",
    classes={
        "csm": HubClass("csm", "Csm", "CsmForConditionalGeneration"),
        "musicgen": HubClass("musicgen", "Musicgen", "MusicgenForConditionalGeneration"),
        "bark": HubClass("bark", "Bark", "BarkModel"),
        "whisper": HubClass("whisper", "Whisper", "WhisperForConditionalGeneration"),
        "llama": HubClass("llama", "of_model", opener="open_folder", quantized=True),
    },
    refused={
        "dia": "under guidance its class samples from the conditional distribution restricted to the top codes of the "
        "guided logits, which is not a mixture of both streams' logits; and when its first codebook ends, the others "
        "end on a schedule counted from there",
        "vibevoice": "its head samples continuous values by diffusion, so there are no tokens to accept",
        "speecht5": "it generates spectrograms, not tokens",
        "vits": "it generates a whole utterance in one pass, so there is nothing to draft",
    },
    bare=True,
)


published = FAMILY.wrap  # wraps a transformers model object and its processor


def load(
    source: str | Path,
    *,
    draft_model: str | Path | None = None,
    device: str | torch.device = AUTO,
    dtype: str | torch.dtype = AUTO,
    revision: str | None = None,
    folder: Path | None = None,
    **options: Any,
) -> PublishedSpeech:
    """Load a published model by its hub id or folder. `draft_model` names a smaller model of its family, `folder` holds
    draft heads trained for it (by default those in the cache); further options are those of the class, such as
    MusicGen's guidance."""
    device = usable_device(device)
    dtype = usual_dtype(device) if dtype == AUTO else dtype_name(dtype, (*DTYPES, *QUANTIZED))
    if draft_model is not None:
        options["draft"] = FAMILY.model(draft_model, device=device, dtype=dtype)
    model = FAMILY.open(source, device=device, dtype=dtype, revision=revision, options=options)
    return PublishedSpeech(model, name=str(source), dtype=dtype, draft=draft_model is not None, folder=folder)


def processor_of(processor: Any, what: str) -> Any:
    """The processor, which a text needs; an error without one."""
    if processor is None:
        raise InvalidOption(
            f"the prompt is a text and there is no processor to read it; give {what}, or load the model from a folder "
            "that has its processor's files (AutoProcessor.from_pretrained(...).save_pretrained(folder))"
        )
    return processor


def ids_of(text: Sequence[int] | torch.Tensor) -> list[int]:
    """Token ids [T] or [1, T] as a list."""
    ids = torch.as_tensor(text)
    return [int(token) for token in (ids[0] if ids.dim() == 2 else ids)]
