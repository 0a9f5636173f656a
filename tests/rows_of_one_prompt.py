"""A target of one prompt with as many rows as are asked for, for the enumeration of published models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from outrider.core.distribution import Sampling
from outrider.core.protocol import Target


class Rows:
    """A target with any number of rows of one prompt, rebuilt for each generation."""

    def __init__(self, of: Callable[[int], Target]) -> None:
        self._of, self.inner = of, of(1)
        self.vocabulary, self.device, self.rollback = self.inner.vocabulary, self.inner.device, True
        self.weight_bytes = self.inner.weight_bytes

    def begin(self, prompts: Any, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Any:
        self.inner = self._of(len(prompts))
        return self.inner.begin(prompts, sampling, needs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)
