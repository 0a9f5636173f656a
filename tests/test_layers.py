"""No circular imports between modules. The layers of packages are contracts of `make layers`."""

from graphlib import CycleError, TopologicalSorter

import grimp

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
