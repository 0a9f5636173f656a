"""A row of the method tables: all that the suite knows of a drafter or a rule, in one place. Knows no method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from outrider.core.errors import InvalidOption
from outrider.core.protocol import Capability

ALL = ("text", "image", "speech")


class Input(StrEnum):
    """Where the value of an option comes from if it is not simply written in a call, in plain words. A modality's half
    of outrider.core.methods.resolve makes it, from what was given or from the model."""

    TARGET = "the target itself"
    DRAFT_MODEL = "a smaller model with the target's tokens"
    DRAFT_MODELS = "further smaller models"
    FOREIGN_MODEL = "a smaller model of any tokenizer"
    BRIDGE = "a bridge between two tokenizers"
    DRAFT_HEAD = "a draft head trained on the target"
    ACCEPTANCE_HEAD = "a head trained to predict acceptance"
    SKIP = "the sublayers to skip"
    ACCEPTANCE = "measured acceptance"
    TEXT = "a text"
    TEXTS = "texts"
    DATASTORE = "a datastore"
    BIGRAMS = "the target's bigrams"
    SUCCESSORS = "the likeliest successors of each token"
    DRAFTERS = "drafters or their names"
    DRAFTER = "a drafter or its name"
    PASS_COSTS = "the costs of target passes on this machine"
    COLUMNS = "the columns of a picture"
    NEIGHBOURS = "the nearest codes of each code"
    CODES = "the place of each code in the codebook"
    EMBEDDINGS = "the embedding of each token"


HEADS = (Input.DRAFT_HEAD, Input.ACCEPTANCE_HEAD)


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row: the name of a method, the published systems it implements, and how to make it."""

    name: str
    make: Callable[..., Any]
    systems: tuple[str, ...]
    summary: str
    paper: str
    topology: tuple[str, ...]  # of the drafts it makes, or takes: chain, tree, window
    modalities: tuple[str, ...] = ALL
    inputs: Mapping[str, Input] = field(default_factory=dict)  # of the options of `make` that are not simply values
    presets: Mapping[str, Any] = field(default_factory=dict)  # names and options of members, as the user gives them
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # modality -> options it begins with
    relaxed_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # the same under a relaxed rule
    ranges: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # lowest, highest, step of an option
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the values of an option that is a word
    samples_chain: bool = False  # does it sample a whole chain in every round (a drafter), or take only such (a rule)?
    same_tokens: bool = False  # of a rule: does a seed give the tokens of plain decoding, whatever the drafter?
    vllm: str | None = None  # what vLLM calls it
    self_drafting: bool = False  # does it draft with a cheaper view of the target, which must offer one?
    capabilities: tuple[Capability, ...] = ()  # of the drafter that `make` gives with default options
    lossless: bool | None = None  # None for drafters, which cannot change what comes out
    anchor: Mapping[str, Any] | None = None  # the options at which a relaxed rule is exact
    trials: tuple[Mapping[str, Any], ...] = ({},)  # small settings that between them reach every branch, for the tests
    draft_tokens: tuple[str, ...] | None = None  # options that limit the draft tokens of a pass; None: the usual ones
    draft_head: Callable[..., Any] | None = None  # what is trained, where a drafter needs that
    small: Mapping[str, Any] = field(default_factory=dict)  # a draft head's small settings, for the tests

    def __str__(self) -> str:
        return self.name

    def judges(self, drafter: Method) -> bool:
        """Can this rule judge what a drafter drafts with its usual options, at any temperature?"""
        sampled = drafter.samples_chain or not self.samples_chain
        return sampled and set(drafter.topology) <= set(self.topology)

    @property
    def module(self) -> str:
        make = self.make.func if isinstance(self.make, partial) else self.make
        return str((self.draft_head or make).__module__)

    @property
    def needs(self) -> tuple[str, ...]:
        """The options without a default, and trained heads: None stands for a missing one."""
        return tuple(
            each.name
            for each in self._parameters
            if (each.default is each.empty and each.name not in self.presets) or self.inputs.get(each.name) in HEADS
        )

    @property
    def options(self) -> dict[str, Any]:
        """The other options and their defaults."""
        needs = self.needs
        made = {each.name: each.default for each in self._parameters if each.name not in needs}
        return {**made, **self.presets}

    def limited(self, options: Mapping[str, Any], num_draft_tokens: int) -> dict[str, Any]:
        """The options, with the number of draft tokens per target pass limited."""
        names = self.draft_tokens
        if names is None:  # the length of a chain, the nodes of a tree; a draft head may draft either
            usual = (
                ("length", "nodes") if self.draft_head else ("length",) if "tree" not in self.topology else ("nodes",)
            )
            names = tuple(name for name in usual if name in self.options)
        if not names:
            known = ", ".join(self.options)
            raise InvalidOption(
                f"the drafter '{self.name}' has no option for num_draft_tokens; use drafter_options ({known})"
            )
        if given := [name for name in names if name in options]:
            raise InvalidOption(f"num_draft_tokens sets {given[0]}, which drafter_options sets too; give one of them")
        return {**options, **dict.fromkeys(names, num_draft_tokens)}

    def with_draft_model(self, options: Mapping[str, Any], draft_model: Any) -> dict[str, Any]:
        """The options, with the draft model among them."""
        kinds = (Input.DRAFT_MODEL, Input.FOREIGN_MODEL)
        name = next((name for name, kind in self.inputs.items() if kind in kinds), None)
        if name is None:
            raise InvalidOption(f"the drafter '{self.name}' takes no draft model; use drafter='draft-model'")
        if name in options:
            raise InvalidOption(f"draft_model sets {name}, which drafter_options sets too; give one of them")
        return {**options, name: draft_model}

    @property
    def takes_draft_model(self) -> bool:
        return any(kind in (Input.DRAFT_MODEL, Input.FOREIGN_MODEL) for kind in self.inputs.values())

    def with_defaults(self, modality: str, options: Mapping[str, Any] = {}, *, lossless: bool = True) -> dict[str, Any]:
        """The options given, over those that it begins with in a modality. A draft of another kind or size than the
        usual one is not drafted in the usual tree."""
        usual = dict(self.defaults.get(modality, {}))
        if not lossless and modality in self.relaxed_defaults:
            usual = dict(self.relaxed_defaults[modality])
        if {"draft_kind", "nodes"} & set(options):
            usual.pop("tree", None)
        return {**usual, **options}

    @property
    def kinds(self) -> dict[str, str]:
        """The type of each option as annotated, such as "float | None"."""
        made = {each.name: each.annotation for each in self._parameters if isinstance(each.annotation, str)}
        return {**dict.fromkeys(self.presets, "Mapping[str, Any] | None"), **made}

    @property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        return tuple(inspect.signature(self.make).parameters.values())
