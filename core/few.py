"""A few rows on the host: where a law is some thousand numbers and a batch has a row or two, calling as many operations
as are made for hundreds of rows takes longer than what they do. Laws are looked at in place, by numpy.

The same walks are written for whole batches beside each caller; tests hold the two to one another. Knows laws and dice,
nothing of drafts or rules.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.laws import Law

_FEW = 8  # rows


def fits(dice: Dice, *laws: Law) -> bool:
    """Are these laws to be looked at one by one?"""
    return dice.rolls and all(
        law.tokens is None and law.probs.device.type == "cpu" and len(law.probs) <= _FEW for law in laws
    )


def at(law: Law, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Probabilities that rows [B, K] of a law [B, R, V] give to tokens [B, K]; ids outside the vocabulary have none."""
    inside = (tokens >= 0) & (tokens < law.vocabulary)
    found: np.ndarray = law.probs.numpy()[np.arange(len(rows))[:, None], rows, tokens.clip(0, law.vocabulary - 1)]
    return found * inside


def strict(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """min(1, p/q), and 0 where p is 0."""
    chance: np.ndarray = np.minimum(p / np.maximum(q, np.finfo(q.dtype).tiny), 1)
    return chance


def drawn(law: np.ndarray, uniform: float, *, without: np.ndarray | None = None) -> int:
    """One token, by inverting the cumulative sum of a law [V], or of what another leaves of it: (p - q)+."""
    left = law if without is None else np.maximum(law - without, 0)
    total = left.cumsum(dtype=np.float64)
    if without is not None and total[-1] <= 0:  # by rounding alone
        total = law.cumsum(dtype=np.float64)
    return min(int(total.searchsorted(uniform * total[-1], side="right")), len(law) - 1)


def table(tensor: Tensor) -> np.ndarray:
    """The same numbers, in place."""
    found: np.ndarray = tensor.detach().numpy()
    return found
