"""A few rows on the host: where a law is some thousand numbers and a batch has a row or two, calling as many operations
as are made for hundreds of rows takes longer than what they do. Laws are looked at in place, by numpy or by code of
ours (engine/walks.h).

The same walks are written for whole batches beside each caller; tests hold the two to one another. Knows laws, dice
and drafts, nothing of rules.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.kernels import native
from outrider.core.rng import CounterRNG, Purpose

_FEW = 8  # rows


def fits(dice: CounterRNG, *laws: Distribution) -> bool:
    """Are these laws to be looked at one by one?"""
    return dice.rolls and all(
        law.tokens is None and law.probs.device.type == "cpu" and len(law.probs) <= _FEW for law in laws
    )


def walks(dice: CounterRNG, *laws: Distribution) -> bool:
    """And can that be done by code of ours?"""
    return fits(dice, *laws) and all(law.probs.dtype == torch.float32 for law in laws) and native.library() is not None


def at(law: Distribution, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
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


def walk(
    draft: Draft,
    laws: Distribution,
    dice: CounterRNG,
    bend: Callable[[Tensor, Tensor, slice], Tensor] | None,
    ends: Tensor,
    stretch: int,
) -> Verdict:
    """Down chains by laws [B, N + 1, V]: strictly, or with the chances that `bend` makes of p and q [B, L, V] for a
    `stretch` of levels at a time, `ends` exempted."""
    code = native.library()
    assert code is not None
    rows, size = draft.tokens.shape
    goes_on, refused = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    accepted, token = torch.zeros(2, rows, dtype=torch.long).unbind()
    tried, relaxed = torch.zeros(2, rows, size, dtype=torch.bool).unbind()
    chance, p, q = torch.zeros(3, rows, size).unbind()
    price = torch.zeros(rows, size + 1, dtype=torch.float64)
    drawn = source = None
    if draft.laws is not None and draft.source is not None:
        drawn, source = draft.laws.probs.contiguous(), draft.source.contiguous()
    accept, then = dice.table(Purpose.ACCEPT).contiguous(), dice.table(Purpose.NEXT).contiguous()
    given = [
        *(laws.probs.contiguous(), drawn, draft.tokens.contiguous(), source, draft.tried.contiguous(), None, ends),
        *(accept, then, goes_on, refused, accepted, token, tried, relaxed, chance, p, q, price),
    ]
    origins = 0 if drawn is None else drawn.shape[1]
    told = _Walk(*map(native.at, given), rows, size, laws.vocabulary, origins, accept.shape[1], len(ends), 0, size)
    address = ctypes.addressof(told)
    if bend is None:
        code.outrider_walk(address)
    else:
        for first in range(0, size, stretch):
            told.first, told.last = first, min(first + stretch, size)
            levels = slice(first, told.last)
            guess = torch.empty(rows, told.last - first, laws.vocabulary)
            code.outrider_spread(address, guess.data_ptr())
            bent = bend(laws.probs[:, levels], guess, levels).to(guess.dtype).contiguous()
            told.bent = bent.data_ptr()
            code.outrider_walk(address)
            if not goes_on.any():
                break
    nodes = torch.arange(size)
    return Verdict(
        path=torch.where(nodes < accepted[:, None], nodes, -1),
        accepted=accepted,
        token=token,
        resampled=refused,
        tried=tried,
        chance=chance,
        p=p,
        q=q,
        price=None if bend is None else price,
        relaxed=None if bend is None else relaxed,
    )


def coupled(draft: Draft, laws: Distribution, after: Tensor, known: Tensor, dice: CounterRNG) -> Tensor:
    """A window's guesses [B, W] by their new laws: the old draw at `after` [B, W] stays as often as any coupling
    allows."""
    code = native.library()
    assert code is not None and draft.laws is not None
    found = torch.empty_like(after, memory_format=torch.contiguous_format)
    before, retain, redraw = draft.laws.probs, dice.table(Purpose.RETAIN), dice.table(Purpose.REDRAW)
    tables = laws.probs, before, draft.tokens, draft.fixed, after, known, retain, redraw
    given = [one.contiguous() for one in tables]
    sizes = *after.shape, draft.size, before.shape[1], laws.vocabulary, retain.shape[1]
    code.outrider_couple(*(one.data_ptr() for one in given), found.data_ptr(), *sizes)
    return found
