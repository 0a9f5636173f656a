"""The notebooks: saved outputs are complete and clean, and every notebook and solution runs."""

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
MAX_BYTES = 1_500_000  # of one notebook
PORTABLE = [path for path in PATHS if "find_spec" in path.read_text(encoding="utf-8")]  # install what they need
_CODE = re.compile(r"```.*?```|`[^`\n]*`|\$[^$]*\$|\[[^]]*\]\([^)]*\)|<[^>]+>", re.DOTALL)
_FIGURE = re.compile(r"\d+[.,]\d|\d\s?(?:ms|seconds|MB|GB|x\b|times faster|tokens/s)")  # looks like a measurement
_FORBIDDEN = re.compile(r"/(?:root|home|tmp|work|Users|usr)/|[A-Z]:\\\\|\bWarning\b|it/s\]|Traceback")

pytestmark = pytest.mark.slow


def tool(name: str) -> ModuleType:
    """Import a script from the notebooks' folder."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def read(path: Path) -> Any:
    return pytest.importorskip("nbformat").read(path, as_version=4)


def prose(notebook: Any) -> str:
    """Return the Markdown text without code and links."""
    return "\n".join(_CODE.sub(" ", cell.source) for cell in notebook.cells if cell.cell_type == "markdown")


def all_outputs(notebook: Any) -> list[Any]:
    return [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]


def test_notebooks_are_numbered_in_reading_order() -> None:
    assert [path.name[:2] for path in PATHS] == [f"{number:02}" for number in range(1, len(PATHS) + 1)]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_saved_outputs_are_complete_and_clean(path: Path) -> None:
    notebook = read(path)
    pytest.importorskip("nbformat").validate(notebook)
    assert path.stat().st_size < MAX_BYTES
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))  # every cell has run, in order
    outputs = all_outputs(notebook)
    assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in outputs)
    assert "widgets" not in notebook.metadata
    pictures = [output for output in outputs if {"image/svg+xml", "image/png"} & set(output.get("data", {}))]
    assert len(pictures) >= 2
    assert all("image/png" in output.data for output in pictures)  # JupyterLab shows no SVG in an untrusted notebook
    for output in outputs:
        text = output.get("text") or "".join(str(part) for part in output.data.values())
        assert _FORBIDDEN.search(text) is None, text[:300]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_each_states_its_needs_and_has_exercises(path: Path) -> None:
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


@pytest.mark.parametrize("path", PORTABLE, ids=lambda path: path.stem)
def test_each_opens_in_colab_and_ends_with_a_model_of_one_s_own(path: Path) -> None:
    notebook = read(path)
    assert "[![Open in Colab]" in notebook.cells[0].source
    assert "%pip install" in notebook.cells[1].source and notebook.cells[1].cell_type == "code"
    own, code, following = notebook.cells[-3:]
    assert own.source.startswith("## On your own model") and "MODEL = " in code.source
    assert following.source.count(".ipynb)") >= 1
    whole = "\n".join(cell.source for cell in notebook.cells)
    assert "from teaching" not in whole and "torch.cuda.is_available() else" not in whole
    assert "$" in prose(notebook) or re.search(r"\$[^$]+\$", whole)


def test_links_and_set_up_cells_are_pointed_at_a_repository(tmp_path: Path) -> None:
    tool("save")
    colab, copy = tool("colab"), tmp_path / PORTABLE[0].name
    copy.write_bytes(PORTABLE[0].read_bytes())
    colab.point(copy, "someone/outrider")
    first, setup = read(copy).cells[:2]
    assert f"github/someone/outrider/blob/main/notebooks/{copy.name})" in first.source
    assert 'SOURCE = "https://github.com/someone/outrider"' in setup.source
    colab.point(copy)
    assert [cell.source for cell in read(copy).cells[:2]] == [cell.source for cell in read(PORTABLE[0]).cells[:2]]


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_the_text_contains_no_typed_measurements(path: Path) -> None:
    assert _FIGURE.findall(prose(read(path))) == []


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_cells_are_short(path: Path) -> None:
    """The limit leaves room for a class; other cells should be shorter."""
    notebook = read(path)
    assert max(len(cell.source.splitlines()) for cell in notebook.cells if cell.cell_type == "code") <= 50
    kinds = [cell.cell_type for cell in notebook.cells]
    assert kinds.count("markdown") >= 0.6 * kinds.count("code")


def test_static_pages_are_complete_and_self_contained(tmp_path: Path) -> None:
    pytest.importorskip("nbconvert")
    tool("save")
    pages = tool("book").build(tmp_path)
    assert [page.stem for page in pages] == ["index", *(path.stem for path in PATHS)]
    for page in pages:
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"<(?:script|link|iframe)\b|src=\"http", text)
        assert "$$" not in re.sub(r"<pre.*?</pre>", "", text, flags=re.DOTALL)
        for name in re.findall(r'href="([^"#:]+)"', text):
            assert (tmp_path / name).is_file(), name
    for path, page in zip(PATHS, pages[1:], strict=True):
        drawings = sum("image/svg+xml" in output.get("data", {}) for output in all_outputs(read(path)))
        assert page.read_text(encoding="utf-8").count("<svg") >= drawings


def test_a_slider_stores_its_initial_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ipywidgets")
    from outrider.app import lessons

    displayed: list[dict[str, Any]] = []
    monkeypatch.setattr(lessons.display, "display", lambda data, raw: displayed.append(data))
    lessons.explore(lambda size: lessons.bars("sizes", {"size": size}), size=[1, 2, 3])
    assert "size: 2 " in displayed[0]["image/svg+xml"]  # the initial value is the middle one
    assert "application/vnd.jupyter.widget-view+json" in displayed[0]


@pytest.mark.filterwarnings("ignore")  # from Jupyter's own modules
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_notebook_and_solutions_run(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in the small mode, the solutions last."""
    monkeypatch.setenv("OUTRIDER_SMALL", "1")
    pytest.importorskip("nbclient")
    notebook = tool("save").run(path, solved=True)
    assert all_outputs(notebook)
