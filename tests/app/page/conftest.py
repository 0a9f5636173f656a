"""The page with small models, in a process of its own."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

OPENED = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "browser" / "opened.py")))


@pytest.fixture(scope="session")
def page_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page stores uploads."""
    return tmp_path_factory.mktemp("files")


@pytest.fixture(scope="session")
def address(tmp_path_factory: pytest.TempPathFactory, page_files: Path) -> Iterator[str]:
    """The page's address."""
    variables = {"GRADIO_TEMP_DIR": str(page_files)}
    with OPENED.started("small.py", tmp_path_factory.mktemp("page"), variables) as (address, _):
        yield address
