"""Drafters and rules by name, as speech takes them: the modality's half of outrider.core.methods.resolve. Independent
of how a target computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from outrider.core.assets.hub_models import is_published
from outrider.core.errors import unknown
from outrider.core.methods import DRAFTERS, RULES, Input
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Catalogue, Provider, Request, Resolved, supported, unless_given
from outrider.core.methods.row import Method
from outrider.core.protocol import Drafter, Rule, Target
from outrider.speech import recipes

_INPUTS = (Input.DRAFT_MODEL, Input.DRAFT_HEAD)


class Options(Protocol):
    """What resolving reads of a generation's options."""

    @property
    def drafter(self) -> str | Drafter | None: ...
    @property
    def rule(self) -> str | Rule: ...
    @property
    def drafter_options(self) -> Mapping[str, Any]: ...
    @property
    def rule_options(self) -> Mapping[str, Any]: ...


def drafters(*, views: bool = True, heads: bool = True) -> list[str]:
    """The drafters that work on a model of speech. `views`: does it have cheaper views of itself? `heads`: can draft
    heads be trained for it?"""
    trained = set(recipes.trained_heads().values())
    return [
        name
        for name, method in DRAFTERS.items()
        if supported(method, "speech", _INPUTS)
        and (views or not method.self_drafting)
        and (method.draft_head is None or (name in trained and heads))
    ]


def listed_drafters(
    names: Sequence[str] | None = None,
    *,
    draft: bool = True,
    heads: bool = True,
    folder: Path | None = None,
    published: str | None = None,
    stages: Sequence[str] = ("",),
) -> Listing:
    """The same, or those of `names`, with what each needs and lacks. `draft`: is there a smaller model? `heads`: are
    there trained heads? `folder`: of weights of one's own. `published`: the name of a published model, whose heads have
    these `stages`."""

    def missing_inputs(method: Method) -> tuple[str, ...]:
        missing = []
        for option in method.needs:
            kind = method.inputs[option]
            small = kind is Input.DRAFT_MODEL
            recipe = recipes.DRAFT if small else f"{recipes.PREFIX}{method.name}"
            if published is None:
                there = (draft if small else heads) and recipes.SHELF.has(recipe, folder)
                remedy = f"`outrider train {recipe}`"
            elif small:
                there, remedy = draft, "load(..., draft_model=...)"
            else:
                there = all(recipes.SHELF.has_for(published, recipe, folder, stage) for stage in stages)
                remedy = f"`outrider train {recipe} --model ... --prompts FILE`"
            missing += [] if there else [f"{option}=..., {kind}: {remedy}"]
        return tuple(missing)

    return Listing((DRAFTERS[name] for name in (drafters() if names is None else names)), missing_inputs)


def listed_rules() -> Listing:
    return Listing(RULES[name] for name in rules())


def rules() -> list[str]:
    """The rules that work on speech."""
    return [name for name, method in RULES.items() if supported(method, "speech", ())]


def resolve_drafter(
    options: Options,
    *,
    draft_model: Callable[[], Target],
    draft_head: Callable[[str, Method], Any] | None = None,
    names: Sequence[str] | None = None,
    lossless: bool = True,
) -> Resolved[Drafter | None]:
    """The drafter of these options, one of `names`. `draft_model` gives a smaller model, `draft_head` the trained head
    of a recipe for a drafter, or one that others published. Under a rule that is not `lossless` drafters begin with
    other options."""

    def head(request: Request) -> Any:
        """`head` names a recipe where several serve one drafter, such as "medusa-6"; or a folder or hub id."""
        if request.given and not isinstance(request.value, str):
            return request.value
        recipe, drafter = request.value or request.method.name, request.method.name
        serving = [name for name, served in recipes.trained_heads().items() if served == drafter]
        if recipe not in serving and not is_published(recipe):
            raise unknown(f"draft head of {drafter}", recipe, serving)
        assert draft_head is not None
        return draft_head(recipe, request.method)

    inputs: dict[Input, Provider] = {Input.DRAFT_MODEL: unless_given(lambda request: draft_model())}
    if draft_head is not None:
        inputs[Input.DRAFT_HEAD] = head
    known = drafters() if names is None else names
    catalogue = Catalogue(drafters=known, inputs=inputs, modality="speech", lossless=lossless)
    return catalogue.drafter(options.drafter, options.drafter_options)


def resolve_rule(
    options: Options,
    inputs: Mapping[Input, Callable[[], Any]] = {},
    codes: int | None = None,
    *,
    published: bool = False,
) -> Resolved[Rule]:
    """The rule of these options. `inputs` says which codes are alike, and `codes` how many there are. The defaults are
    those measured on our voice, unless the model is a `published` one."""
    made: dict[Input, Provider] = {kind: unless_given(partial(_made, make)) for kind, make in inputs.items()}
    given = dict(options.rule_options)
    method = RULES.get(options.rule) if isinstance(options.rule, str) else None
    if codes is not None and method is not None and Input.NEIGHBOURS in method.inputs.values():
        given.setdefault("k", min(method.options["k"], codes - 1))
    catalogue = Catalogue(rules=rules(), inputs=made, modality=None if published else "speech")
    return catalogue.rule(options.rule, given)


def _made(make: Callable[[], Any], request: Request) -> Any:
    return make()
