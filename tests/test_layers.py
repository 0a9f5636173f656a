"""No circular imports between modules, no long files and no crowded folders. The layers of packages are contracts of
`make layers`."""

import ast
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[1]
FILES = sorted(
    path for name in ("core", "modalities", "app", "tests", "examples") for path in (ROOT / name).rglob("*.py")
)
PACKAGES = ("core", "text", "image", "speech", "app")


def test_no_circular_imports() -> None:
    names = [f"outrider.{name}" for name in PACKAGES]
    graph = grimp.build_graph(*names, cache_dir=None, exclude_type_checking_imports=True)
    edges = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(edges) > 300, "the graph is of the whole package"
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None


def test_files_of_more_than_400_lines_say_why() -> None:
    long = [path for path in FILES if path.read_text(encoding="utf-8").count("\n") > 400]
    reasons = {path: ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "" for path in long}
    assert [
        str(path) for path, reason in reasons.items() if "over 400 lines" not in " ".join(reason.lower().split())
    ] == []


def test_no_folder_has_more_than_20_files_of_code() -> None:
    folders = Counter(path.parent for path in FILES if path.name != "__init__.py")
    assert {str(folder.relative_to(ROOT)): count for folder, count in folders.items() if count > 20} == {}
