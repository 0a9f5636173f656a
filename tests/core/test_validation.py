"""Options of calls and of methods: accepted values, and the messages for others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, RULES, make_drafter, make_rule
from outrider.core.rules.exact import Exact
from outrider.core.validation import (
    METHODS,
    NUMBER,
    SWITCH,
    WHOLE,
    as_list,
    check,
    copies_of,
    options_of,
    recorded,
    seed_of,
)


@dataclass(frozen=True)
class Options:
    drafter: Any = None
    rule: Any = "exact"
    count: int = 1
    share: float = 0.5
    loud: bool = False
    seed: int | torch.Generator = 0
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check(self, {"count": WHOLE, "share": NUMBER, "loud": SWITCH, **METHODS})


@pytest.mark.parametrize(
    "given",
    [{}, {"share": 1, "count": 3}, {"loud": True}, {"drafter": PromptLookup(), "rule": Exact()}, {"drafter": "x"}],
)
def test_what_is_right_is_taken(given: dict[str, Any]) -> None:
    made = options_of(Options, given)
    assert all(getattr(made, name) == value for name, value in given.items())


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"counts": 1}, "unknown option 'counts'. Did you mean 'count'?"),
        ({"count": 1.0}, "count is 1.0; it must be a whole number"),
        ({"count": True}, "count is True"),
        ({"share": "x"}, "share is 'x'; it must be a number"),
        ({"loud": 1}, "loud is 1; it must be True or False"),
        ({"seed": None}, "seed is None; it must be a whole number or a torch.Generator"),
        ({"rule_options": []}, "a dictionary of options"),
        ({"drafter": 3.5}, "drafter is 3.5; it must be a drafter's name, a drafter or None"),
        ({"rule": None}, "rule is None; it must be a rule's name or a rule"),
        ({"rule": len}, "a rule's name or a rule"),
        ({"drafter_options": {"length": 3}}, "drafter_options go with a drafter's name"),
        ({"rule": Exact(), "rule_options": {"x": 1}}, "rule_options go with a rule's name"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption) as caught:
        options_of(Options, given)
    assert said in str(caught.value)


def test_a_generator_gives_another_seed_each_time() -> None:
    one, other = (torch.Generator().manual_seed(3) for _ in range(2))
    assert seed_of(7) == 7
    first, second = seed_of(one), seed_of(one)
    assert first != second and (seed_of(other), seed_of(other)) == (first, second)


def test_options_of_methods_are_recorded_as_plain_values() -> None:
    found = recorded({"length": 3, "shape": (1, 2)}, {"epsilon": 0.5, "x": None})
    assert found == {"drafter.length": 3, "drafter.shape": "(1, 2)", "rule.epsilon": 0.5, "rule.x": None}


def test_one_string_or_several() -> None:
    assert as_list("a", "prompt") == ["a"] and as_list(("a", "b"), "prompt") == ["a", "b"]
    wrong = {"there are no prompts": [], "the prompt is a NoneType": None, "prompt 1 is a int": ["a", 3], "bytes": b"a"}
    for said, given in wrong.items():
        with pytest.raises(InvalidOption, match=said):
            as_list(given, "prompt")


def test_options_of_methods_are_type_checked() -> None:
    assert make_rule("lantern", neighbours=torch.zeros(4, 2, dtype=torch.long), k=np.int64(1), delta=0).lossless
    for name, given, said in (
        (
            "lantern",
            {"delta": "x", "neighbours": torch.zeros(4, 2)},
            "delta of the rule 'lantern' is 'x'; it must be a number",
        ),
        ("lantern", {"neighbours": 3}, "a tensor or None"),
        ("typical", {"epsilon": True}, "it must be a number"),
    ):
        with pytest.raises(InvalidOption) as caught:
            make_rule(name, **given)
        assert said in str(caught.value)
    with pytest.raises(InvalidOption, match=r"length of the drafter 'prompt-lookup' is 1.5; it must be a whole number"):
        make_drafter("prompt-lookup", length=1.5)
    with pytest.raises(InvalidOption, match="whole numbers or None"):
        make_drafter("top-k-tree", model=None or object(), tree="x")


def test_every_option_of_a_method_has_a_type() -> None:
    for method in (*DRAFTERS.values(), *RULES.values()):
        assert method.options.keys() <= method.option_types.keys(), method.name


def test_samples_of_a_prompt_are_a_whole_number_or_one() -> None:
    assert (copies_of(None, "n"), copies_of(3, "n")) == (1, 3)
    for wrong in (0, 1.0, True, "2"):
        with pytest.raises(InvalidOption, match=r"n is .*; it must be a whole number, 1 or more"):
            copies_of(wrong, "n")  # type: ignore[arg-type]
