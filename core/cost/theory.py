"""Theory of speed: expected tokens, speedup, best length, break-even, and what a pass costs on the machine at hand.

All but `measure` are pure functions of plain numbers, so that a prediction can stand beside what a trace measured
(Leviathan et al., arXiv 2211.17192). Knows nothing of models, drafters or rules; what a tree is worth is in `shapes`.
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

# One chance for every position, or one for each: of being accepted given that all before it were.
Acceptance = float | Sequence[float]
Cost = Callable[[int], float]  # of one target pass over so many tokens

_ROUNDING = 1e-6  # by how much a probability may exceed 1


def expected_tokens(acceptance: Acceptance, length: int) -> float:
    """Tokens of one target call for a chain of `length` guesses, the target's own token included.

    The paper's (1 - a^(k+1)) / (1 - a), summed term by term so that a = 1 is no special case. With one
    chance a position it is 1 + a1 + a1 a2 + ..., which needs no assumption that guesses are equally good.
    """
    if length < 0:
        raise InvalidOption(f"the draft length is {length}; it must be 0 (no draft) or more")
    chances = [acceptance] * length if isinstance(acceptance, int | float) else list(acceptance)
    if len(chances) < length:
        raise InvalidOption(f"acceptance is given for {len(chances)} positions, but the draft has {length}")
    reached, terms = 1.0, [1.0]
    for chance in chances[:length]:
        if not 0 <= chance <= 1 + _ROUNDING:
            raise InvalidOption(f"acceptance {chance} is no probability; it must be from 0 to 1")
        reached *= min(chance, 1.0)
        terms.append(reached)
    return math.fsum(terms)


def speedup(acceptance: Acceptance, length: int, cost: float, verify: float = 1.0) -> float:
    """How many times faster than plain decoding: tokens of a step over its cost in plain target passes.

    `cost` is that of one drafted token (the paper's c), `verify` that of scoring it, t(k+1) / t(1). For verify = 1
    it is the published (1 - a^(k+1)) / ((1 - a)(k c + 1)), which takes verification for free beyond the
    pass itself; that stops being true on few cores, with 4-bit weights, or in large batches.
    """
    if cost < 0 or verify <= 0:
        raise InvalidOption(f"cost={cost}, verify={verify}: a drafted token costs 0 or more, a pass more than 0")
    return expected_tokens(acceptance, length) / (length * cost + verify)


def best_length(
    acceptance: Acceptance, cost: float, verify: Cost | None = None, max_length: int = 32
) -> tuple[int, float]:
    """The draft length with the highest speedup, and that speedup; (0, 1.0) where nothing pays.

    `verify(q)` is the cost of a pass over q tokens, in any unit (left out: all passes cost the same); `cost` is counted
    in plain passes. All lengths are tried: with a measured `verify` the speedup may rise and fall more than once.
    """
    if not isinstance(acceptance, int | float):
        max_length = min(max_length, len(acceptance))
    plain = verify(1) if verify else 1.0
    best = (0, 1.0)
    for length in range(1, max_length + 1):
        found = speedup(acceptance, length, cost, verify(length + 1) / plain if verify else 1.0)
        if found > best[1]:
            best = (length, found)
    return best


def break_even(length: int, cost: float, verify: float = 1.0) -> float:
    """The acceptance from which a draft of `length` pays; 0 if it always does, infinity if it never can.

    For one guess and free verification it is `cost` itself: the paper's condition a > c.
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
    """One step, in seconds, beside the plain pass it replaces."""

    tokens_per_pass: float
    draft: float
    verify: float
    rest: float  # the rule, bookkeeping
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
    """What a draft of `nodes` nodes should do: chain or tree, any drafter, any rule.

    `tokens_per_pass` comes from `expected_tokens`, `shapes.tree_value` or a trace; `verify(q)` from a stopwatch, a
    `PassCost` or `pass_seconds`; `draft` is the seconds that making the whole draft takes.
    """
    if nodes < 0 or draft < 0 or rest < 0 or not 1 <= tokens_per_pass <= nodes + 1:
        raise InvalidOption(
            f"tokens_per_pass={tokens_per_pass}, nodes={nodes}, draft={draft}, rest={rest}: "
            "a call gives from 1 to nodes + 1 tokens, and times are 0 or more"
        )
    return Prediction(tokens_per_pass, draft, verify(nodes + 1), rest, verify(1))


@dataclass(frozen=True)
class PassCost:
    """Seconds of a target pass over q tokens: flat up to a knee, then a straight line.

    The flat part is the reading of weights, the slope is arithmetic. A knee at 1 is the sum of a fixed part and one per
    token; a higher one is the maximum of two, as in a roofline: both are common, and the data decide.
    """

    floor: float
    slope: float  # for each token past the knee
    knee: float  # tokens that are scored for the price of one
    error: float = 0.0  # root mean square of the fit's relative error

    def __call__(self, tokens: int) -> float:
        return self.floor + self.slope * max(0.0, tokens - self.knee)

    def relative(self, tokens: int) -> float:
        """In plain passes: t(q) / t(1)."""
        return self(tokens) / self(1)


def fit_pass_cost(measured: Sequence[tuple[int, float]]) -> PassCost:
    """Fit a PassCost to (tokens, seconds) pairs by least squares of the relative error, so that short passes count as
    much as long ones. The knee is found exactly: it lies at a measured point or where the best flat part and the best
    line through the rest meet."""
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
    if best is None:  # longer passes were measured as faster: noise
        floor = float(_fit(np.ones((len(q), 1)), t)[0])
        best = PassCost(floor, 0.0, float(points[-1]), float(np.sqrt(np.mean((floor / t - 1) ** 2))))
    return best


def _fit(columns: NDArray[np.float64], seconds: NDArray[np.float64]) -> NDArray[np.float64]:
    """Weights of the columns, least squares in relative terms."""
    return np.asarray(np.linalg.lstsq(columns / seconds[:, None], np.ones_like(seconds), rcond=None)[0], np.float64)


@dataclass(frozen=True)
class Machine:
    """A roofline: what a device can do at best, in one precision."""

    bandwidth: float  # bytes read a second
    flops: float  # a second, in matrix products
    launch: float = 0.0  # seconds that the smallest operation takes
    device: str = ""
    dtype: str = ""

    @property
    def ridge(self) -> float:
        """Operations for each byte read at which arithmetic takes as long as reading."""
        return self.flops / self.bandwidth


@dataclass(frozen=True)
class Workload:
    """What a pass of a model needs."""

    weight_bytes: float  # read once a pass, whatever the batch
    flops_per_token: float  # about 2 a parameter, and attention
    kv_bytes: float = 0.0  # cache read for each row of the batch, whatever the number of tokens
    operations: int = 0  # launched one after the other


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
    """The workload of a transformer decoder: `width` and `kv_width` are heads times their size, of queries and of keys;
    `parameters` are those that are multiplied (a table of embeddings only if it is the output head too)."""
    return Workload(
        weight_bytes,
        2 * parameters + 4 * layers * context * width,
        2 * layers * context * kv_width * kv_item,
        operations,
    )


def pass_seconds(machine: Machine, work: Workload, tokens: int, batch: int = 1) -> float:
    """A pass over `tokens` tokens in each of `batch` rows: the longer of reading and arithmetic, and the launches.

    A lower bound by construction: it takes the two to overlap fully, as the roofline model does.
    """
    if tokens < 1 or batch < 1:
        raise InvalidOption(f"tokens={tokens}, batch={batch}: each must be 1 or more")
    reading = (work.weight_bytes + batch * work.kv_bytes) / machine.bandwidth
    arithmetic = batch * tokens * work.flops_per_token / machine.flops
    return max(reading, arithmetic) + work.operations * machine.launch


def intensity(work: Workload, tokens: int, batch: int = 1) -> float:
    """Arithmetic intensity of a pass: operations for each byte read. Above the machine's ridge, tokens cost."""
    return batch * tokens * work.flops_per_token / (work.weight_bytes + batch * work.kv_bytes)


def free_tokens(machine: Machine, work: Workload, batch: int = 1) -> float:
    """How many tokens a row can be scored for the price of one: where verification stops being free.

    It shrinks as the batch grows, but no further than what reading each row's cache pays for, which is why speculation
    still pays in large batches of long contexts (MagicDec, arXiv 2408.11049). Below 1 even plain decoding computes.
    """
    return machine.ridge / intensity(work, 1, batch)


_SIZES = {"cuda": (1 << 30, 8192)}  # bytes to read (well past the caches), width of the product
_SMALLER = (1 << 27, 1024)


@torch.inference_mode()
def measure(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, seconds: float = 1.0) -> Machine:
    """Measure the device: weights streamed by matrix-vector products, a square product, a tiny one.

    Takes about `seconds`, and the memory of 128 MiB of weights (1 GiB on CUDA, less where less is free). The best of
    several runs counts: whatever else the machine did meanwhile can only have slowed it down.
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
    laid = fastest(Dense(square))  # as our engine keeps weights: torch's own products of 16 bits may be far slower
    product = _fastest(lambda: laid(square), device, seconds / 4)
    weights, vector = random(size // (4096 * dtype.itemsize), 4096), random(1, 4096)
    streams: tuple[Callable[[], object], ...] = (  # which kernel is good differs by precision, threefold on a CPU
        lambda: torch.nn.functional.linear(vector, weights),
        lambda: torch.mv(weights, vector[0]),
        partial(fastest(Dense(weights)), vector),
    )
    reading = min(_fastest(stream, device, seconds / 4) for stream in streams)
    return Machine(weights.nbytes / reading, 2 * width**3 / product, launch, str(device), str(dtype).split(".")[-1])


def _fastest(run: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The shortest of the runs that fit into the time, and of three at least; CUDA is timed by its own events."""
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
            begun = time.perf_counter()
            run()
            if device.type != "cpu":
                torch.accelerator.synchronize()
            best = min(best, time.perf_counter() - begun)
        runs += 1
    return best
