"""What would make a run faster: the speedup that theory predicts by draft length and acceptance, with the run as a dot.

Estimates a run's acceptance and costs from its trace, and draws the predictions of outrider.core.cost.theory.
"""

from __future__ import annotations

from dataclasses import dataclass

from outrider.app.page import validate
from outrider.app.page.recordings import Recording
from outrider.app.page.render import speedups
from outrider.app.viz.charts import curves
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.cost.theory import best_length, break_even, expected_tokens, speedup

_LONGEST = 16
FORMULA = (
    "A draft of *k* guesses, each accepted with probability *a* and made at *c* times the cost of a plain target pass, "
    "gives (1 - a^(k+1)) / (1 - a) tokens for the cost of k c + v passes, where *v* is the cost of checking k + 1 "
    "tokens (Leviathan et al., arXiv 2211.17192, with v = 1)."
)


@dataclass(frozen=True)
class Estimate:
    """A run in the terms of the theory."""

    acceptance: float = 0.7  # of a guess whose predecessors were accepted
    cost: float = 0.1  # of a guess, in plain target passes
    length: float = 4.0  # guesses in a row, on average
    growth: float = 0.02  # cost of checking each further token, in plain target passes; known after a race
    tokens: float | None = None  # per target pass
    speedup: float | None = None  # measured, if plain decoding was run too


def estimate(recording: Recording | None) -> Estimate:
    """The estimate from a recording; the defaults where it drafted nothing."""
    if recording is None:
        return Estimate()
    summary, steps = recording.trace.summary(), recording.trace.steps
    drafting = [step for step in steps if step.drafted]
    if not drafting:
        return Estimate()
    refused = sum("resampled" in step.sources for step in drafting)
    acceptance = summary.accepted / max(summary.accepted + refused, 1)
    depths = sum(_depth(step.parents) for step in drafting)
    length = depths / len(drafting)
    own = sum(step.times.score for step in drafting) / len(drafting)
    plain = recording.plain.trace.summary() if recording.plain is not None else None
    base = plain.times.score / max(plain.target_passes, 1) if plain else own
    cost = sum(step.times.draft for step in drafting) / max(depths, 1) / base if base else 0.0
    growth = (own / base - 1) / max(length, 1) if plain and base else Estimate.growth
    ratios = speedups(recording) if recording.plain is not None else []
    measured = ratios[len(ratios) // 2] if ratios else None
    near = (round(min(max(value, 0.0), high), 2) for value, high in ((acceptance, 1), (cost, 1), (growth, 0.5)))
    acceptance, cost, growth = near
    return Estimate(acceptance, cost, length, growth, summary.tokens_per_pass, measured)


def _depth(parents: tuple[int, ...]) -> int:
    depths: list[int] = []
    for parent in parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return max(depths, default=0)


def advice(run: Estimate) -> str:
    """What would gain most for a run, by the theory."""
    if run.tokens is None:
        return "After a run with guesses, its own acceptance and costs stand here."
    found = (
        f"In this run {run.acceptance:.0%} of the guesses that counted were accepted, a guess cost {run.cost:.0%} of "
    )
    if run.speedup is None:
        unknown = "what checking several tokens costs; a usual value stands below."
        return f"{found}a target pass. A race with plain decoding measures {unknown}"
    now = _best(run.acceptance, run.cost, run.growth)[1]
    gains = {
        "a drafter whose guesses are accepted more often (10 points)": _best(
            min(run.acceptance + 0.1, 1.0), run.cost, run.growth
        )[1],
        "cheaper guesses (half the cost)": _best(run.acceptance, run.cost / 2, run.growth)[1],
        "cheaper checking of several tokens, as on a GPU": _best(run.acceptance, run.cost, run.growth / 2)[1],
    }
    best, gain = max(gains.items(), key=lambda item: item[1])
    length = _best(run.acceptance, run.cost, run.growth)[0]
    text = f"{found}a target pass, and checking one more guess in a row {run.growth:.0%}. "
    if length == 0:
        text += "At these costs no draft pays. "
    elif abs(length - run.length) > 1:
        text += f"Its drafts were {run.length:.1f} long; {length} would be best ({now:.2f}x). "
    else:
        text += f"Its drafts of {run.length:.1f} are about as long as is best ({now:.2f}x). "
    return text + f"Most would be gained by {best}: {gain:.2f}x."


def _best(acceptance: float, cost: float, growth: float) -> tuple[int, float]:
    return best_length(acceptance, cost, lambda tokens: 1 + growth * (tokens - 1), max_length=_LONGEST)


def theory(acceptance: float, cost: float, length: int, growth: float, run: Estimate | None = None) -> Drawing:
    """The predicted speedup of a chain draft; checking may cost more with each token. `run` is drawn as a dot."""
    acceptance = validate.number(acceptance, "acceptance", 0, 1)
    cost = validate.number(cost, "cost", 0, 1)
    length = validate.whole_number(length, "length", 0, _LONGEST)
    growth = validate.number(growth, "growth", 0, 0.5)

    def verify(tokens: int) -> float:
        return 1 + growth * (tokens - 1)

    here = speedup(acceptance, length, cost, verify(length + 1))
    best, gain = _best(acceptance, cost, growth)
    bound = break_even(length, cost, verify(length + 1)) if length else 0.0
    by_length = [(float(k), speedup(acceptance, k, cost, verify(k + 1))) for k in range(_LONGEST + 1)]
    by_acceptance = [(i / 50, speedup(i / 50, length, cost, verify(length + 1))) for i in range(51)]
    tokens = [(float(k), expected_tokens(acceptance, k)) for k in range(_LONGEST + 1)]
    caption = (
        f"The theory gives {expected_tokens(acceptance, length):.2f} tokens per target pass and {here:.2f} times the "
        f"speed of plain decoding. The best draft length is {best} ({gain:.2f} times). A draft of length {length} "
        + ("never breaks even." if bound > 1 else f"breaks even at an acceptance rate of {bound:.0%}.")
    )
    spots = [(length, here, f"{here:.2f} x"), (acceptance, here, f"{here:.2f} x")]
    spots.append((length, expected_tokens(acceptance, length), ""))
    if run is not None and run.tokens is not None:
        at = min(run.length, float(_LONGEST))
        if run.speedup is not None:
            spots[0] = (at, run.speedup, f"your run {run.speedup:.2f} x")
            spots[1] = (run.acceptance, run.speedup, f"your run {run.speedup:.2f} x")
        spots[2] = (at, run.tokens, f"your run {run.tokens:.2f}")
    plots = (
        ("Speedup by draft length", "draft length", "speedup", by_length),
        ("Speedup by acceptance", "acceptance rate", "speedup", by_acceptance),
        ("Tokens per target pass by draft length", "draft length", "tokens", tokens),
    )
    cards = [
        f'<div class="or-card"><h3>{safe(title)}</h3>{curves(title, x, {y: points}, here=spot, level=1.0)}</div>'
        for (title, x, y, points), spot in zip(plots, spots, strict=True)
    ]
    return Drawing(f'<p class="or-caption">{safe(caption)}</p>{side_by_side(cards, 280)}')
