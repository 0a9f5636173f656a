"""The notebooks: what is kept of them is clean and whole, and all run from top to bottom, their solutions too."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
LARGEST = 1_500_000  # bytes of one
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\[[^]]*\]\([^)]*\)|<[^>]+>", re.DOTALL)
_FIGURE = re.compile(r"\d+[.,]\d|\d\s?(?:ms|seconds|MB|GB|x\b|times faster|tokens/s)")  # what looks measured
_OURS = re.compile(r"/(?:root|home|tmp|work|Users|usr)/|[A-Z]:\\\\|\bWarning\b|it/s\]|Traceback")

pytestmark = pytest.mark.slow


def tool(name: str) -> ModuleType:
    """A script of the notebooks' folder."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def read(path: Path) -> Any:
    return pytest.importorskip("nbformat").read(path, as_version=4)


def prose(notebook: Any) -> str:
    """What stands between the cells, without code and links."""
    return "\n".join(_CODE.sub(" ", cell.source) for cell in notebook.cells if cell.cell_type == "markdown")


def shown(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_they_are_numbered_in_reading_order() -> None:
    assert [path.name[:2] for path in PATHS] == [f"{number:02}" for number in range(1, len(PATHS) + 1)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_what_is_kept_is_whole_and_clean(path: Path) -> None:
    notebook = read(path)
    pytest.importorskip("nbformat").validate(notebook)
    assert path.stat().st_size < LARGEST
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # all, in order
    outputs = shown(notebook)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert "widgets" not in notebook.metadata
    pictures = [output for output in outputs if {"image/svg+xml", "image/png"} & set(output.get("data", {}))]
    assert len(pictures) >= 2
    assert all("image/png" in output.data for output in pictures)  # before it is trusted, JupyterLab shows no SVG
    for output in outputs:
        said = output.get("text") or "".join(str(part) for part in output.data.values())
        assert _OURS.search(said) is None, said[:300]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_each_says_what_it_needs_and_asks_something(path: Path) -> None:
    notebook = read(path)
    opening = notebook.cells[0].source
    assert opening.startswith(f"# {int(path.name[:2])}. ")
    assert "*Needs:*" in opening and "*Takes*" in opening
    whole = "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    exercises = whole.partition("## Exercises")[2]
    assert exercises.count("<details><summary>Solution</summary>") >= 2
    assert exercises.count("<details>") == exercises.count("</details>")
    for name in re.findall(r"\]\(([^)]*\.ipynb)\)", whole):
        assert (FOLDER / name).is_file(), name


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_no_figure_is_typed_into_the_prose(path: Path) -> None:
    assert _FIGURE.findall(prose(read(path))) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cells_are_short(path: Path) -> None:
    """One idea a cell: a class may take more room than a measurement."""
    notebook = read(path)
    assert max(len(cell.source.splitlines()) for cell in notebook.cells if cell.cell_type == "code") <= 50
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("markdown") >= 0.6 * kinds.count("code")


def test_the_pages_hold_all_of_it_and_fetch_nothing(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert")
    tool("save")
    pages = tool("book").made(tmp_path)
    assert [page.stem for page in pages] == ["index", *(path.stem for path in PATHS)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|iframe)\b|src=\"http", text)
        for name in re.findall(r'href="([^"#:]+)"', text):
            assert (tmp_path / name).is_file(), name
    for path, page in zip(PATHS, pages[1:], strict=True):
        drawings = sum("image/svg+xml" in output.get("data", {}) for output in shown(read(path)))
        assert page.read_text(encoding="utf-8").count("<svg") >= drawings


def test_a_slider_leaves_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    teaching = tool("teaching")
    held: list[dict[str, Any]] = []
    monkeypatch.setattr(teaching, "display", lambda data, raw: held.append(data))
    teaching.explore(lambda size: teaching.bars("sizes", {"size": size}), size=[1, 2, 3])
    assert "size: 2 " in held[0]["image/svg+xml"]  # the middle one
    assert "application/vnd.jupyter.widget-view+json" in held[0]


@pytest.mark.filterwarnings("ignore")  # of jupyter's own parts, in this process
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the solutions of its exercises, in the small mode."""
    monkeypatch.setenv("OUTRIDER_SMALL", "1")
    pytest.importorskip("nbclient")
    notebook = tool("save").run(path, solved=True)
    assert shown(notebook)
