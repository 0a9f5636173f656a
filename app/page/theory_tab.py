"""The Theory tab: the speedup that theory predicts for a chain draft, by length and acceptance. Measures nothing.

Draws the predictions of outrider.core.cost.theory.
"""

from __future__ import annotations

import gradio as gr

from outrider.app.page import validate
from outrider.app.page.controls import redraw
from outrider.app.page.runner import error_box
from outrider.app.viz.charts import curves
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.cost.theory import best_length, break_even, expected_tokens, speedup


def theory(acceptance: float, cost: float, length: int, growth: float) -> Drawing:
    """The predicted speedup of a chain draft; the cost of verification may grow with the length of the draft."""
    acceptance = validate.number(acceptance, "acceptance", 0, 1)
    cost = validate.number(cost, "cost", 0, 1)
    length = validate.whole_number(length, "length", 0, 16)
    growth = validate.number(growth, "growth", 0, 0.5)

    def verify(tokens: int) -> float:
        return 1 + growth * (tokens - 1)

    here = speedup(acceptance, length, cost, verify(length + 1))
    best, gain = best_length(acceptance, cost, verify, max_length=16)
    bound = break_even(length, cost, verify(length + 1)) if length else 0.0
    by_length = [(float(k), speedup(acceptance, k, cost, verify(k + 1))) for k in range(17)]
    by_acceptance = [(i / 50, speedup(i / 50, length, cost, verify(length + 1))) for i in range(51)]
    tokens = [(float(k), expected_tokens(acceptance, k)) for k in range(17)]
    caption = (
        f"{expected_tokens(acceptance, length):.2f} tokens per target pass, {here:.2f} times as fast as plain "
        f"decoding. The best draft length is {best} ({gain:.2f} times). A draft of length {length} "
        + ("never breaks even." if bound > 1 else f"breaks even at an acceptance rate of {bound:.0%}.")
    )
    plots = (
        ("Speedup by draft length", "draft length", "speedup", by_length, (length, here, f"{here:.2f} x")),
        ("Speedup by acceptance", "acceptance rate", "speedup", by_acceptance, (acceptance, here, f"{here:.2f} x")),
        (
            "Tokens per target pass by draft length",
            "draft length",
            "tokens",
            tokens,
            (length, expected_tokens(acceptance, length), ""),
        ),
    )
    cards = [
        f'<div class="or-card"><h4>{safe(title)}</h4>{curves(title, x, {y: points}, here=spot, level=1.0)}</div>'
        for title, x, y, points, spot in plots
    ]
    return Drawing(f'<div class="or-caption" id="theory-caption">{safe(caption)}</div>{side_by_side(cards, 330)}')


def build_theory() -> None:
    """Build the tab's components and events."""
    gr.Markdown(
        "A draft of *k* tokens, each accepted with probability *a* and drafted at *c* times the cost of a plain target "
        "pass, yields (1 - a^(k+1)) / (1 - a) tokens for the cost of (k c + v) passes, where *v* is the cost of "
        "verifying k + 1 tokens (Leviathan et al., arXiv 2211.17192, with v = 1)."
    )
    with gr.Row():
        sliders = [
            gr.Slider(0, 1, 0.7, step=0.01, label="Acceptance rate a", elem_id="theory-a"),
            gr.Slider(0, 1, 0.1, step=0.01, label="Cost of a draft token c"),
            gr.Slider(0, 16, 4, step=1, label="Draft length k"),
            gr.Slider(0, 0.5, 0.02, step=0.01, label="Cost of verifying each further token"),
        ]
    output = gr.HTML(theory(0.7, 0.1, 4, 0.02), elem_id="theory-out", min_height=260)
    for slider in sliders:
        slider.input(_theory, sliders, [output], **redraw())


def _theory(acceptance: float, cost: float, length: int, growth: float) -> Drawing:
    try:
        return theory(acceptance, cost, length, growth)
    except Exception as error:
        return error_box(error)
