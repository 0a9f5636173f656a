"""Benchmark settings: combinations of drafters, rules and option values, and their names."""

from __future__ import annotations

import pytest

from outrider.core.bench.settings import combine
from outrider.core.errors import InvalidOption


def test_listed_values_make_one_setting_each() -> None:
    options = {"lantern.delta": [0.1, 0.2], "k": [5, 9], "annealed.weight": 3.0}
    swept = combine(["jacobi"], ["lantern", "annealed", "exact"], {"window": [4]}, options)
    assert [(setting.rule, setting.rule_options) for setting in swept] == [
        ("lantern", {"delta": 0.1, "k": 5}),
        ("lantern", {"delta": 0.1, "k": 9}),
        ("lantern", {"delta": 0.2, "k": 5}),
        ("lantern", {"delta": 0.2, "k": 9}),
        ("annealed", {"weight": 3.0}),
        ("exact", {}),
    ]
    assert all(setting.drafter_options == {"window": 4} for setting in swept)
    with pytest.raises(InvalidOption, match=r"'lantern\.delta' belongs to none of exact"):
        combine(["jacobi"], ["exact"], {}, {"lantern.delta": [0.1]})
    with pytest.raises(InvalidOption, match="'colour' belongs to none"):
        combine(["jacobi"], ["exact"], {"colour": ["red"]}, {})


def test_settings_are_every_drafter_under_every_rule() -> None:
    swept = combine(["jacobi", "prompt-lookup"], ["exact", "tolerance"], {"length": 4}, {"tolerance.tau": [1, 3]})
    assert [setting.name for setting in swept if setting.drafter == "prompt-lookup"] == [
        "prompt-lookup (length=4)",
        "prompt-lookup tolerance (length=4, tau=1)",
        "prompt-lookup tolerance (length=4, tau=3)",
    ]
    with pytest.raises(InvalidOption, match=r"'tolerance\.tau' belongs to none"):
        combine(["jacobi"], ["exact"], {}, {"tolerance.tau": [1, 3]})
