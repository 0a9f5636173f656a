"""Measures the time of calls, the cost of target passes by their length, and memory.

Comparisons are in outrider.core.bench.runner.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import median

import torch

from outrider.core.cost.theory import PassCost, fit_pass_cost
from outrider.core.device import lifetime_peak
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.protocol import Target
from outrider.core.trace import Step
from outrider.core.tree import Tree

WIDTHS = (1, 2, 4, 8, 16, 32)  # tokens per pass


def pass_cost(target: Target, prompt: Sequence[int], widths: Sequence[int] = WIDTHS, rounds: int = 9) -> PassCost:
    """Measure the cost of target passes over a root and a chain after this prompt: the median per width, with widths
    alternating."""
    taken: dict[int, list[float]] = defaultdict(list)
    target.begin([prompt], Sampling(temperature=0), frozenset())
    try:
        for number in range(rounds + 1):
            for width in widths:
                tokens = torch.zeros(1, width - 1, dtype=torch.long, device=target.device)
                live = torch.ones_like(tokens, dtype=torch.bool)
                draft = Draft.guess(tokens, Tree.chain(width - 1, target.device), live)
                start = time.perf_counter()
                distribution = target.score(draft).distributions()
                assert distribution.tokens is not None
                distribution.tokens.cpu()  # waits for the device
                if number:  # the first round warms up
                    taken[width].append(time.perf_counter() - start)
    finally:
        target.end()
    return fit_pass_cost([(width, median(seconds)) for width, seconds in taken.items()])


class PeakMemory:
    """The peak memory since `start`: of the device on CUDA, else of this process, weights included."""

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)

    def start(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
            return
        with suppress(OSError):  # elsewhere `read` returns the peak since the process started
            Path("/proc/self/clear_refs").write_text("5")  # Linux: resets the peak to the memory in use

    def read(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        try:
            status = Path("/proc/self/status").read_text()
            return 1024 * int(status.split("VmHWM:")[1].split()[0])
        except (OSError, IndexError):
            return lifetime_peak()


def timed(
    call: Callable[[], tuple[Sequence[int], Sequence[Step]]], memory: PeakMemory | None = None
) -> tuple[tuple[int, ...], float, tuple[Step, ...], int]:
    """Tokens, seconds, steps and peak memory of a call that returns tokens and steps."""
    if memory is not None:
        memory.start()
    start = time.perf_counter()
    tokens, steps = call()
    seconds = time.perf_counter() - start
    return tuple(tokens), seconds, tuple(steps), memory.read() if memory else 0
