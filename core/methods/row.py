"""The row of a method table: everything the suite knows about a drafter or a rule. Independent of any one method."""

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
    """The kind of an option whose value comes from the model or the user, described for messages. The providers of a
    modality (outrider.core.methods.resolve) make the value."""

    TARGET = "the target model"
    DRAFT_MODEL = "a smaller model with the target's vocabulary"
    DRAFT_MODELS = "additional smaller models"
    FOREIGN_MODEL = "a smaller model with any tokenizer"
    BRIDGE = "a mapping between two tokenizers"
    DRAFT_HEAD = "a draft head trained on the target"
    ACCEPTANCE_HEAD = "a head trained to predict acceptance"
    SKIP = "the sublayers to skip"
    ACCEPTANCE = "measured acceptance rates"
    TEXT = "a text"
    TEXTS = "texts"
    DATASTORE = "a datastore of token sequences"
    BIGRAMS = "the target's bigram table"
    SUCCESSORS = "the most probable successors of each token"
    DRAFTERS = "drafters or their names"
    DRAFTER = "a drafter or its name"
    PASS_COSTS = "measured costs of target passes on this machine"
    COLUMNS = "the number of code columns of an image"
    NEIGHBOURS = "the nearest codes of each code"
    CODES = "the codebook vector of each code"
    EMBEDDINGS = "the embedding of each token"


HEADS = (Input.DRAFT_HEAD, Input.ACCEPTANCE_HEAD)


@dataclass(frozen=True, kw_only=True)
class Method:
    """A method: its name, the published systems it implements, and how to make it."""

    name: str
    make: Callable[..., Any]
    systems: tuple[str, ...]
    summary: str
    paper: str
    topology: tuple[str, ...]  # of the drafts it makes (drafter) or verifies (rule): chain, tree, window
    modalities: tuple[str, ...] = ALL
    inputs: Mapping[str, Input] = field(default_factory=dict)  # options of `make` that are not plain values
    presets: Mapping[str, Any] = field(default_factory=dict)  # default members of a combination, and their options
    defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by modality: default options
    relaxed_defaults: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # likewise, under a relaxed rule
    merged_defaults: Mapping[str, Any] = field(default_factory=dict)  # likewise, of a drafter that `auto` merges
    ranges: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)  # option: lowest, highest, step
    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # the values of a string option
    samples_chain: bool = False  # a drafter: samples a whole chain every round; a rule: requires such a chain
    same_tokens: bool = False  # a rule: the tokens equal those of plain decoding with the same seed
    vllm: str | None = None  # the method's name in vLLM
    self_drafting: bool = False  # drafts with a cheaper view of the target, which the target must offer
    capabilities: tuple[Capability, ...] = ()  # of the drafter with default options
    lossless: bool | None = None  # None for drafters, which cannot change the output distribution
    exact_at: Mapping[str, Any] | None = None  # the options at which a relaxed rule is exact
    measured: Mapping[str, float] = field(default_factory=dict)  # a rule's tokens a pass, by modality (text: greedy)
    as_good: tuple[str, ...] = ()  # a relaxed rule: modalities in which its default was judged close to plain decoding
    test_options: tuple[Mapping[str, Any], ...] = ({},)  # for tests: small settings that together reach every branch
    draft_tokens: tuple[str, ...] | None = None  # options that limit the draft length; None: length or nodes
    draft_head: Callable[..., Any] | None = None  # the trained module, for drafters that have one
    test_head_options: Mapping[str, Any] = field(default_factory=dict)  # for tests: settings of a small draft head

    def __str__(self) -> str:
        return self.name

    @property
    def drafts_trees(self) -> bool:
        """Whether its drafts are trees by default: fixed guesses, which can be merged with those of others."""
        return self.topology[0] == "tree"

    def can_verify(self, drafter: Method) -> bool:
        """Whether this rule can verify the drafter's drafts, with default options and at any temperature."""
        sampled = drafter.samples_chain or not self.samples_chain
        return sampled and set(drafter.topology) <= set(self.topology)

    @property
    def module(self) -> str:
        make = self.make.func if isinstance(self.make, partial) else self.make
        return str((self.draft_head or make).__module__)

    @property
    def needs(self) -> tuple[str, ...]:
        """The required options: those without a default, and trained heads, whose default None means "missing"."""
        return tuple(
            each.name
            for each in self._parameters
            if (each.default is each.empty and each.name not in self.presets) or self.inputs.get(each.name) in HEADS
        )

    @property
    def options(self) -> dict[str, Any]:
        """The optional options and their defaults."""
        needs = self.needs
        defaults = {each.name: each.default for each in self._parameters if each.name not in needs}
        return {**defaults, **self.presets}

    def with_draft_tokens(self, options: Mapping[str, Any], num_draft_tokens: int) -> dict[str, Any]:
        """The options, with at most `num_draft_tokens` drafted per target pass."""
        names = self.draft_tokens
        if names is None:  # the length of a chain, the nodes of a tree; a draft head may draft either
            limits = (
                ("length", "nodes") if self.draft_head else ("length",) if "tree" not in self.topology else ("nodes",)
            )
            names = tuple(name for name in limits if name in self.options)
        if not names:
            known = ", ".join(self.options)
            raise InvalidOption(
                f"the drafter '{self.name}' has no option for num_draft_tokens; use drafter_options ({known})"
            )
        if given := [name for name in names if name in options]:
            raise InvalidOption(f"num_draft_tokens sets {given[0]}, which drafter_options sets too; give one of them")
        return {**options, **dict.fromkeys(names, num_draft_tokens)}

    def with_draft_model(self, options: Mapping[str, Any], draft_model: Any) -> dict[str, Any]:
        """The options, with the draft model added."""
        kinds = (Input.DRAFT_MODEL, Input.FOREIGN_MODEL)
        name = next((name for name, kind in self.inputs.items() if kind in kinds), None)
        if name is None:
            raise InvalidOption(f"the drafter '{self.name}' takes no draft model; use drafter='draft-model'")
        if name in options:
            raise InvalidOption(f"draft_model sets {name}, which drafter_options sets too; give one of them")
        return {**options, name: draft_model}

    def with_head(self, options: Mapping[str, Any], head: Any) -> dict[str, Any]:
        """The options, with the draft head added."""
        name = next((name for name, kind in self.inputs.items() if kind is Input.DRAFT_HEAD), None)
        if name is None:
            raise InvalidOption(
                f"the drafter '{self.name}' takes no draft head; use drafter='eagle3', 'medusa' or such"
            )
        if name in options:
            raise InvalidOption("head is given twice, also in drafter_options; give one of them")
        return {**options, name: head}

    @property
    def takes_draft_model(self) -> bool:
        return any(kind in (Input.DRAFT_MODEL, Input.FOREIGN_MODEL) for kind in self.inputs.values())

    def with_defaults(self, modality: str, options: Mapping[str, Any] = {}, *, lossless: bool = True) -> dict[str, Any]:
        """The given options over the modality's defaults. A given kind or size of draft replaces the default tree."""
        defaults = dict(self.defaults.get(modality, {}))
        if not lossless and modality in self.relaxed_defaults:
            defaults = dict(self.relaxed_defaults[modality])
        if {"draft_kind", "nodes"} & set(options):
            defaults.pop("tree", None)
        return {**defaults, **options}

    @property
    def option_types(self) -> dict[str, str]:
        """The type of each option as annotated, such as "float | None"."""
        annotations = {each.name: each.annotation for each in self._parameters if isinstance(each.annotation, str)}
        return {**dict.fromkeys(self.presets, "Mapping[str, Any] | None"), **annotations}

    @property
    def _parameters(self) -> tuple[inspect.Parameter, ...]:
        return tuple(inspect.signature(self.make).parameters.values())
