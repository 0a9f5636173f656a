"""Theory of speed: expected tokens, speedup, best draft length, break-even, and the cost of passes on a device.

All but `measure` are pure functions of plain numbers, for predictions beside what a trace measured (Leviathan et al.,
arXiv 2211.17192). Independent of models, drafters and rules; the value of trees is in
outrider.core.drafters.tree_shapes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider.core.engine.linear import Dense, fastest
from outrider.core.errors import InvalidOption

# The probability that a token is accepted given that all before it were: one for all positions, or one for each.
Acceptance = float | Sequence[float]
Cost = Callable[[int], float]  # tokens -> cost of one target pass over them

_ROUNDING = 1e-6  # a probability may be 1 plus this


def expected_tokens(acceptance: Acceptance, length: int) -> float:
    """Expected tokens per target pass with a chain of `length` guesses, the target's own token included.

    The paper's (1 - a^(k+1)) / (1 - a), summed term by term so that a = 1 is no special case. With a probability per
    position it is 1 + a1 + a1 a2 + ..., which does not assume that guesses are equally good.
    """
    if length < 0:
        raise InvalidOption(f"the draft length is {length}; it must be 0 (no draft) or more")
    by_position = [acceptance] * length if isinstance(acceptance, int | float) else list(acceptance)
    if len(by_position) < length:
        raise InvalidOption(f"acceptance is given for {len(by_position)} positions, but the draft has {length}")
    reached, terms = 1.0, [1.0]
    for probability in by_position[:length]:
        if not 0 <= probability <= 1 + _ROUNDING:
            raise InvalidOption(f"acceptance {probability} is not a probability; it must be from 0 to 1")
        reached *= min(probability, 1.0)
        terms.append(reached)
    return math.fsum(terms)


def speedup(acceptance: Acceptance, length: int, cost: float, verify: float = 1.0) -> float:
    """The speedup over plain decoding: tokens of a round over its cost in plain target passes.

    `cost` is that of one drafted token (the paper's c), `verify` that of the target pass, t(k+1) / t(1). verify = 1 is
    the published (1 - a^(k+1)) / ((1 - a)(k c + 1)), for which scoring more tokens costs nothing; that is wrong on few
    cores, with 4-bit weights, or in large batches.
    """
    if cost < 0 or verify <= 0:
        raise InvalidOption(f"cost={cost}, verify={verify}: cost must be 0 or more, verify above 0")
    return expected_tokens(acceptance, length) / (length * cost + verify)


def best_length(
    acceptance: Acceptance, cost: float, verify: Cost | None = None, max_length: int = 32
) -> tuple[int, float]:
    """The draft length with the highest speedup, and that speedup; (0, 1.0) if plain decoding is fastest.

    `verify(q)` is the cost of a pass over q tokens, in any unit (default: all passes cost the same); `cost` is in plain
    passes. All lengths are tried, since with a measured `verify` the speedup can have several maxima.
    """
    if not isinstance(acceptance, int | float):
        max_length = min(max_length, len(acceptance))
    plain = verify(1) if verify else 1.0
    best = (0, 1.0)
    for length in range(1, max_length + 1):
        gain = speedup(acceptance, length, cost, verify(length + 1) / plain if verify else 1.0)
        if gain > best[1]:
            best = (length, gain)
    return best


def break_even(length: int, cost: float, verify: float = 1.0) -> float:
    """The lowest acceptance at which drafting `length` tokens is not slower than plain decoding; 0 if drafting is never
    slower, infinity if it always is. For one token and verify = 1 it is `cost`: the paper's condition a > c.
    """
    if speedup(0.0, length, cost, verify) >= 1:
        return 0.0
    if speedup(1.0, length, cost, verify) < 1:
        return math.inf
    low, high = 0.0, 1.0
    while (middle := (low + high) / 2) not in (low, high):
        if speedup(middle, length, cost, verify) >= 1:
            high = middle
        else:
            low = middle
    return high


@dataclass(frozen=True)
class Prediction:
    """One round, in seconds, and the plain pass it replaces."""

    tokens_per_pass: float
    draft: float
    verify: float
    rest: float  # rule and bookkeeping
    plain: float  # a pass over one token

    @property
    def step(self) -> float:
        return self.draft + self.verify + self.rest

    @property
    def tokens_per_second(self) -> float:
        return self.tokens_per_pass / self.step

    @property
    def speedup(self) -> float:
        return self.tokens_per_pass * self.plain / self.step


def predict(tokens_per_pass: float, nodes: int, verify: Cost, draft: float, rest: float = 0.0) -> Prediction:
    """The predicted speed with drafts of `nodes` nodes: chain or tree, any drafter, any rule.

    `tokens_per_pass` comes from `expected_tokens`, `tree_shapes.tree_value` or a trace; `verify(q)` from measurements,
    a `PassCost` or `pass_seconds`; `draft` is the seconds to make the whole draft.
    """
    if nodes < 0 or draft < 0 or rest < 0 or not 1 <= tokens_per_pass <= nodes + 1:
        raise InvalidOption(
            f"tokens_per_pass={tokens_per_pass}, nodes={nodes}, draft={draft}, rest={rest}: "
            "tokens_per_pass must be from 1 to nodes + 1, and times 0 or more"
        )
    return Prediction(tokens_per_pass, draft, verify(nodes + 1), rest, verify(1))


@dataclass(frozen=True)
class PassCost:
    """Seconds of a target pass over q tokens: constant up to a knee, then linear.

    The constant part is reading weights, the slope is arithmetic. A knee at 1 means that the two add up, a higher one
    that they overlap, as in a roofline; the data decide.
    """

    floor: float
    slope: float  # per token beyond the knee
    knee: float  # tokens that cost as much as one
    error: float = 0.0  # root mean square of the fit's relative error

    def __call__(self, tokens: int) -> float:
        return self.floor + self.slope * max(0.0, tokens - self.knee)

    def relative(self, tokens: int) -> float:
        """In plain passes: t(q) / t(1)."""
        return self(tokens) / self(1)


def fit_pass_cost(measured: Sequence[tuple[int, float]]) -> PassCost:
    """Fit a PassCost to (tokens, seconds) pairs by least squares of the relative error, so that short passes have the
    same weight as long ones. The knee is exact: a measured point, or the intersection of the best constant and the best
    line on either side."""
    if len({tokens for tokens, _ in measured}) < 2 or any(q < 1 or t <= 0 for q, t in measured):
        raise InvalidOption(
            "a cost needs passes of at least two different lengths of 1 token or more, each with its seconds above 0; "
            f"given: {list(measured)}"
        )
    q, t = np.array(sorted(measured), dtype=float).T
    points = np.unique(q)
    knees = list(points)
    for low, high in pairwise(points[:-1]):  # two points or more are left for the line
        flat = _fit(np.ones((int((q <= low).sum()), 1)), t[q <= low])[0]
        start, slope = _fit(np.stack([np.ones_like(q), q], 1)[q >= high], t[q >= high])
        if slope > 0 and low < (meet := (flat - start) / slope) < high:
            knees.append(meet)
    best: PassCost | None = None
    for knee in knees:
        floor, slope = _fit(np.stack([np.ones_like(q), np.maximum(q - knee, 0)], 1), t)
        if floor <= 0 or slope < 0:
            continue
        error = float(np.sqrt(np.mean(((floor + slope * np.maximum(q - knee, 0)) / t - 1) ** 2)))
        if best is None or error < best.error - 1e-12:
            best = PassCost(float(floor), float(slope), float(knee), error)
    if best is None:  # longer passes were measured as faster, which is noise
        floor = float(_fit(np.ones((len(q), 1)), t)[0])
        best = PassCost(floor, 0.0, float(points[-1]), float(np.sqrt(np.mean((floor / t - 1) ** 2))))
    return best


def _fit(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Coefficients of the columns by least squares of the relative error."""
    return np.asarray(np.linalg.lstsq(columns / seconds[:, None], np.ones_like(seconds), rcond=None)[0], np.float64)


@dataclass(frozen=True)
class Machine:
    """A roofline: a device's peak performance in one precision."""

    bandwidth: float  # bytes read per second
    flops: float  # per second, in matrix products
    launch: float = 0.0  # seconds of the smallest operation
    device: str = ""
    dtype: str = ""

    @property
    def ridge(self) -> float:
        """Operations per byte read at which arithmetic takes as long as reading."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Workload:
    """The work of a model's pass."""

    weight_bytes: float  # read once per pass, whatever the batch
    flops_per_token: float  # about 2 per parameter, and attention
    kv_bytes: float = 0.0  # of the cache, read per batch row, whatever the number of tokens
    operations: int = 0  # launched in sequence


def decoder(
    parameters: float,
    *,
    weight_bytes: float,
    layers: int,
    width: int,
    kv_width: int,
    context: int = 0,
    kv_item: float = 2.0,
    operations: int = 0,
) -> Workload:
    """The workload of a transformer decoder. `width` and `kv_width` are heads times head size, of queries and of keys;
    `parameters` counts those in matrix products (embeddings only if tied to the output layer)."""
    return Workload(
        weight_bytes,
        2 * parameters + 4 * layers * context * width,
        2 * layers * context * kv_width * kv_item,
        operations,
    )


def pass_seconds(machine: Machine, work: Workload, tokens: int, batch: int = 1) -> float:
    """Seconds of a pass over `tokens` tokens in each of `batch` rows: the maximum of reading and arithmetic, plus
    launches.

    A lower bound: reading and arithmetic overlap fully, as in the roofline model.
    """
    if tokens < 1 or batch < 1:
        raise InvalidOption(f"tokens={tokens}, batch={batch}: each must be 1 or more")
    reading = (work.weight_bytes + batch * work.kv_bytes) / machine.bandwidth
    arithmetic = batch * tokens * work.flops_per_token / machine.flops
    return max(reading, arithmetic) + work.operations * machine.launch


def intensity(work: Workload, tokens: int, batch: int = 1) -> float:
    """Arithmetic intensity of a pass: operations per byte read. Above the machine's ridge, more tokens cost more
    time."""
    return batch * tokens * work.flops_per_token / (work.weight_bytes + batch * work.kv_bytes)


def free_tokens(machine: Machine, work: Workload, batch: int = 1) -> float:
    """The number of tokens per row that can be scored in the time of one.

    It decreases with the batch towards a limit set by reading each row's cache, so speculation still pays in large
    batches of long contexts (MagicDec, arXiv 2408.11049). Below 1 even plain decoding is bound by arithmetic.
    """
    return machine.ridge / intensity(work, 1, batch)


_SIZES = {"cuda": (1 << 30, 8192)}  # bytes to read (well past the caches), width of the product
_SMALLER = (1 << 27, 1024)


@torch.inference_mode()
def measure(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> Machine:
    """Measure a device with matrix-vector products (bandwidth), a square product (flops) and a tiny one (launch).

    Takes about `seconds` and 128 MiB of memory (1 GiB on CUDA, or a quarter of what is free). The best of several runs
    counts, since other load only slows a device down.
    """
    device = torch.device(device)
    if not dtype.is_floating_point or seconds <= 0:
        raise InvalidOption(f"dtype={dtype}, seconds={seconds}: measure a floating-point type, for more than 0 seconds")
    size, width = _SIZES.get(device.type, _SMALLER)
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 4)
    rng = torch.Generator(device).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.rand(shape, generator=rng, device=device, dtype=dtype)

    tiny, repeats = random(8, 8), 64
    launch = _fastest(lambda: [tiny @ tiny for _ in range(repeats)], device, seconds / 4) / repeats
    square = random(width, width)
    laid = fastest(Dense(square))  # the engine's weight layout: torch's 16-bit products can be far slower
    product = _fastest(lambda: laid(square), device, seconds / 4)
    weights, vector = random(size // (4096 * dtype.itemsize), 4096), random(1, 4096)
    streams: tuple[Callable[[], object], ...] = (  # which is fastest depends on the precision
        lambda: torch.nn.functional.linear(vector, weights),
        lambda: torch.mv(weights, vector[0]),
        partial(fastest(Dense(weights)), vector),
    )
    reading = min(_fastest(stream, device, seconds / 4) for stream in streams)
    return Machine(weights.nbytes / reading, 2 * width**3 / product, launch, str(device), str(dtype).split(".")[-1])


def _fastest(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of the runs that fit into the time, at least three; CUDA is timed with its events."""
    run()  # allocations, choice of kernels
    best, until, runs = math.inf, time.perf_counter() + seconds, 0
    while runs < 3 or time.perf_counter() < until:
        if device.type == "cuda":
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            with torch.cuda.device(device):
                start.record()
                run()
                stop.record()
            stop.synchronize()
            best = min(best, start.elapsed_time(stop) / 1e3)
        else:
            started = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - started)
        runs += 1
    return best
