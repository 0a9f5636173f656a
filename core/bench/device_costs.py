"""What a round costs on a CUDA device apart from its time: kernel launches, and waits of the host. Independent of
models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice

from outrider.core.trace import Step

_SKIPPED, _COUNTED = 6, 8  # rounds before the count, in which shapes are captured, and rounds that are counted
_LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaGraphLaunch")
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize", "cudaDeviceSynchronize")


def counts(work: Callable[[], object]) -> tuple[int, int]:  # pragma: CUDA
    """The kernels and graphs that the host launches on CUDA, and its waits."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        work()
    events = profiled.key_averages()
    launches, waits = (
        sum(int(event.count) for event in events if event.key.startswith(names)) for names in (_LAUNCHES, _WAITS)
    )
    return launches, waits


def round_costs(
    steps: Iterator[Step], count: Callable[[Callable[[], object]], tuple[int, int]] = counts
) -> tuple[float, float]:
    """Launches and waits per round of a generation of one row, some rounds after its beginning; 0 if it ends before
    them. The generation is not run to its end."""
    if len(list(islice(steps, _SKIPPED))) < _SKIPPED:
        return 0.0, 0.0
    rounds: list[Step] = []
    launches, waits = count(lambda: rounds.extend(islice(steps, _COUNTED)))
    return (launches / len(rounds), waits / len(rounds)) if rounds else (0.0, 0.0)
