"""Random numbers as a function, not a state: every uniform is a hash of (row seed, step, purpose, node).

A number does not depend on other rows, on a global generator or on how many numbers were drawn before, so a row emits
the same tokens alone and in any batch, up to rounding and except with drafters that choose by the number of rows
(docs/guides/exactness.md). The mixer is SplitMix64's finaliser (Steele et al., "Fast splittable pseudorandom number
generators", 2014); the noise of `gumbel_argmax` is the exponential race (the Gumbel-max trick without its second
logarithm). Independent of drafts and rules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import constant, upload
from outrider.core.distribution import Distribution
from outrider.core.kernels.topk import argmax

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
_MANY = 64  # rows from which seeds are mixed on the device


class Purpose(IntEnum):
    """What a uniform is used for; no two purposes share one."""

    DRAW = 0  # a drafter draws a token
    ACCEPT = 1  # a rule tries a node
    NEXT = 2  # the token that follows the accepted path
    MATCH = 3  # the target's own draw behind a node
    REDRAW = 4  # a drafter draws a guess of its window again
    RETAIN = 5  # a drafter tries to retain the old guess


def mix(value: int) -> int:
    """SplitMix64's finaliser on a Python integer."""
    z = (value + _GOLDEN) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)


def signed(value: int) -> int:
    """The same 64 bits as a signed integer, for int64 tensors."""
    return value - (1 << 64) if value >> 63 else value


def _mix(z: Tensor) -> Tensor:
    """`mix` of an int64 tensor: products wrap around, and masks make the arithmetic shifts logical. On a CPU in numpy,
    whose operations on small arrays cost a third."""
    if z.is_cpu and z.dim():
        return torch.from_numpy(_final(z.numpy().view(np.uint64) + np.uint64(_GOLDEN)).view(np.int64))
    z = z + signed(_GOLDEN)
    z = (z ^ ((z >> 30) & 0x3FFFFFFFF)) * signed(0xBF58476D1CE4E5B9)
    z = (z ^ ((z >> 27) & 0x1FFFFFFFFF)) * signed(0x94D049BB133111EB)
    return z ^ ((z >> 31) & 0x1FFFFFFFF)


def hash_tokens(context: Tensor, tokens: Tensor) -> Tensor:
    """The hash of a sequence extended by one token: int64, shapes broadcast."""
    return _mix(context ^ _mix(tokens))


def uniform_of(bits: Tensor) -> Tensor:
    """A hash as a uniform in (0, 1), float64."""
    return ((bits & 0xFFFFFFFF).double() + 0.5) * 2.0**-32


def _uniforms(bases: np.ndarray, width: int) -> np.ndarray:
    """`uniform_of` in numpy: [B] bases -> [B, width] uniforms."""
    uniforms: np.ndarray = ((_final(bases[:, None] + _counter(width)) & np.uint64(0xFFFFFFFF)) + 0.5) * 2.0**-32
    return uniforms


def _final(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = z ^ (z >> np.uint64(31))
    return mixed


_PURPOSES = np.array([mix(purpose) for purpose in Purpose], dtype=np.uint64)


@lru_cache
def _counter(width: int) -> np.ndarray:
    """Multiples of the golden ratio from 1 on: what `mix` adds, and the counter."""
    return (np.arange(width, dtype=np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN)


def _mix32(h: Tensor, key: Tensor) -> Tensor:
    """A keyed 32-bit finaliser, in place; cheap enough for a whole vocabulary."""
    h ^= key
    h ^= (h >> 16) & 0xFFFF
    h *= 0x7FEB352D
    h ^= (h >> 15) & 0x1FFFF
    h *= -0x7B935975  # 0x846CA68B as a signed 32-bit number
    h ^= (h >> 16) & 0xFFFF
    return h


class CounterRNG:
    """The random numbers of one batch: a seed for each row, and a step for all rows or one for each."""

    has_tables = True  # whether `table` holds the uniforms by which this generator decides
    feeds_native = True  # whether `feed` returns uniforms by which compiled code decides as this generator does

    def __init__(self, seeds: Sequence[int], device: torch.device | str = "cpu") -> None:
        self.seeds = [seed & _MASK for seed in seeds]
        self.device = torch.device(device)
        self.step: int | Sequence[int] = 0
        self._width = 64
        self._tables: dict[Purpose, Tensor] = {}
        self._all_tables: Tensor | None = None

    @classmethod
    def of(cls, seed: int | Sequence[int], rows: int, device: torch.device | str = "cpu") -> CounterRNG:
        """One seed: row 0 gets the stream that it has alone. A list: each row gets the stream its seed has alone."""
        if isinstance(seed, int):
            return cls([mix(mix(seed) + row) for row in range(rows)], device)
        return cls([mix(mix(row_seed)) for row_seed in seed], device)

    def at(self, step: int | Sequence[int], going: Sequence[bool] = ()) -> None:
        """Start a step; the numbers of the last one are dropped. `going`: which rows are not finished."""
        self.step = step
        self._clear()

    def arrange(self, order: Sequence[int]) -> None:
        """Give row i the stream of the former row order[i]; -1: any, for an empty row."""
        self.seeds = [self.seeds[row] if row >= 0 else 0 for row in order]
        self._clear()

    def reserve(self, nodes: int) -> None:
        """Provide numbers for nodes 0..nodes-1; their values do not depend on this."""
        if nodes > self._width:
            self._width = 1 << (nodes - 1).bit_length()
            self._clear()

    def _clear(self) -> None:
        self._tables.clear()
        self._all_tables = None

    def fork(self, label: int) -> CounterRNG:
        """An independent generator for a nested loop, at the same step."""
        child = CounterRNG([mix(seed ^ mix(label + 1)) for seed in self.seeds], self.device)
        child.step = self.step
        return child

    def uniform(self, purpose: Purpose, node: Tensor | int) -> Tensor:
        """Uniforms in (0, 1) with 32 random bits, float64; node [B, ...] or one for all rows -> [B, ...]."""
        table = self.table(purpose)
        if isinstance(node, int):
            return table[:, node]
        return table.gather(1, node.flatten(1) if node.dim() > 1 else node[:, None]).view_as(node)

    def table(self, purpose: Purpose) -> Tensor:
        """The uniforms of all nodes [B, width or more]."""
        if purpose not in self._tables:
            self._tables |= self._few() if len(self.seeds) < _MANY else {purpose: self._table(purpose)}
        return self._tables[purpose]

    def tables(self) -> Tensor:
        """The uniforms of all purposes, in their order, and of all nodes [purposes, B, width or more]."""
        if len(self.seeds) >= _MANY:
            return torch.stack([self.table(purpose) for purpose in Purpose])
        if self._all_tables is None:
            self._tables |= self._few()
        assert self._all_tables is not None
        return self._all_tables

    def _few(self) -> dict[Purpose, Tensor]:
        """The tables of all purposes, made on the host: for few rows faster than operations on the device."""
        steps = [self.step] * len(self.seeds) if isinstance(self.step, int) else self.step
        rows = np.array([mix(seed + step) for seed, step in zip(self.seeds, steps, strict=True)], dtype=np.uint64)
        bases = _final(np.bitwise_xor.outer(_PURPOSES, rows) + np.uint64(_GOLDEN))
        uniforms = _uniforms(bases.flatten(), self._width).reshape(len(Purpose), len(rows), -1)
        self._all_tables = upload(torch.from_numpy(uniforms), self.device)
        return dict(zip(Purpose, self._all_tables, strict=True))

    def _table(self, purpose: Purpose) -> Tensor:
        step = self.step if isinstance(self.step, int) else upload(self.step, self.device)
        bases = _mix(_mix(self._seed_tensor() + step) ^ signed(mix(purpose)))
        counter = torch.arange(self._width, device=self.device) * signed(_GOLDEN)
        return uniform_of(_mix(bases[:, None] + counter))

    def _seed_tensor(self) -> Tensor:
        return upload([signed(seed) for seed in self.seeds], self.device)

    def row(self, row: int) -> CounterRNG:
        """The generator of one row."""
        alone = CounterRNG(self.seeds[row : row + 1], self.device)
        alone.step = self.step if isinstance(self.step, int) else self.step[row]
        return alone

    def feed(self, reference: Callable[[CounterRNG], object], *purposes: Purpose) -> list[Tensor]:
        """Tables of uniforms [B, width] by which compiled code decides what `reference`, given a generator, decides in
        torch. Here they are the generator's own; an enumeration works out which ones lead to its decisions."""
        return [self.table(purpose) for purpose in purposes]

    # `where` says which results are used; only enumerations need to know.

    def accept(
        self, chance: Tensor, node: Tensor | int, purpose: Purpose = Purpose.ACCEPT, where: Tensor | None = None
    ) -> Tensor:
        """Try nodes: True with probability `chance` [B, ...]."""
        return self.uniform(purpose, node) < chance

    def descend(self, chance: Tensor, tried: Tensor) -> Tensor:
        """Try the nodes [B, N] of a chain in order, up to the first that fails or may not be tried -> which passed."""
        uniform = self.table(Purpose.ACCEPT)[:, : chance.shape[1]]
        return (tried & (uniform < chance)).cumprod(1).bool()

    def strictly(self, chance: Tensor, node: Tensor) -> Tensor:
        """Whether the uniform that `accept` used passes this chance; only for the record of relaxed rules."""
        return self.uniform(Purpose.ACCEPT, node) < chance

    def sample(
        self, distribution: Distribution, node: Tensor | int, purpose: Purpose, where: Tensor | None = None
    ) -> Tensor:
        """One token from each distribution [B, ..., S], by inverting its cumulative sum -> [B, ...]."""
        if distribution.width == 1:
            return distribution.sole()
        total = distribution.probs.cumsum(-1, dtype=torch.float64)
        mark = self.uniform(purpose, node)[..., None] * total[..., -1:]
        place = torch.searchsorted(total, mark.contiguous(), right=True).clamp_(max=distribution.width - 1)
        return distribution.name(place[..., 0])

    def gumbel_argmax(self, distribution: Distribution, position: Tensor, where: Tensor | None = None) -> Tensor:
        """A draw by an exponential race whose noise depends on the absolute position [B, ...] only, so that it does not
        depend on how drafts led there -> [B, ...]."""
        if distribution.width == 1:
            return distribution.sole()
        return distribution.name(argmax(distribution.probs / self.noise(distribution, position)))

    def noise(self, distribution: Distribution, position: Tensor) -> Tensor:
        """Exponential noise by (row seed, position, token), shaped like distribution.probs."""
        if len(self.seeds) < _MANY:
            seeds = constant(tuple(signed(mix(seed ^ 0x5EED)) for seed in self.seeds), self.device)
        else:
            seeds = _mix(self._seed_tensor() ^ 0x5EED)
        key = _mix(seeds.view(-1, *[1] * (position.dim() - 1)) ^ _mix(position))
        low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
        ids = (
            torch.arange(distribution.width, device=self.device) if distribution.tokens is None else distribution.tokens
        )
        h = (ids.to(torch.int32) * -0x61C88647).expand(distribution.probs.shape).clone()
        h = _mix32(_mix32(h, low[..., None]), high[..., None])
        bits = (h >> 1) & 0x7FFFFFFF  # removes the sign bit of the arithmetic shift
        uniform = ((bits.to(distribution.probs.dtype) + 0.5) * 2.0**-31).clamp_(max=1 - 2.0**-24)
        return uniform.neg_().log1p_().neg_()


class PredrawnRNG(CounterRNG):
    """A generator that returns uniforms [purposes, B, N] drawn before (`CounterRNG.tables`). What it is given to runs
    as its reference, on a CPU too: that is what a CUDA graph records."""

    feeds_native = False

    def __init__(self, tables: Tensor | None, rows: int, device: torch.device) -> None:
        super().__init__([0] * rows, device)
        self._drawn = tables

    def table(self, purpose: Purpose) -> Tensor:
        assert self._drawn is not None, "no random numbers were given"
        return self._drawn[purpose]

    def reserve(self, nodes: int) -> None:
        """The numbers are drawn."""
