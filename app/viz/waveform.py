"""Speech as a strip: the sound over time, and under it the round that committed each part.

A pure function of steps, for the page and for notebooks. Sound is given as numbers; independent of models.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.app.viz.svg import Drawing, box, drawing, label, safe, stroke
from outrider.app.viz.token_styles import STYLES
from outrider.core.trace import Step

_TOKENS, _WORDS, _TICKS = 10_000, 1_000, 120  # that are drawn at most


def strip(
    steps: Sequence[Step],
    starts: Sequence[float],
    seconds: float,
    *,
    wave: Sequence[float] = (),
    mel: str = "",
    words: Sequence[tuple[float, str]] = (),
    clock: Sequence[float] | None = None,
) -> Drawing:
    """The sound over time, and under it the round and the source of each token.

    `starts` are the seconds at which tokens become audible, `wave` is the envelope, `mel` an image as a data URL,
    `words` are times and spoken words, and `clock` the seconds at which target passes were done, for a replay."""
    wide, duration = 880.0, max(seconds, 1e-6)

    def at(time: float) -> float:
        return wide * min(time / duration, 1.0)

    parts, y = [], 0.0
    if wave:
        step = wide / len(wave)
        line = " ".join(f"{i * step:.1f},{26 - 24 * h:.1f}" for i, h in enumerate(wave))
        back = " ".join(f"{i * step:.1f},{26 + 24 * h:.1f}" for i, h in reversed(list(enumerate(wave))))
        parts.append(f'<polygon points="{line} {back}" fill="currentColor" fill-opacity=".55"/>')
        y = 56.0
    if mel:
        parts.append(f'<image href="{safe(mel)}" x="0" y="{y}" width="{wide}" height="76" preserveAspectRatio="none"/>')
        y += 82
    first, last = 0, min(len(starts), _TOKENS)
    for index, round_ in enumerate(steps):
        tokens = list(range(first, min(first + len(round_.emitted), last)))
        first += len(round_.emitted)
        if not tokens:
            continue
        left = at(starts[tokens[0]])
        right = at(starts[first] if first < len(starts) else duration)
        timed = f' class="or-later" data-at="{clock[index]:.3f}"' if clock is not None else ""
        timed += f' data-s="{index}"'
        tip = f"target pass {round_.index + 1}: {len(round_.drafted)} drafted, {len(round_.emitted)} committed"
        shade = 0.28 if index % 2 else 0.12
        inner = box(left, y, right - left, 12, "currentColor", title=tip, more=f' fill-opacity="{shade}"')
        for level, token in enumerate(tokens):
            x, end = at(starts[token]), at(starts[token + 1] if token + 1 < len(starts) else duration)
            style = STYLES[round_.sources[level]]
            width = max(end - x - 0.4, 0.6)
            inner += box(x, y + 14, width, 18, style.colour, title=f"{tip}; {style.description}")
        parts.append(f"<g{timed}>{inner}</g>")
    y += 36
    for tick in range(0, int(duration) + 1, 1 + int(duration) // _TICKS):
        parts.append(stroke(at(tick), y - 2, at(tick), y + 3, opacity=0.6))
        parts.append(label(max(at(tick), 6), y + 14, f"{tick} s", size=10))
    for when, word in words[:_WORDS]:
        spoken = f' class="or-word" data-from="{when:.2f}"'
        parts.append(label(at(when) + 2, y + 30, word, anchor="start", size=12, more=spoken))
    high = y + (38 if words else 20)
    parts.append(f'<line class="or-playhead" y1="0" y2="{high:g}" stroke="#D55E00" stroke-width="2"/>')
    inner = drawing(parts, wide, high, "the sound, and the target passes that committed its tokens", scale=1.4)
    return Drawing(
        f'<div class="or-wide or-strip" tabindex="0" role="group" aria-label="sound" data-seconds="{duration:.3f}" '
        f'style="overflow-x:auto"><div style="min-width:300px">{inner}</div></div>'
    )
