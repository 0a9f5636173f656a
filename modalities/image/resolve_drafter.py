"""Drafters and rules by name, as images take them: the modality's half of outrider.core.methods.resolve. Independent of
how a target computes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor

from outrider.core.methods import DRAFTERS, RULES, Input
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Catalogue, Provider, Resolved, supported, unless_given
from outrider.core.methods.row import Method
from outrider.core.protocol import Drafter, Rule, Target
from outrider.image import recipes
from outrider.image.options import Options

_INPUTS = (Input.DRAFT_MODEL, Input.DRAFT_HEAD)


def drafters() -> list[str]:
    """The drafters that work on images, those of draft heads where a recipe trains one. Guidance mixes two streams, of
    which there is no cheaper view to draft with."""
    kinds = {recipe.kind for recipe in recipes.RECIPES.values() if recipe.kind is not None}
    return [
        name
        for name, method in DRAFTERS.items()
        if supported(method, "image", _INPUTS)
        and not method.self_drafting
        and (method.draft_head is None or method.draft_head in kinds)
    ]


def listed_drafters(*, draft: bool = True, folder: Path | None = None, published: str | None = None) -> Listing:
    """The same with what each needs and lacks. `draft`: is there a smaller model? `folder`: of weights of one's own.
    `published`: the name of a published model."""

    def missing_inputs(method: Method) -> tuple[str, ...]:
        missing = []
        for option in method.needs:
            kind = method.inputs[option]
            recipe = recipes.DRAFT if kind is Input.DRAFT_MODEL else recipes.recipe_for(method)
            if published is not None and kind is Input.DRAFT_MODEL:
                remedy = None if draft else "load(..., draft_model=...)"
            elif published is not None:
                there = recipes.SHELF.has_for(published, recipe, folder)
                remedy = None if there else f"`outrider train {recipe} --model ... --prompts FILE`"
            else:
                there = draft and recipes.SHELF.has(recipe, folder)
                remedy = None if there else f"`outrider train {recipe}`"
            missing += [] if remedy is None else [f"{option}=..., {kind}: {remedy}"]
        return tuple(missing)

    return Listing((DRAFTERS[name] for name in drafters()), missing_inputs)


def listed_rules() -> Listing:
    return Listing(RULES[name] for name in rules())


def rules() -> list[str]:
    """The rules that work on images."""
    return [name for name, method in RULES.items() if supported(method, "image", ())]


def resolve_drafter(
    options: Options,
    *,
    columns: int,
    draft_model: Callable[[], Target],
    draft_head: Callable[[str], Any],
) -> Resolved[Drafter | None]:
    """The drafter of these options. `draft_model` gives a smaller model, `draft_head` the trained head of a drafter."""
    inputs: dict[Input, Provider] = {
        Input.COLUMNS: unless_given(lambda request: columns),
        Input.DRAFT_MODEL: unless_given(lambda request: draft_model()),
        Input.DRAFT_HEAD: unless_given(lambda request: draft_head(request.method.name)),
    }
    catalogue = Catalogue(drafters=drafters(), inputs=inputs, modality="image")
    return catalogue.drafter(options.drafter, options.drafter_options)


def resolve_rule(options: Options, *, neighbours: Callable[[], Tensor], codes: Callable[[], Tensor]) -> Resolved[Rule]:
    """The rule of these options. `neighbours` and `codes` say which codes are alike."""
    inputs: dict[Input, Provider] = {
        Input.NEIGHBOURS: unless_given(lambda request: neighbours()),
        Input.CODES: unless_given(lambda request: codes()),
    }
    return Catalogue(rules=rules(), inputs=inputs, modality="image").rule(options.rule, options.rule_options)
