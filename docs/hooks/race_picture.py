"""Draws docs/images/race.svg, an animation of a real trace: `python docs/hooks/race_picture.py`.

Needs the default model. Plain decoding and a drafter write the same answer side by side, a target pass a tick; both
come from traces. Readers who ask for less motion see the last frame.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from outrider import text
from outrider.app.viz.svg import box, drawing, label, visible
from outrider.app.viz.token_styles import STYLES, Kind, nodes_of
from outrider.core.trace import Step

PROMPT, DRAFTER, TOKENS = "Why is the sky blue?", "eagle3", 44
WIDTH, ROW, CHARACTER, LEFT = 860, 27, 7.2, 16
TICK, PAUSE = 0.28, 3.5  # seconds a target pass, and at the end
FONT = ' font-family="ui-monospace, Menlo, Consolas, monospace"'
KINDS: tuple[tuple[Kind, str], ...] = (
    ("drafted", "drafted by a small head, accepted by the model"),
    ("bonus", "the model's own token"),
)


def shown_from(number: int, parts: str) -> str:
    """A group that appears with a target pass."""
    return f'<g class="p p{number}">{parts}</g>'


def words(steps: Sequence[Step], piece: Callable[[int], str], top: float) -> tuple[list[str], float]:
    """The committed tokens as boxes in lines, and the height below them."""
    x, y, parts = float(LEFT), top, []
    for number, step in enumerate(steps, 1):
        for kind, token, _, _ in nodes_of(step):
            if kind == "rejected":
                continue
            word = visible(piece(token)).strip() or "␣"
            look = STYLES["drafted" if kind == "drafted" else "bonus"]
            width = CHARACTER * len(word) + 9
            if x + width > WIDTH - LEFT:
                x, y = float(LEFT), y + ROW
            chip = box(x, y, width, 20, look.colour + "33", more=f' stroke="{look.colour}"', round_=4)
            parts.append(shown_from(number, chip + label(x + width / 2, y + 14, word, size=12, more=FONT)))
            x += width + 4
    return parts, y + ROW


def passes(count: int, total: int, y: float) -> list[str]:
    """A square for each target pass."""
    side = (WIDTH - 2 * LEFT) / total
    return [
        shown_from(number + 1, box(LEFT + side * number, y, side - 2, 8, "#57606a", round_=2))
        for number in range(count)
    ]


def style(total: int) -> str:
    seconds = TICK * total + PAUSE
    frames = []
    for number in range(1, total + 1):
        share = 100 * TICK * number / seconds
        frames.append(f"@keyframes k{number}{{0%,{share:.2f}%{{opacity:0}}{share + 0.01:.2f}%,100%{{opacity:1}}}}")
        frames.append(f".p{number}{{animation-name:k{number}}}")
    moving = f".p{{animation-duration:{seconds:.2f}s;animation-iteration-count:infinite}}" + "".join(frames)
    return f"<style>@media (prefers-reduced-motion: no-preference){{{moving}}}</style>"


def main() -> None:
    lm = text.load("smollm2-135m")
    plain = lm.generate(PROMPT, drafter=None, max_new_tokens=TOKENS)
    drafted = lm.generate(PROMPT, drafter=DRAFTER, max_new_tokens=TOKENS)
    assert plain.tokens == drafted.tokens
    total, few = len(plain.trace.steps), len(drafted.trace.steps)
    parts, y = [style(total)], 62.0
    x = float(LEFT)
    for kind, what in KINDS:
        colour = STYLES[kind].colour
        parts.append(box(x, 38, 12, 12, colour + "33", more=f' stroke="{colour}"', round_=3))
        parts.append(label(x + 18, 48, what, anchor="start", size=11.5, dim=True))
        x += 40 + 6.2 * len(what)
    for title, result in (("Plain decoding", plain), (f"Speculative decoding, drafter {DRAFTER}", drafted)):
        steps = result.trace.steps
        parts.append(label(LEFT, y + 14, title, anchor="start", size=13.5, more=' font-weight="600"'))
        done = label(WIDTH - LEFT, y + 14, f"{len(steps)} target passes", anchor="end", size=13)
        parts.append(shown_from(len(steps), done))
        lines, bottom = words(steps, lm.tokens.piece, y + 24)
        parts += [*lines, *passes(len(steps), total, bottom + 2)]
        y = bottom + 26
    summary = f"The same {len(plain.tokens)} tokens in {few} target passes instead of {total}."
    parts.append(label(LEFT, y + 12, summary, anchor="start", size=13.5))
    height = y + 28
    head = label(LEFT, 25, f"“{PROMPT}” · SmolLM2-135M, greedy; a tick is a target pass", anchor="start", size=14)
    frame = box(0.5, 0.5, WIDTH - 1, height - 1, "#ffffff", more=' stroke="#d0d7de"', round_=8)
    svg = drawing([frame, head, *parts], WIDTH, height, f"{summary} The boxes appear as they are committed.")
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" color="#1f2328" ', 1)
    svg = svg.replace("font-family:inherit", "font-family:system-ui,sans-serif")
    (Path(__file__).parents[1] / "images" / "race.svg").write_text(svg + "\n", encoding="utf-8")
    print(summary)


if __name__ == "__main__":
    main()
