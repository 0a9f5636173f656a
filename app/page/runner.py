"""Follows a run step by step, and formats the status line of a tab: waiting, running, failed.

Independent of Gradio.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache

import torch

from outrider.app.page.backends.interface import Backend, RunSettings
from outrider.app.page.recordings import Recording
from outrider.app.page.run_queue import REFUSED, RunQueue
from outrider.app.viz.svg import Drawing, safe
from outrider.core.bench.device_costs import round_costs
from outrider.core.bench.other_load import Others
from outrider.core.bench.runner import PLAIN
from outrider.core.cost.theory import measure
from outrider.core.device import usable_device
from outrider.core.errors import InvalidOption, OutriderError

PAUSE = {"text": 0.6, "image": 0.3, "speech": 0.25}  # minimum seconds between two updates of the page
TIMINGS = 3  # of each side of a race
_SHARE = 12  # the pause is at least 12 times as long as the last update took, so that updates take a twelfth at most
_log = logging.getLogger("outrider.app")


def follow(
    backend: Backend, settings: RunSettings, active: Callable[[], bool], label: str, *, costs: bool = True
) -> Iterator[tuple[tuple[str | None, str | None], Recording | None]]:
    """Run a generation: yields now and then (status, output) to show, and finally the recording. The run ends at the
    first step after `active` returns False; the target's cache is released however it ends. `costs` adds what the
    device did to the recording."""
    if not active():
        return
    if not backend.loaded:
        backend.load()
    others = Others()
    live = backend.begin(settings)
    begun = shown = time.perf_counter()
    tokens = passes = 0
    first, pause = True, PAUSE[backend.name]
    try:
        for step in live:
            tokens, passes = tokens + len(step.emitted), passes + 1
            if not active():
                break
            now = time.perf_counter()
            if first or now - shown >= pause:
                status = f"{label} {tokens} tokens, {passes} target passes, {tokens / passes:.2f} tokens / pass, "
                status += f"{tokens / max(now - begun, 1e-6):.1f} tokens / s"
                yield (running(status), live.preview()), None
                first, shown = False, time.perf_counter()
                pause = max(PAUSE[backend.name], _SHARE * (shown - now))
    finally:
        live.close()
    recording = live.recording()
    machine = recording.trace.machine | {"other_load": round(others.cores(), 2)}
    recording = replace(recording, trace=replace(recording.trace, machine=machine))
    yield (None, None), _with_device_costs(recording, backend, settings) if costs else recording


def race(
    backend: Backend, settings: RunSettings, active: Callable[[], bool], timings: int = TIMINGS
) -> Iterator[tuple[tuple[str | None, str | None], Recording | None]]:
    """Run a generation and plain decoding in turns, `timings` times each: yields as `follow`, and finally the run with
    the median speedup, plain decoding in it, and the seconds of all. What was measured is kept when it is stopped."""
    plain_settings = replace(settings, drafter=PLAIN, drafter_options={})
    pairs: list[tuple[Recording, Recording]] = []
    single: Recording | None = None
    for number in range(1, timings + 1):
        pair = []
        for name, run in ((settings.drafter, settings), ("plain decoding", plain_settings)):
            label = f"Timing {number} of {timings}, {name}:"
            result: Recording | None = None
            for update, made in follow(backend, run, active, label, costs=number == 1):
                result = made
                yield (update[0], update[1] if number == 1 and run is settings else None), None
            if result is not None:
                pair.append(result)
        single = single or (pair[0] if pair else None)
        if not active():
            break
        pairs.append((pair[0], pair[1]))
    if not pairs:
        if single is not None:
            yield (None, None), single
        return
    ratios = [before.trace.summary().seconds / max(own.trace.summary().seconds, 1e-9) for own, before in pairs]
    own, before = pairs[ratios.index(sorted(ratios)[(len(ratios) - 1) // 2])]
    first = pairs[0][0].trace
    trace = replace(own.trace, machine=first.machine, launches=first.launches, waits=first.waits)
    seconds = [tuple(run.trace.summary().seconds for run in runs) for runs in zip(*pairs, strict=True)]
    yield (None, None), replace(own, trace=trace, seconds=seconds[0], plain=replace(before, seconds=seconds[1]))


def _with_device_costs(recording: Recording, backend: Backend, settings: RunSettings) -> Recording:
    """The recording with the device's memory bandwidth and, on CUDA, the launches and waits of a round, which are
    counted in another run of the same settings."""
    if not backend.device or not recording.trace.steps:
        return recording
    device = usable_device(backend.device)
    machine = recording.trace.machine | {"bandwidth": _bandwidth(device)}
    trace = replace(recording.trace, machine=machine)
    if device.type == "cuda":  # pragma: CUDA
        again = backend.begin(settings)
        try:
            launches, waits = round_costs(again)
        finally:
            again.close()
        trace = replace(trace, launches=launches, waits=waits)
    return replace(recording, trace=trace)


@lru_cache
def _bandwidth(device: torch.device) -> float:
    """Of the device's memory in bytes per second, measured once."""
    return measure(device, seconds=0.1).bandwidth


def enter(queue: RunQueue, visitor: str) -> tuple[int, Drawing]:
    """The ticket of a new run, and a status that says how many runs are ahead of it, or that there are too many."""
    ahead = queue.waiting()
    if ahead >= queue.limit:
        return REFUSED, error_box(
            InvalidOption(f"{ahead} runs wait already, which is the limit; try again in a minute")
        )
    return queue.take(visitor), waiting(f"Waiting for {ahead} other runs …" if ahead else "Waiting for the model …")


def hint(text: str) -> Drawing:
    """What an empty part of the page says."""
    return Drawing(f'<div class="or-empty">{safe(text)}</div>')


def waiting(text: str) -> Drawing:
    """A status line with a progress animation."""
    return Drawing(
        f'<div class="or-figures" role="status"><span class="or-state">{safe(text)}</span></div>'
        '<div class="or-load"><div></div></div>'
    )


def running(text: str) -> Drawing:
    return Drawing(f'<div class="or-figures" role="status"><span class="or-state">{safe(text)}</span></div>')


def error_box(error: Exception) -> Drawing:
    """An error in one line. Unexpected errors are logged with their traceback."""
    if isinstance(error, OutriderError):
        message = str(error)
    else:
        _log.exception("a run failed", exc_info=error)
        message = f"unexpected error ({type(error).__name__}); see the server's terminal"
    return Drawing(f'<div class="or-error" role="alert">{safe(message[:600])}</div>')
