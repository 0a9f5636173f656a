"""The compiled forms of the exact rules, of the relaxed ones along chains, and of those with a formula down trees
(core/kernels/csrc/walks.cpp, relaxed.h), for drafts on a CPU. Each takes its reference, the torch function that decides
the same: an enumeration works out with it which uniforms to feed (`CounterRNG.feed`). Independent of rules."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from ctypes import c_int64, c_void_p
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.distribution import Distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.kernels import native
from outrider.core.protocol import Scores
from outrider.core.rng import CounterRNG, Purpose

_AT_ONCE = 1 << 17  # probabilities; beyond, only the distributions that a row reaches are computed
_STRETCH = 8  # levels of a chain whose relaxed chances are computed together

Reference = Callable[[CounterRNG], Any]


def _structure(name: str, fields: str) -> type[ctypes.Structure]:
    """A structure of walks.cpp: pointers, and after a bar 64-bit integers. `x[]` is a set of distributions."""
    pointers, numbers = fields.split("|")
    members: list[tuple[str, Any]] = []
    for field in pointers.split():
        members += [(field[:-2], _Distributions)] if field.endswith("[]") else [(field, c_void_p)]
    members += [(field, c_int64) for field in numbers.split()]
    return type(name, (ctypes.Structure,), {"_fields_": members})


FORMULAS = (
    "tolerance",
    "additive-beta",
    "lenience",
    "annealed",
    "trust",
    "verify-every",
    "threshold",
)  # as in relaxed.h


@dataclass(frozen=True)
class Formula:
    """A relaxed rule's chances as the compiled code knows them: one of FORMULAS, and its settings."""

    name: str
    settings: tuple[float, ...]


class _Distributions(ctypes.Structure):
    _fields_ = (("probs", c_void_p), ("tokens", c_void_p), ("count", c_int64), ("width", c_int64))


_Walk = _structure(
    "Walk",
    "target[] drafted[] tokens source parents able chances accept next node open refused accepted token path tried "
    "relaxed chance p q total_variation ends settings "
    "| rows size shapes depth vocabulary numbers replacement levels first last threads formula end_count",
)
_Block = _structure(
    "Block",
    "target[] drafted[] tokens source able accept next refused accepted token chance p q "
    "| rows size vocabulary numbers threads",
)
_Couple = _structure(
    "Couple",
    "fresh[] old[] tokens after fixed known retain redraw result | rows slots nodes vocabulary numbers threads",
)
_Match = _structure("Match", "tokens parents own able path accepted token refused tried hit | rows size shapes depth")


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled walks; None where they can't be had."""
    return compiled()


def compiled(*defines: str) -> ctypes.CDLL | None:
    """The same, compiled with these -D flags."""
    code = native.opened("walks", *defines)
    if code is not None:
        for name in ("walk_float", "walk_double", "block_float", "block_double", "couple_float", "couple_double"):
            getattr(code, name).argtypes, getattr(code, name).restype = [c_void_p], None
        code.match.argtypes, code.match.restype = [c_void_p], None
    return code


def usable(rng: CounterRNG, device: torch.device) -> bool:
    """Can compiled code decide here?"""
    return rng.feeds_native and device.type == "cpu" and library() is not None


class _Call:
    """A structure under construction; holds the tensors whose addresses are in it."""

    def __init__(self, kind: type[ctypes.Structure], **numbers: int) -> None:
        self.structure, self._held = kind(**numbers), dict[str, Tensor]()

    def tensors(self, **tensors: Tensor | None) -> None:
        for name, tensor in tensors.items():
            if tensor is not None:
                self._held[name] = tensor = tensor.contiguous()
                setattr(self.structure, name, tensor.data_ptr())

    def distributions(self, name: str, distribution: Distribution, dtype: torch.dtype) -> None:
        probs = self._held[name] = distribution.probs.to(dtype).contiguous()
        tokens = None
        if distribution.tokens is not None:
            tokens = self._held[f"{name}.tokens"] = distribution.tokens.contiguous()
        setattr(self.structure, name, _Distributions(probs.data_ptr(), native.at(tokens), *probs.shape[1:]))

    def run(self, name: str, dtype: torch.dtype | None = None) -> None:
        code = library()
        assert code is not None
        suffix = "" if dtype is None else "_double" if dtype == torch.float64 else "_float"
        getattr(code, name + suffix)(ctypes.addressof(self.structure))


def rejection(
    draft: Draft,
    scores: Scores,
    rng: CounterRNG,
    reference: Reference,
    chances: Callable[[Distribution, slice], Tensor] | None = None,
    formula: Formula | None = None,
) -> Verdict:
    """Rejection down a chain or tree: strict; along a chain with the chances [B, L, V] of accepting each token at some
    levels, given the target's distributions there; or down a tree with those of a formula."""
    accept, follow = rng.feed(reference, Purpose.ACCEPT, Purpose.NEXT)
    (rows, size), depth = draft.tokens.shape, draft.tree.depth
    whole = size * scores.vocabulary <= _AT_ONCE
    stretch = 1 if not whole else depth + 1 if chances is None else _STRETCH
    node, going = torch.full((rows,), -1), torch.ones(rows, dtype=torch.bool)
    distributions = scores.distributions() if whole else scores.distributions(node[:, None] + 1)
    dtype = distributions.probs.dtype
    accepted, token = torch.zeros(2, rows, dtype=torch.long).unbind()
    path, refused = torch.full((rows, depth), -1), torch.zeros(rows, dtype=torch.bool)
    tried, relaxed = torch.zeros(rows, size, dtype=torch.bool), torch.zeros(rows, depth, dtype=torch.bool)
    chance, p, q = torch.zeros(3, rows, size, dtype=dtype).unbind()
    relaxes = chances is not None or formula is not None
    total_variation = None if not relaxes else torch.zeros(rows, depth + 1, dtype=torch.float64)
    call = _Call(
        _Walk,
        rows=rows,
        size=size,
        shapes=len(draft.tree.parents),
        depth=depth,
        vocabulary=scores.vocabulary,
        numbers=accept.shape[1],
        replacement=draft.replacement,
        threads=torch.get_num_threads(),
    )
    call.tensors(tokens=draft.tokens, parents=draft.tree.parents, able=draft.tried, accept=accept, next=follow)
    call.tensors(node=node, open=going, refused=refused, accepted=accepted, token=token, path=path)
    call.tensors(tried=tried, relaxed=relaxed, chance=chance, p=p, q=q, total_variation=total_variation)
    if formula is not None:
        ends = torch.tensor(scores.sampling.end, dtype=torch.long)
        call.tensors(ends=ends, settings=torch.tensor([*formula.settings, 0.0], dtype=torch.float64))
        call.structure.formula, call.structure.end_count = 1 + FORMULAS.index(formula.name), len(ends)
    if draft.distributions is not None:
        call.distributions("drafted", draft.distributions, dtype)
        call.tensors(source=draft.source)
    for first in range(0, depth + 1, stretch):
        last = min(first + stretch, depth + 1)
        if first and not whole:
            distributions = scores.distributions(node[:, None] + 1)
        if relaxes:
            distributions = distributions.dense()
        if chances is not None:
            levels = slice(first, min(last, depth))
            here = Distribution(distributions.probs[:, levels], None, scores.vocabulary) if whole else distributions
            call.structure.levels = levels.stop - first
            if levels.stop > first:
                call.tensors(chances=chances(here, levels).to(dtype))
        call.distributions("target", distributions, dtype)
        call.structure.first, call.structure.last = first, last
        call.run("walk", dtype)
        if not going.any():
            break
    return Verdict(
        path=path,
        accepted=accepted,
        token=token,
        resampled=refused,
        tried=tried,
        chance=chance,
        p=p,
        q=q,
        total_variation=total_variation,
        relaxed=relaxed if relaxes else None,
    )


def block(draft: Draft, distributions: Distribution, rng: CounterRNG, reference: Reference) -> Verdict:
    """Block verification of chains."""
    assert draft.distributions is not None
    accept, follow = rng.feed(reference, Purpose.ACCEPT, Purpose.NEXT)
    (rows, size), dtype = draft.tokens.shape, distributions.probs.dtype
    accepted, token = torch.zeros(2, rows, dtype=torch.long).unbind()
    refused = torch.zeros(rows, dtype=torch.bool)
    chance, p, q = torch.zeros(3, rows, size, dtype=dtype).unbind()
    call = _Call(
        _Block,
        rows=rows,
        size=size,
        vocabulary=distributions.vocabulary,
        numbers=accept.shape[1],
        threads=torch.get_num_threads(),
    )
    call.distributions("target", distributions, dtype)
    call.distributions("drafted", draft.distributions, dtype)
    call.tensors(tokens=draft.tokens, source=draft.source, able=draft.tried, accept=accept, next=follow)
    call.tensors(refused=refused, accepted=accepted, token=token, chance=chance, p=p, q=q)
    call.run("block", dtype)
    nodes = torch.arange(size)
    return Verdict(
        path=torch.where(nodes < accepted[:, None], nodes, -1),
        accepted=accepted,
        token=token,
        resampled=refused,
        tried=draft.tried,
        chance=chance.double(),
        p=p.double(),
        q=q.double(),
    )


def follow(draft: Draft, own: Tensor, rng: CounterRNG, reference: Reference) -> Verdict:
    """Follow the target's own tokens [B, N + 1] as far as the draft has them."""
    rng.feed(reference)
    (rows, size), depth = draft.tokens.shape, draft.tree.depth
    path = torch.full((rows, depth), -1)
    accepted, token = torch.zeros(2, rows, dtype=torch.long).unbind()
    refused = torch.zeros(rows, dtype=torch.bool)
    tried, hit = torch.zeros(2, rows, size, dtype=torch.bool).unbind()
    call = _Call(_Match, rows=rows, size=size, shapes=len(draft.tree.parents), depth=depth)
    call.tensors(tokens=draft.tokens, parents=draft.tree.parents, own=own, able=draft.tried)
    call.tensors(path=path, accepted=accepted, token=token, refused=refused, tried=tried, hit=hit)
    call.run("match")
    certain = hit.float()
    return Verdict(path, accepted, token, refused, tried, certain, certain, tried.float())


def couple(
    draft: Draft, distributions: Distribution, after: Tensor, known: Tensor, rng: CounterRNG, reference: Reference
) -> Tensor:
    """The guesses [B, W] of a window by its new distributions: the old draw at node `after` [B, W] is retained as often
    as any coupling allows; slots that are not `known` are left to the caller."""
    assert draft.distributions is not None
    retain, redraw = rng.feed(reference, Purpose.RETAIN, Purpose.REDRAW)
    dtype, (rows, slots) = distributions.probs.dtype, after.shape
    result = torch.empty(rows, slots, dtype=torch.long)
    call = _Call(
        _Couple,
        rows=rows,
        slots=slots,
        nodes=draft.size,
        vocabulary=distributions.vocabulary,
        numbers=retain.shape[1],
        threads=torch.get_num_threads(),
    )
    call.distributions("fresh", distributions, dtype)
    call.distributions("old", draft.distributions, dtype)
    call.tensors(tokens=draft.tokens, after=after, fixed=draft.fixed, known=known, retain=retain, redraw=redraw)
    call.tensors(result=result)
    call.run("couple", dtype)
    return result
