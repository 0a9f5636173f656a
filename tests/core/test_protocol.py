"""Capabilities are declared: by the rows of the method table, by Protocols, and never probed by name."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider.core import protocol
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, RULES, Method
from outrider.core.protocol import Capability, Rule, capabilities
from outrider.core.testing.conformance import trial_drafter
from outrider.core.training import draft_head

ROOT = Path(__file__).parents[2]
CONFIG = Config(vocabulary=3, hidden_size=8, layers=2, heads=2, kv_heads=1, head_dim=4, intermediate_size=12)
DECLARED = (Path(protocol.__file__), Path(draft_head.__file__))


@pytest.mark.parametrize("method", DRAFTERS.values(), ids=str)
def test_a_row_declares_what_its_drafter_can_do(method: Method) -> None:
    required = {name: value for name, value in method.test_options[0].items() if name in method.needs}
    drafter = trial_drafter(method, required, lambda: Decoder.random(CONFIG, 1))
    assert isinstance(drafter, protocol.Drafter)
    assert set(method.capabilities) == capabilities(drafter)


def test_every_capability_is_some_drafters() -> None:
    assert set(Capability) == {each for method in DRAFTERS.values() for each in method.capabilities}


@pytest.mark.parametrize("method", RULES.values(), ids=str)
def test_rules_implement_the_protocol(method: Method) -> None:
    assert isinstance(method.make(), Rule) and not method.capabilities


@pytest.mark.parametrize("method", [*DRAFTERS.values(), *RULES.values()], ids=str)
def test_needs_are_arguments_without_a_default_elsewhere(method: Method) -> None:
    assert set(method.needs).isdisjoint(method.options)
    assert set(method.needs) <= set(method.option_types)


def members() -> set[str]:
    """Every name that a Protocol declares."""
    names = set()
    for file in DECLARED:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and "Protocol" in map(ast.unparse, node.bases):
                names |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                names |= {
                    part.target.id
                    for part in node.body
                    if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
                }
    return {name for name in names if not name.startswith("_")}


def probes() -> Iterator[tuple[str, str, str]]:
    """Each getattr and hasattr: where, of what, and the name it looks for, where that is written out."""
    for folder in ("core", "modalities", "app"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr"):
                    name = node.args[1].value if isinstance(node.args[1], ast.Constant) else ""
                    yield f"{file.relative_to(ROOT)}:{node.lineno}", ast.unparse(node.args[0]), str(name)


def test_no_member_of_the_protocol_is_probed() -> None:
    assert {"propose", "observe_committed", "draw_chain", "future_states", "cache_passes"} <= members()
    assert [probe for probe in probes() if probe[2] in members()] == []


def test_no_drafter_rule_or_target_is_probed() -> None:
    kinds = {"drafter", "rule", "target", "view", "draft_head", "runner", "policy"}
    assert [probe for probe in probes() if probe[1].split(".")[-1].lstrip("_") in kinds] == []
