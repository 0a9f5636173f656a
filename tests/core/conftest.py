"""The printed table: what the conformance suite measured, collected from every worker."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """measured("enumeration", rule="token", value=1e-16) puts a figure into the table printed at the end."""

    def note(kind: str, *, name: str, value: float) -> None:
        record_property("measured", (kind, name, float(value)))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, entry in getattr(report, "user_properties", []):
                if key == "measured" and report.when == "call":
                    kind, name, value = entry
                    found[kind][name].append(value)
    for kind, rows in sorted(found.items()):
        terminalreporter.section(kind)
        for name, values in sorted(rows.items()):
            terminalreporter.write_line(
                f"{name:<44} {len(values):>5} cases   least {min(values):>10.3g}   most {max(values):>10.3g}"
            )
