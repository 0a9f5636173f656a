"""A few rows on the host: where a distribution is some thousand numbers and a batch has a row or two, calling as many
operations as are made for hundreds of rows takes longer than what they do. Distributions are looked at in place, by
numpy or by code of ours (engine/walks.h).

The same walks are written for whole batches beside each caller; tests hold the two to one another. Knows distributions,
random generator and drafts, nothing of rules."""

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


def fits(rng: CounterRNG, *distributions: Distribution) -> bool:
    """Are these distributions to be looked at one by one?"""
    return rng.rolls and all(
        distribution.tokens is None and distribution.probs.device.type == "cpu" and len(distribution.probs) <= _FEW
        for distribution in distributions
    )


def walks(rng: CounterRNG, *distributions: Distribution) -> bool:
    """And can that be done by code of ours?"""
    return (
        fits(rng, *distributions)
        and all(distribution.probs.dtype == torch.float32 for distribution in distributions)
        and native.library() is not None
    )


def at(distribution: Distribution, rows: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Probabilities that rows [B, K] of a distribution [B, R, V] give to tokens [B, K]; ids outside the vocabulary have
    none."""
    inside = (tokens >= 0) & (tokens < distribution.vocabulary)
    found: np.ndarray = distribution.probs.numpy()[
        np.arange(len(rows))[:, None], rows, tokens.clip(0, distribution.vocabulary - 1)
    ]
    return found * inside


def drawn(distribution: np.ndarray, uniform: float, *, without: np.ndarray | None = None) -> int:
    """One token, by inverting the cumulative sum of a distribution [V], or of what another leaves of it: (p - q)+."""
    left = distribution if without is None else np.maximum(distribution - without, 0)
    total = left.cumsum(dtype=np.float64)
    if without is not None and total[-1] <= 0:  # by rounding alone
        total = distribution.cumsum(dtype=np.float64)
    return min(int(total.searchsorted(uniform * total[-1], side="right")), len(distribution) - 1)


def table(tensor: Tensor) -> np.ndarray:
    """The same numbers, in place."""
    found: np.ndarray = tensor.detach().numpy()
    return found


class _Walk(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("distributions", "guesses", "tokens", "source", "able", "bent", "ends")),
        *((name, c_void_p) for name in ("accept", "next", "open", "refused", "accepted", "token", "tried", "relaxed")),
        *((name, c_void_p) for name in ("chance", "p", "q", "total_variation")),
        *((name, c_int64) for name in ("rows", "size", "words", "origins", "numbers", "ending", "first", "last")),
    )


def walk(
    draft: Draft,
    distributions: Distribution,
    rng: CounterRNG,
    bend: Callable[[Tensor, Tensor, slice], Tensor] | None,
    ends: Tensor,
    stretch: int,
) -> Verdict:
    """Down chains by distributions [B, N + 1, V]: strictly, or with the chances that `bend` makes of p and q [B, L, V]
    for a `stretch` of levels at a time, `ends` exempted."""
    code = native.library()
    assert code is not None
    rows, size = draft.tokens.shape
    goes_on, refused = torch.ones(rows, dtype=torch.bool), torch.zeros(rows, dtype=torch.bool)
    accepted, token = torch.zeros(2, rows, dtype=torch.long).unbind()
    tried, relaxed = torch.zeros(2, rows, size, dtype=torch.bool).unbind()
    chance, p, q = torch.zeros(3, rows, size).unbind()
    total_variation = torch.zeros(rows, size + 1, dtype=torch.float64)
    drawn = source = None
    if draft.distributions is not None and draft.source is not None:
        drawn, source = draft.distributions.probs.contiguous(), draft.source.contiguous()
    accept, then = rng.table(Purpose.ACCEPT).contiguous(), rng.table(Purpose.NEXT).contiguous()
    given = [
        *(
            distributions.probs.contiguous(),
            drawn,
            draft.tokens.contiguous(),
            source,
            draft.tried.contiguous(),
            None,
            ends,
        ),
        *(accept, then, goes_on, refused, accepted, token, tried, relaxed, chance, p, q, total_variation),
    ]
    origins = 0 if drawn is None else drawn.shape[1]
    told = _Walk(
        *map(native.at, given), rows, size, distributions.vocabulary, origins, accept.shape[1], len(ends), 0, size
    )
    address = ctypes.addressof(told)
    if bend is None:
        code.outrider_walk(address)
    else:
        for first in range(0, size, stretch):
            told.first, told.last = first, min(first + stretch, size)
            levels = slice(first, told.last)
            guess = torch.empty(rows, told.last - first, distributions.vocabulary)
            code.outrider_spread(address, guess.data_ptr())
            bent = bend(distributions.probs[:, levels], guess, levels).to(guess.dtype).contiguous()
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
        total_variation=None if bend is None else total_variation,
        relaxed=None if bend is None else relaxed,
    )


def coupled(draft: Draft, distributions: Distribution, after: Tensor, known: Tensor, rng: CounterRNG) -> Tensor:
    """A window's guesses [B, W] by their new distributions: the old draw at `after` [B, W] stays as often as any
    coupling allows."""
    code = native.library()
    assert code is not None and draft.distributions is not None
    found = torch.empty_like(after, memory_format=torch.contiguous_format)
    before, retain, redraw = draft.distributions.probs, rng.table(Purpose.RETAIN), rng.table(Purpose.REDRAW)
    tables = distributions.probs, before, draft.tokens, draft.fixed, after, known, retain, redraw
    given = [one.contiguous() for one in tables]
    sizes = *after.shape, draft.size, before.shape[1], distributions.vocabulary, retain.shape[1]
    code.outrider_couple(*(one.data_ptr() for one in given), found.data_ptr(), *sizes)
    return found
