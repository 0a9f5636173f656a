"""Speech as a strip: its sound along the time, and under it which round of verifying brought which part.

A pure function of steps, on a page and in a notebook alike. Sound comes as numbers; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Sequence

from outrider.app.viz.svg import Drawing, box, drawing, label, safe, stroke
from outrider.app.viz.token_styles import LOOKS
from outrider.core.trace import Step


def strip(
    steps: Sequence[Step],
    starts: Sequence[float],
    seconds: float,
    *,
    wave: Sequence[float] = (),
    mel: str = "",
    words: Sequence[tuple[float, str]] = (),
    clock: Sequence[float] | None = None,
    current: int | None = None,
) -> Drawing:
    """Sound along the time, and under it which round of verifying brought which part, token by token.

    `starts` are when tokens begin to be heard; `wave` the sound's envelope; `mel` a picture as data; `clock` when each
    round came, for a replay; `current` the round that is looked at."""
    wide, whole = 880.0, max(seconds, 1e-6)

    def at(time: float) -> float:
        return wide * min(time / whole, 1.0)

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
    place = 0
    for count, one in enumerate(steps):
        mine = list(range(place, min(place + len(one.emitted), len(starts))))
        place += len(one.emitted)
        if not mine:
            continue
        left = at(starts[mine[0]])
        right = at(starts[place] if place < len(starts) else whole)
        timed = f' class="or-late" style="--at:{clock[count]:.3f}s"' if clock is not None else ""
        timed += ' opacity=".22"' if current is not None and count > current else ""
        said = f"round {one.index + 1}: {len(one.emitted)} tokens of {len(one.drafted)} drafted"
        shade = 0.28 if count % 2 else 0.12
        inner = box(left, y, right - left, 12, "currentColor", title=said, more=f' fill-opacity="{shade}"')
        for level, token in enumerate(mine):
            x, end = at(starts[token]), at(starts[token + 1] if token + 1 < len(starts) else whole)
            kind = one.sources[level]
            inner += box(
                x, y + 14, max(end - x - 0.4, 0.6), 18, LOOKS[kind].colour, title=f"{said}; {LOOKS[kind].words}"
            )
        parts.append(f"<g{timed}>{inner}</g>")
    y += 36
    for tick in range(int(whole) + 1):
        parts.append(stroke(at(tick), y - 2, at(tick), y + 3, opacity=0.6))
        parts.append(label(max(at(tick), 6), y + 14, f"{tick} s", size=10))
    parts += [label(at(when) + 2, y + 30, word, anchor="start", size=11) for when, word in words]
    inner = drawing(parts, wide, y + (38 if words else 20), "sound and rounds of verifying", scale=1.4)
    return Drawing(f'<div class="or-wide" style="overflow-x:auto"><div style="min-width:520px">{inner}</div></div>')
