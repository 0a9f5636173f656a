"""Fixtures: the tiny model, built once per session, and the real default model."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from outrider import text
from outrider.text import TextModel

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parent / "tiny.py")))


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Use one thread: models this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """The module that builds tiny models."""
    return TINY


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the tiny model."""
    return TINY.write(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def lm(folder: Path) -> TextModel:
    return text.load(folder, dtype="float32")


@pytest.fixture(scope="session")
def smollm2() -> TextModel:
    """The real default model, downloaded to the user's cache on first use."""
    return text.load("smollm2-135m", dtype="float32")
