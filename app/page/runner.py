"""A run under way: followed step by step, and the lines that a tab says of it, from waiting to what went wrong.

Knows subjects; nothing of Gradio.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator

from outrider.app.page.backends.interface import Asked, Backend
from outrider.app.page.recordings import Recording
from outrider.app.viz.svg import Drawing, safe
from outrider.core.errors import OutriderError

PAUSE = {"text": 0.6, "image": 0.3, "speech": 0.25}  # seconds between two looks at what is under way, at least
_SHARE = 12  # times as long as the last look took, page and all: so showing takes a twelfth at most
_log = logging.getLogger("outrider.app")


def follow(
    subject: Backend, asked: Asked, going: Callable[[], bool], words: str
) -> Iterator[tuple[tuple[str | None, str | None], Recording | None]]:
    """A run under way: what to show now and then, and at the end what was recorded. Stopping is looked for at every
    step; whatever ends it, what the target holds is let go of."""
    if not going():
        return
    if not subject.loaded:
        subject.load()
    live = subject.begin(asked)
    begun = shown = time.perf_counter()
    tokens = calls = 0
    first, pause = True, PAUSE[subject.name]
    try:
        for step in live:
            tokens, calls = tokens + len(step.emitted), calls + 1
            if not going():
                break
            now = time.perf_counter()
            if first or now - shown >= pause:
                said = f"{words} {tokens} tokens, {calls} calls, {tokens / calls:.2f} a call, "
                said += f"{tokens / max(now - begun, 1e-6):.1f} tokens a second"
                yield (running(said), live.seen()), None
                first, shown = False, time.perf_counter()
                pause = max(PAUSE[subject.name], _SHARE * (shown - now))
    finally:
        live.close()
    yield (None, None), live.recording()


def remark(words: str) -> Drawing:
    return Drawing(f'<div class="or-empty">{safe(words)}</div>')


def waiting(words: str) -> Drawing:
    return Drawing(
        f'<div class="or-figures" role="status"><span class="or-state">{safe(words)}</span></div>'
        '<div class="or-load"><div></div></div>'
    )


def running(words: str) -> Drawing:
    return Drawing(f'<div class="or-figures" role="status"><span class="or-state">{safe(words)}</span></div>')


def fault(error: Exception) -> Drawing:
    """What went wrong, in a line; in full in the terminal."""
    if isinstance(error, OutriderError):
        words = str(error)
    else:
        _log.exception("a run failed", exc_info=error)
        words = f"something unexpected went wrong ({type(error).__name__}); the terminal says more"
    return Drawing(f'<div class="or-error" role="alert">{safe(words[:600])}</div>')
