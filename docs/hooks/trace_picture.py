"""Draws docs/images/trace.svg, the first target passes of a real trace: `python docs/hooks/trace_picture.py`.

Needs the default model. Each row is a target pass, with the tokens it committed and a rejected guess beside them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from outrider import text
from outrider.app.viz.svg import box, drawing, label, visible
from outrider.app.viz.token_styles import STYLES, Kind, nodes_of
from outrider.core.trace import Step

PROMPT, DRAFTER, PASSES = "Why is the sky blue?", "eagle3", 9
WIDTH, LEFT, ROW, CHARACTER = 820, 92, 31, 7.6
KINDS: tuple[tuple[Kind, str], ...] = (
    ("drafted", "drafted, accepted"),
    ("rejected", "drafted, rejected"),
    ("resampled", "the target's own token"),
)
FONT = ' font-family="ui-monospace, Menlo, Consolas, monospace"'


def chip(x: float, y: float, word: str, kind: Kind) -> tuple[str, float]:
    """A token in a box, and the box's width."""
    look = STYLES["resampled" if kind == "bonus" else kind]
    width = CHARACTER * len(word) + 12
    struck = ' text-decoration="line-through"' if kind == "rejected" else ""
    edge = f' stroke="{look.colour}" stroke-width="1.4"'
    parts = box(x, y, width, 22, look.colour + "33", more=edge, round_=5)
    return parts + label(x + width / 2, y + 15, word, size=12.5, more=struck + FONT), width


def row(step: Step, number: int, piece: Callable[[int], str]) -> str:
    y = 62 + ROW * number
    parts = [label(14, y + 15, f"pass {number + 1}", anchor="start", size=12.5, dim=True)]
    x, rejected = float(LEFT), 0
    for kind, token, _, _ in nodes_of(step):
        rejected += kind == "rejected"
        if kind == "rejected" and rejected > 1:
            continue
        drawn, width = chip(x, y, visible(piece(token)).strip() or "␣", kind)
        parts.append(drawn)
        x += width + 7
    if rejected > 1:
        parts.append(label(x + 2, y + 15, f"{rejected - 1} more rejected", anchor="start", size=11, dim=True))
    count = len(step.emitted)
    parts.append(label(WIDTH - 14, y + 15, f"{count} token{'s' * (count > 1)}", anchor="end", size=12.5))
    return "".join(parts)


def main() -> None:
    lm = text.load("smollm2-135m")
    steps = lm.generate(PROMPT, drafter=DRAFTER, max_new_tokens=64).trace.steps[:PASSES]
    height = 62 + ROW * PASSES + 38
    parts = [box(0.5, 0.5, WIDTH - 1, height - 1, "#ffffff", more=' stroke="#d0d7de"', round_=8)]
    parts.append(label(14, 26, f"“{PROMPT}” · SmolLM2-135M, drafter {DRAFTER}, greedy", anchor="start", size=14))
    x = 14.0
    for kind, words in KINDS:
        parts.append(box(x, 38, 12, 12, STYLES[kind].colour + "33", more=f' stroke="{STYLES[kind].colour}"', round_=3))
        parts.append(label(x + 18, 48, words, anchor="start", size=11.5, dim=True))
        x += 40 + 6.2 * len(words)
    parts += [row(step, number, lm.tokens.piece) for number, step in enumerate(steps)]
    total = sum(len(step.emitted) for step in steps)
    summary = f"{total} tokens in {PASSES} target passes. Plain decoding takes {total} passes for the same tokens."
    parts.append(label(14, height - 16, summary, anchor="start", size=13))
    svg = drawing(parts, WIDTH, height, f"{summary} One row per target pass.")
    svg = svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" color="#1f2328" ', 1)
    svg = svg.replace("font-family:inherit", "font-family:system-ui,sans-serif")
    (Path(__file__).parents[1] / "images" / "trace.svg").write_text(svg + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
