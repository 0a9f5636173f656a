"""A row of the method tables: everything there is to know about a drafter or a rule, in one place. Knows no method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Any

from outrider.core.protocol import Capability

ALL = ("text", "image", "speech")


class Need(StrEnum):
    """An argument of a method that has no default."""

    MODEL = "model"  # a draft model
    DRAFT_HEAD = "draft_head"  # trained on the target
    HEAD = "head"  # trained to predict acceptance
    SKIP = "skip"  # the sublayers to skip, found by a search


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
    needs: tuple[StrEnum, ...] = ()  # arguments of `make` without a default: each a Need
    capabilities: tuple[Capability, ...] = ()  # of the drafter that `make` gives with default options
    lossless: bool | None = None  # None for drafters, which cannot change what comes out
    anchor: Mapping[str, Any] | None = None  # the options at which a relaxed rule is exact
    trials: tuple[Mapping[str, Any], ...] = ({},)  # small settings that between them reach every branch, for the tests
    draft_head: Callable[..., Any] | None = None  # what is trained, where a drafter needs that
    small: Mapping[str, Any] = field(default_factory=dict)  # a draft head's small settings, for the tests

    def __str__(self) -> str:
        return self.name

    @property
    def module(self) -> str:
        make = self.make.func if isinstance(self.make, partial) else self.make
        return str((self.draft_head or make).__module__)

    @property
    def options(self) -> dict[str, Any]:
        """The options and their defaults."""
        parameters = inspect.signature(self.make).parameters.values()
        return {each.name: each.default for each in parameters if each.name not in self.needs}

    @property
    def kinds(self) -> dict[str, str]:
        """The type of each option as annotated, such as "float | None"."""
        parameters = inspect.signature(self.make).parameters.values()
        return {each.name: each.annotation for each in parameters if isinstance(each.annotation, str)}
