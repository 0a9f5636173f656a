"""Drafters and rules by name, as text takes them: the modality's half of outrider.core.methods.resolve."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from outrider.core.errors import InvalidOption, unknown
from outrider.core.methods import AUTO, DRAFTERS, RULES, Input
from outrider.core.methods.draft_model import DRAFT_MODEL
from outrider.core.methods.listing import Listing
from outrider.core.methods.resolve import Catalogue, Provider, Request, Resolved
from outrider.core.protocol import Drafter, Rule
from outrider.text import drafter_inputs
from outrider.text.measurements import default_of
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


def resolve_drafter(model: TextModel, options: Options, rows: int = 1) -> Resolved[Drafter | None]:
    """The drafter of these options, for this many batch rows, and the measured costs that it uses."""
    inputs: dict[Input, Provider] = {kind: partial(make, model) for kind, make in _INPUTS.items()}
    inputs[Input.DRAFT_MODEL] = partial(drafter_inputs.draft_model, model, options.draft_vocabulary)
    inputs[Input.PASS_COSTS] = partial(drafter_inputs.costs, model, rows)
    catalogue = Catalogue(drafters=drafters(), inputs=inputs, others={AUTO.name: AUTO})
    draft_model, drafter = options.draft_model, options.drafter
    own = drafter == AUTO.name and options.drafter_options and options.drafter_options.keys() <= AUTO.options.keys()
    if draft_model is None and isinstance(drafter, str) and model.draft_model is not None and not own:
        method = DRAFT_MODEL if drafter == AUTO.name else catalogue.method(drafter)
        if method.takes_draft_model and "model" not in options.drafter_options:
            draft_model = model.draft_model
    drafter_options, notes = options.drafter_options, dict[str, str]()
    if draft_model is not None and drafter == AUTO.name:
        drafter = DRAFT_MODEL.name
        if rows == 1 and not drafter_options and options.num_draft_tokens is None:
            members = partial(catalogue.members, AUTO, {})
            drafter_options = drafter_inputs.fastest_length(model, draft_model, options.draft_vocabulary, members)
            notes = {"options": json.dumps(drafter_options)}
    head = options.head
    if head is None and model.head is not None and isinstance(drafter, str):
        fits = drafter == AUTO.name or drafter in drafter_inputs.drafters_of_head(model, model.head)
        head = model.head if fits and "head" not in options.drafter_options else None
    if head is not None and drafter == AUTO.name:
        drafter = drafter_inputs.drafters_of_head(model, head)[-1]
    if drafter == AUTO.name and not drafter_options:
        default = default_of(model.name)
        drafter, drafter_options = default.drafter or drafter, default.options
    if options.draft_vocabulary is not None and isinstance(drafter, str):
        kinds = catalogue.method(drafter).inputs.values()
        if Input.DRAFT_MODEL not in kinds and Input.DRAFTERS not in kinds:
            raise InvalidOption(f"the drafter '{drafter}' takes no draft model, so draft_vocabulary does nothing there")
    resolved = catalogue.drafter(
        drafter,
        drafter_options,
        draft_model=draft_model,
        head=head,
        num_draft_tokens=options.num_draft_tokens,
    )
    return replace(resolved, notes={**resolved.notes, **notes})


def resolve_rule(options: Options) -> Resolved[Rule]:
    """The rule of these options."""
    return Catalogue(rules=rules()).rule(options.rule, options.rule_options)
