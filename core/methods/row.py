"""A row of the tables of methods: what is said of a drafter or a rule, all in one place. Knows no method."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

ALL = ("text", "image", "speech")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row: what it is called, what of the literature it stands for, and how to make it."""

    name: str
    make: Callable[..., Any]
    systems: tuple[str, ...]
    summary: str
    paper: str
    topology: tuple[str, ...]  # of the drafts it makes, or takes: chain, tree, window
    modalities: tuple[str, ...] = ALL
    needs: tuple[str, ...] = ()  # what `make` must be given besides options
    lossless: bool | None = None  # None for drafters, which cannot change what comes out
    anchor: Mapping[str, Any] | None = None  # the options at which a relaxed rule is exact
    trials: tuple[Mapping[str, Any], ...] = ({},)  # small settings that between them reach every branch, for the tests
    draft_head: Callable[..., Any] | None = None  # what is trained, where a drafter needs that
    small: Mapping[str, Any] = field(default_factory=dict)  # a draft head's small settings, for the tests

    def __str__(self) -> str:
        return self.name

    @property
    def module(self) -> str:
        return str((self.draft_head or self.make).__module__)

    @property
    def options(self) -> dict[str, Any]:
        """What may be set, and to what it is set if nobody does."""
        parameters = inspect.signature(self.make).parameters.values()
        return {one.name: one.default for one in parameters if one.name not in self.needs}

    @property
    def kinds(self) -> dict[str, str]:
        """What an option takes, as it is written where the method is made, such as "float | None"."""
        parameters = inspect.signature(self.make).parameters.values()
        return {one.name: one.annotation for one in parameters if isinstance(one.annotation, str)}
