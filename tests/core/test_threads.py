"""Threads that wait for each other give the processor to others soon, which is set before torch is imported."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import importlib, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(os.environ.get("GOMP_SPINCOUNT"))
sys.meta_path.insert(0, Watch())
importlib.import_module(sys.argv[1])
"""


def seen(module: str, **given: str) -> list[str]:
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    command = [sys.executable, "-c", SCRIPT, module]
    done = subprocess.run(command, env=environment | given, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout.split()


@pytest.mark.parametrize("module", ["outrider.text", "outrider.image", "outrider.speech", "outrider.core.decode"])
def test_spinning_is_bounded_before_torch_is_imported(module: str) -> None:
    assert seen(module) == ["20000"]


def test_the_user_s_own_settings_stand() -> None:
    assert seen("outrider.core.decode", GOMP_SPINCOUNT="7") == ["7"]
    assert seen("outrider.core.decode", OMP_WAIT_POLICY="active") == ["None"]
