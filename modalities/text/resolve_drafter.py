"""Drafters and rules by name, as text takes them: the modality's half of outrider.core.methods.resolve."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import AUTO, DRAFTERS, RULES, Input
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Catalogue, Provider, Request, Resolved
from outrider.core.protocol import Drafter, Rule
from outrider.text import drafter_inputs
from outrider.text.measurements import NOTHING, MeasuredDefault, default_of
from outrider.text.options import Options

if TYPE_CHECKING:
    from outrider.text.model import TextModel

_INPUTS: Mapping[Input, Callable[[TextModel, Request], Any]] = {
    Input.TARGET: drafter_inputs.target,
    Input.DRAFT_MODELS: drafter_inputs.draft_models,
    Input.FOREIGN_MODEL: drafter_inputs.foreign_model,
    Input.BRIDGE: drafter_inputs.bridge,
    Input.DRAFT_HEAD: drafter_inputs.trained_head,
    Input.ACCEPTANCE_HEAD: drafter_inputs.trained_head,
    Input.SKIP: drafter_inputs.skip,
    Input.ACCEPTANCE: drafter_inputs.acceptance,
    Input.TEXT: drafter_inputs.text,
    Input.TEXTS: drafter_inputs.texts,
    Input.DATASTORE: drafter_inputs.store,
    Input.BIGRAMS: drafter_inputs.bigram_table,
    Input.SUCCESSORS: drafter_inputs.successors,
}


def drafters() -> list[str]:
    """The drafters that work on text."""
    return [AUTO.name, *(name for name, method in DRAFTERS.items() if "text" in method.modalities)]


def rules() -> list[str]:
    """The rules that work on text."""
    return [name for name, method in RULES.items() if "text" in method.modalities and not method.needs]


def listed_drafters(target: str, model: TextModel | None = None) -> Listing:
    """The drafters with the inputs that each needs and those that are missing for a target, given by name and, once it
    is loaded, as a model."""
    methods = (AUTO if name == AUTO.name else DRAFTERS[name] for name in drafters())
    return Listing(methods, lambda method: drafter_inputs.missing_inputs(target, method, model))


def listed_rules() -> Listing:
    return Listing(RULES[name] for name in rules())


def check_names(drafter: str | None, rule: str) -> None:
    """Raise an error for unknown names, before anything costly runs."""
    if drafter is not None and drafter not in drafters():
        raise unknown("drafter", drafter, drafters())
    if rule not in rules():
        raise unknown("rule", rule, rules())


@dataclass(frozen=True, kw_only=True)
class _Choice:
    """A drafter, its options, and the models that it is given."""

    drafter: Any  # a name, a drafter, or None
    options: Mapping[str, Any]
    draft_model: Any = None
    head: Any = None
    notes: Mapping[str, str] = field(default_factory=dict)  # for the trace


def resolve_drafter(
    model: TextModel, options: Options, rows: int = 1, *, continuous: bool = False
) -> Resolved[Drafter | None]:
    """The drafter of these options, for this many batch rows, which may be those of a continuous batch, and the
    measured costs that it uses."""
    inputs: dict[Input, Provider] = {kind: partial(make, model) for kind, make in _INPUTS.items()}
    inputs[Input.DRAFT_MODEL] = partial(drafter_inputs.draft_model, model, options.draft_vocabulary)
    inputs[Input.PASS_COSTS] = partial(drafter_inputs.costs, model, rows)
    catalogue = Catalogue(drafters=drafters(), inputs=inputs, others={AUTO.name: AUTO})
    if options.drafter == AUTO.name:
        alone = rows == 1 and not continuous and options.num_draft_tokens is None
        default = default_of(model) if alone and drafter_inputs.can_draft_for_itself(model) else NOTHING
        choice = _auto(model, options, catalogue, rows, default)
    else:
        choice = _named(model, options, catalogue)
    if options.draft_vocabulary is not None and isinstance(choice.drafter, str):
        kinds = catalogue.method(choice.drafter).inputs.values()
        if Input.DRAFT_MODEL not in kinds and Input.DRAFTERS not in kinds:
            raise InvalidOption(
                f"the drafter '{choice.drafter}' takes no draft model, so draft_vocabulary does nothing there"
            )
    resolved = catalogue.drafter(
        choice.drafter,
        choice.options,
        draft_model=choice.draft_model,
        head=choice.head,
        num_draft_tokens=options.num_draft_tokens,
    )
    return replace(resolved, notes={**resolved.notes, **choice.notes})


def _named(model: TextModel, options: Options, catalogue: Catalogue) -> _Choice:
    """A drafter that was asked for, with the draft model or the head that the target was loaded with, if it fits."""
    drafter, given, draft_model, head = options.drafter, options.drafter_options, options.draft_model, options.head
    if isinstance(drafter, str):
        if draft_model is None and model.draft_model is not None:
            takes = catalogue.method(drafter).takes_draft_model and "model" not in given
            draft_model = model.draft_model if takes else None
        if head is None and model.head is not None and "head" not in given:
            head = model.head if drafter in drafter_inputs.drafters_of_head(model, model.head) else None
    return _Choice(drafter=drafter, options=given, draft_model=draft_model, head=head)


def _auto(model: TextModel, options: Options, catalogue: Catalogue, rows: int, default: MeasuredDefault) -> _Choice:
    """What `auto` stands for: chains by the draft model, which is given or was fetched for the target; drafters merged
    with the head, if there is one and its guesses can be merged; what was measured for the target; else the merged
    training-free drafters."""
    given = options.drafter_options
    own = given.keys() <= {*AUTO.options, *AUTO.needs}
    draft_model, head = options.draft_model, options.head
    if draft_model is None and not (given and own) and "model" not in given:
        draft_model = model.draft_model
    if draft_model is None and head is None and model.head is None and not given:
        draft_model = default.fetched
    if draft_model is not None:
        chosen, notes = given, dict[str, str]()
        if rows == 1 and not given and options.num_draft_tokens is None:
            members = partial(catalogue.members, AUTO, {})
            chosen = drafter_inputs.confident_length(model, draft_model, options.draft_vocabulary, members)
            notes = {"options": json.dumps(chosen)}
        return _Choice(drafter=DRAFT_MODEL.name, options=chosen, draft_model=draft_model, head=head, notes=notes)
    if head is None and "head" not in given:
        head = model.head
        if head is None and own and "drafters" not in given and default.drafter is None:
            head = drafter_inputs.head_trained_here(model)
    if head is not None:
        drafter = drafter_inputs.drafters_of_head(model, head)[-1]
        if own and drafter_inputs.can_be_merged(model, drafter):
            notes = {"head": str(head)} if isinstance(head, Path) else {}
            return _Choice(drafter=AUTO.name, options=_with_head(drafter, head, given), notes=notes)
        return _Choice(drafter=drafter, options=given, head=head)
    if not given:
        return _Choice(drafter=default.drafter or AUTO.name, options=default.options)
    return _Choice(drafter=AUTO.name, options=given)


def _with_head(drafter: str, head: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `auto` with the drafter of a head among its drafters."""
    members, by_member = options.get("drafters", AUTO.presets["drafters"]), options.get("options") or {}
    members = members if drafter in members else (*members, drafter)
    own = {**DRAFTERS[drafter].merged_defaults, "head": head, **by_member.get(drafter, {})}
    return {**options, "drafters": members, "options": {**by_member, drafter: own}}


def resolve_rule(options: Options) -> Resolved[Rule]:
    """The rule of these options."""
    return Catalogue(rules=rules()).rule(options.rule, options.rule_options)
