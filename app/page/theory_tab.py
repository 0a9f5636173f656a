"""The tab of theory: what a chain of guesses should bring, by length and by acceptance; nothing is measured.

Predicting is outrider.core.cost.theory's; this draws it, and puts it on the page.
"""

from __future__ import annotations

import gradio as gr

from outrider.app.page import validate
from outrider.app.page.controls import quiet
from outrider.app.page.runner import fault
from outrider.app.viz.charts import curves
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.cost.theory import best_length, break_even, expected_tokens, speedup


def theory(acceptance: float, cost: float, length: int, growth: float) -> Drawing:
    """What a chain of guesses should bring: the published formula, with verification that may grow with length."""
    acceptance = validate.number(acceptance, "acceptance", 0, 1)
    cost = validate.number(cost, "cost", 0, 1)
    length = validate.whole(length, "length", 0, 16)
    growth = validate.number(growth, "growth", 0, 0.5)

    def verify(tokens: int) -> float:
        return 1 + growth * (tokens - 1)

    here = speedup(acceptance, length, cost, verify(length + 1))
    best, gain = best_length(acceptance, cost, verify, max_length=16)
    bound = break_even(length, cost, verify(length + 1)) if length else 0.0
    lengths = [(float(one), speedup(acceptance, one, cost, verify(one + 1))) for one in range(17)]
    chances = [(one / 50, speedup(one / 50, length, cost, verify(length + 1))) for one in range(51)]
    tokens = [(float(one), expected_tokens(acceptance, one)) for one in range(17)]
    said = (
        f"{expected_tokens(acceptance, length):.2f} tokens a call, {here:.2f} times as fast as plain decoding. Best "
        f"length here: {best} ({gain:.2f} times). A draft of {length} breaks even "
        + ("never." if bound > 1 else f"at an acceptance of {bound:.0%}.")
    )
    drawn = (
        ("Speedup by length of the draft", "length of the draft", "speedup", lengths, (length, here, f"{here:.2f} x")),
        ("Speedup by acceptance", "acceptance of a guess", "speedup", chances, (acceptance, here, f"{here:.2f} x")),
        (
            "Tokens of a call by length",
            "length of the draft",
            "tokens",
            tokens,
            (length, expected_tokens(acceptance, length), ""),
        ),
    )
    cards = [
        (title, curves(title, across, {up: points}, here=spot, level=1.0)) for title, across, up, points, spot in drawn
    ]
    shown = [f'<div class="or-card"><h4>{safe(title)}</h4>{one}</div>' for title, one in cards]
    return Drawing(f'<div class="or-said" id="theory-said">{safe(said)}</div>{side_by_side(shown, 330)}')


def build_theory() -> None:
    """The tab."""
    gr.Markdown(
        "A draft of length *k*, whose guesses are each accepted with chance *a* and cost *c* of a plain pass, brings "
        "(1 - a^(k+1)) / (1 - a) tokens for (k c + v) passes, where v is what scoring k + 1 tokens costs "
        "(Leviathan et al., arXiv 2211.17192, with v = 1)."
    )
    with gr.Row():
        given = [
            gr.Slider(0, 1, 0.7, step=0.01, label="acceptance a", elem_id="theory-a"),
            gr.Slider(0, 1, 0.1, step=0.01, label="cost of a guess c"),
            gr.Slider(0, 16, 4, step=1, label="length k"),
            gr.Slider(0, 0.5, 0.02, step=0.01, label="each further token scored costs"),
        ]
    out = gr.HTML(theory(0.7, 0.1, 4, 0.02), elem_id="theory-out", min_height=260)
    for one in given:
        one.input(_theory, given, [out], **quiet())


def _theory(acceptance: float, cost: float, length: int, growth: float) -> Drawing:
    try:
        return theory(acceptance, cost, length, growth)
    except Exception as error:
        return fault(error)
