"""Settings of all tests: offline, one thread per worker, deterministic examples."""

from __future__ import annotations

import gc
import os
import shutil
from collections import defaultdict
from collections.abc import Callable
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: workers share the cores
if not os.path.exists("/dev/nvidiactl"):
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on the CPU

import hypothesis
import pytest

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run; imports torch only if a test needs a device."""
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    browser = [item for item in items if item.get_closest_marker("browser")]
    if gpu:
        import torch

        if not torch.cuda.is_available():
            for item in gpu:
                item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if browser and not any(shutil.which(name) for name in BROWSERS):
        for item in browser:
            item.add_marker(pytest.mark.skip(reason="no browser"))


def pytest_collection_finish() -> None:
    """Exempt what stays until the end from garbage collection, which otherwise takes half of the time of tests that
    make many small objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


# ---- the printed table: what the suite measured, collected from every worker


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """measured("enumeration", rule="token", value=1e-16) adds a figure to the table printed at the end."""

    def note(kind: str, *, name: str, value: float) -> None:
        record_property("measured", (kind, name, float(value)))

    return note


def pytest_terminal_summary(terminalreporter: Any) -> None:
    result: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for reports in terminalreporter.stats.values():
        for report in reports:
            for key, entry in getattr(report, "user_properties", []):
                if key == "measured" and report.when == "call":
                    kind, name, value = entry
                    result[kind][name].append(value)
    for kind, rows in sorted(result.items()):
        terminalreporter.section(kind)
        for name, values in sorted(rows.items()):
            terminalreporter.write_line(
                f"{name:<44} {len(values):>5} cases   least {min(values):>10.3g}   most {max(values):>10.3g}"
            )
