"""A few rows on the host: where a law is some thousand numbers and a batch has a row or two, calling as many operations
as are made for hundreds of rows takes longer than what they do. Laws are looked at in place, by numpy or by code of
ours (engine/walks.h).

The same walks are written for whole batches beside each caller; tests hold the two to one another. Knows laws and dice,
nothing of drafts or rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.core.dice import Dice, Purpose
from outrider.core.engine import native
from outrider.core.laws import Law

_FEW = 8  # rows


def fits(dice: Dice, *laws: Law) -> bool:
    """Are these laws to be looked at one by one?"""
    return dice.rolls and all(
        law.tokens is None and law.probs.device.type == "cpu" and len(law.probs) <= _FEW for law in laws
    )


def walks(dice: Dice, *laws: Law) -> bool:
    """And can that be done by code of ours?"""
    return fits(dice, *laws) and all(law.probs.dtype == torch.float32 for law in laws) and native.library() is not None


def at(law: Law, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Probabilities that rows [B, K] of a law [B, R, V] give to tokens [B, K]; ids outside the vocabulary have none."""
    inside = (tokens >= 0) & (tokens < law.vocabulary)
    found: np.ndarray = law.probs.numpy()[np.arange(len(rows))[:, None], rows, tokens.clip(0, law.vocabulary - 1)]
    return found * inside


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


class _Walk(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("laws", "guesses", "tokens", "source", "able", "bent", "ends")),
        *((name, c_void_p) for name in ("accept", "next", "open", "refused", "accepted", "token", "tried", "relaxed")),
        *((name, c_void_p) for name in ("chance", "p", "q", "price")),
        *((name, c_int64) for name in ("rows", "size", "words", "origins", "numbers", "ending", "first", "last")),
    )


@dataclass(frozen=True)
class Walked:
    """How far rows came down their chains, and what each level took."""

    accepted: Tensor  # [B]
    token: Tensor  # [B] that follows
    refused: Tensor  # [B] was the last one that was tried?
    tried: Tensor  # [B, N]
    relaxed: Tensor  # [B, N] accepted, and a strict rule would not have
    chance: Tensor  # [B, N]
    p: Tensor
    q: Tensor
    price: Tensor  # [B, N + 1]


def walk(
    laws: Law,
    tokens: Tensor,
    able: Tensor,
    guesses: Law | None,
    source: Tensor | None,
    dice: Dice,
    bend: Callable[[Tensor, Tensor, slice], Tensor] | None = None,
    ends: Tensor | None = None,
    stretch: int = 0,
) -> Walked:
    """Down chains [B, N] by laws [B, N + 1, V], guesses of the law that `source` names (-1: of none), those that are
    `able` to be tried: strictly, or with the chances that `bend` makes of p and q [B, L, V] for a `stretch` of levels
    at a time, `ends` exempted."""
    code = native.library()
    assert code is not None
    rows, size = tokens.shape
    goes_on, refused = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    accepted, token = torch.zeros(2, rows, dtype=torch.long).unbind()
    tried, relaxed = torch.zeros(2, rows, size, dtype=torch.bool).unbind()
    chance, p, q = torch.zeros(3, rows, size).unbind()
    price = torch.zeros(rows, size + 1, dtype=torch.float64)
    if guesses is None or source is None:
        guesses = source = None
    drawn = None if guesses is None else guesses.probs.contiguous()
    accept, then = dice.table(Purpose.ACCEPT), dice.table(Purpose.NEXT)
    given = [
        *(laws.probs.contiguous(), drawn, tokens.contiguous(), None if source is None else source.contiguous()),
        *(able.contiguous(), None, ends, accept.contiguous(), then.contiguous(), goes_on, refused),
        *(accepted, token, tried, relaxed, chance, p, q, price),
    ]
    sizes = 0 if drawn is None else drawn.shape[1], accept.shape[1], 0 if ends is None else len(ends)
    told = _Walk(*map(native.at, given), rows, size, laws.vocabulary, *sizes, 0, size)
    address = ctypes.addressof(told)
    if bend is None:
        code.outrider_walk(address)
    else:
        for first in range(0, size, stretch):
            told.first, told.last = first, min(first + stretch, size)
            guess = torch.empty(rows, told.last - first, laws.vocabulary)
            code.outrider_spread(address, guess.data_ptr())
            levels = slice(first, told.last)
            bent = bend(laws.probs[:, levels], guess, levels).contiguous()
            told.bent = bent.data_ptr()
            code.outrider_walk(address)
            if not goes_on.any():
                break
    return Walked(accepted, token, refused, tried, relaxed, chance, p, q, price)


def coupled(laws: Law, before: Law, tokens: Tensor, fixed: Tensor, after: Tensor, known: Tensor, dice: Dice) -> Tensor:
    """A window's guesses [B, W] by their new laws: what was drawn by the law `before` at `after` [B, W] stays as often
    as any coupling allows."""
    code = native.library()
    assert code is not None
    found = torch.empty_like(after, memory_format=torch.contiguous_format)
    retain, redraw = dice.table(Purpose.RETAIN), dice.table(Purpose.REDRAW)
    tables = laws.probs, before.probs, tokens, fixed, after, known, retain, redraw
    given = [one.contiguous() for one in tables]
    sizes = *after.shape, tokens.shape[1], before.probs.shape[1], laws.vocabulary, retain.shape[1]
    code.outrider_couple(*(one.data_ptr() for one in given), found.data_ptr(), *sizes)
    return found
