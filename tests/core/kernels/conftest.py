"""The compiled kernels as on each kind of processor."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outrider.core.kernels import native


@pytest.fixture(params=["tiles", "vectors", "avx2"])
def ways(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the tile unit, as on a processor that has none, and as on one that doesn't multiply 16-bit numbers."""
    if request.param == "avx2":
        monkeypatch.setenv("OUTRIDER_NATIVE", "avx2")
        native.library.cache_clear()
    code = native.library()
    assert code is not None
    if code.outrider_ready(request.param == "tiles") != 1 + (request.param == "tiles"):
        pytest.skip("this processor has no tile unit")
    yield request.param
    code.outrider_ready(1)
    native.library.cache_clear()
