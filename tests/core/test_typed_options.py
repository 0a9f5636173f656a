"""Typed options: one for every drafter, with the signature of what makes it, checked by mypy and by the call."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from outrider.core.methods import DRAFTERS, Input, Method, make_drafter, typed_options
from outrider.core.methods.typed_options import Eagle3Options, PromptLookupOptions

SINGLE = [method for method in DRAFTERS.values() if Input.DRAFTERS not in method.inputs.values() and not method.presets]


@pytest.mark.parametrize("method", SINGLE, ids=str)
def test_every_drafter_has_typed_options(method: Method) -> None:
    name = "".join(word.capitalize() for word in method.name.split("-"))
    options = getattr(typed_options, f"{name}Options")
    make = method.make.func if isinstance(method.make, partial) else method.make
    assert options.__wrapped__ is make
    required = {name for name in method.needs if name not in method.options}
    assert set(inspect.signature(options).parameters) | required >= set(method.options)


def test_they_are_dictionaries_that_name_what_is_wrong() -> None:
    assert Eagle3Options(nodes=15, draft_kind="tree") == {"nodes": 15, "draft_kind": "tree"}
    assert make_drafter("prompt-lookup", **PromptLookupOptions(length=3)) is not None
    with pytest.raises(TypeError, match="node"):
        Eagle3Options(node=15)  # type: ignore[call-arg]


@pytest.mark.slow
def test_mypy_checks_them(tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    file.write_text(
        "from outrider.core.methods.typed_options import Eagle3Options\n"
        "Eagle3Options(nodes=15)\nEagle3Options(node=15)\nEagle3Options(nodes='15')\n"
    )
    root = Path(__file__).resolve().parents[2]
    (tmp_path / "outrider").mkdir()
    (tmp_path / "outrider" / "core").symlink_to(root / "core")
    command = [sys.executable, "-m", "mypy", "--config-file", str(root / "pyproject.toml"), str(file)]
    environment = {**os.environ, "MYPYPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert "wrong.py:3: error" in done.stdout and "wrong.py:4: error" in done.stdout and "py:2:" not in done.stdout


def test_the_namespace_has_the_version() -> None:
    import outrider.core

    assert outrider.__version__ == outrider.core.__version__  # type: ignore[attr-defined]
