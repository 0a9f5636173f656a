"""What every test runs under: offline, one thread a worker, the same examples every time."""

from __future__ import annotations

import os
import shutil

os.environ["HF_HUB_OFFLINE"] = "1"
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: workers share the cores

import hypothesis
import pytest

hypothesis.settings.register_profile("suite", deadline=None, derandomize=True)
hypothesis.settings.load_profile("suite")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what this machine can't run; torch is asked only if a test needs to know."""
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
