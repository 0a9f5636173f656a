"""Drafters and rules by name, as pictures take them: what a name stands for and what it must be given of the model.

Knows nothing of how a target computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from outrider.core.errors import unknown
from outrider.core.methods import DRAFTERS, OF_TEXT, RULES, make_drafter, make_rule
from outrider.core.protocol import Drafter, Rule, Target
from outrider.image import recipes
from outrider.image.options import Options

# how drafters begin on a picture, where nobody says otherwise
USUAL: Mapping[str, Mapping[str, Any]] = {"jacobi": {"window": 16, "renew": "couple", "filler": "above"}}


def drafters(taught: bool = True) -> list[str]:
    """The drafters that work on pictures: those that look at codes and distributions, the smaller model's, and those
    whose heads have a recipe. Those that read a text, and those that see their target cheaper, don't: guidance is two
    streams. `taught`: with those that are trained for the model?"""
    kinds = {one.kind for one in recipes.RECIPES.values() if one.kind is not None}
    return [
        name
        for name, method in DRAFTERS.items()
        if "image" in method.modalities
        and name not in OF_TEXT
        and {"model", "draft_head"} >= set(method.needs)
        and (method.draft_head is None or (taught and method.draft_head in kinds))
    ]


def rules() -> list[str]:
    """The rules that work on pictures."""
    return [name for name, method in RULES.items() if "image" in method.modalities and not method.needs]


def drafter_of(
    options: Options, columns: int, model: Callable[[], Target], draft_head: Callable[[str], Any] | None = None
) -> tuple[Drafter | None, str]:
    """The drafter asked for, and its name. `model` gives a smaller one when it is wanted, `draft_head` what a trained
    drafter guesses with."""
    wanted = options.drafter
    if wanted is None or not isinstance(wanted, str):
        return wanted, "plain" if wanted is None else type(wanted).__name__
    known = drafters(draft_head is not None)
    if wanted not in known:
        raise unknown("drafter", wanted, known)
    method, given = DRAFTERS[wanted], {**USUAL.get(wanted, {}), **options.drafter_options}
    if "columns" in method.options:
        given.setdefault("columns", columns)
    if "model" in method.needs:
        given.setdefault("model", model())
    if draft_head is not None and "draft_head" in method.needs and "draft_head" not in given:
        given["draft_head"] = draft_head(wanted)
    return make_drafter(wanted, **given), wanted


def rule_of(options: Options, neighbours: Callable[[], Tensor], looks: Callable[[], Tensor]) -> tuple[Rule, str]:
    """The rule asked for, and its name. `neighbours` and `looks` say which codes are alike, when that is wanted."""
    if not isinstance(options.rule, str):
        return options.rule, type(options.rule).__name__
    if options.rule not in rules():
        raise unknown("rule", options.rule, rules())
    given = dict(options.rule_options)
    if "neighbours" in RULES[options.rule].options:
        given.setdefault("neighbours", neighbours())
    if "codes" in RULES[options.rule].options:
        given.setdefault("codes", looks())
    return make_rule(options.rule, **given), options.rule
