"""Modules that import each other in a circle. The layers of packages are contracts of `make layers`."""

from graphlib import CycleError, TopologicalSorter

import grimp

PACKAGES = ("core", "text", "image", "speech", "app")
PENDING = {("outrider.text.companions", "outrider.text.loading"), ("outrider.text.companions", "outrider.text.model")}
PENDING |= {(f"outrider.core.drafters.combined.{name}", "outrider.core.methods") for name in ("adaptive", "ensemble")}


def test_no_modules_import_each_other_in_a_circle() -> None:
    names = [f"outrider.{name}" for name in PACKAGES]
    graph = grimp.build_graph(*names, cache_dir=None, exclude_type_checking_imports=True)
    edges = {
        module: {name for name in graph.find_modules_directly_imported_by(module) if (module, name) not in PENDING}
        for module in graph.modules
    }
    assert len(edges) > 300, "the graph is of the whole package"
    try:
        TopologicalSorter(edges).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(reversed(error.args[1]))) from None
