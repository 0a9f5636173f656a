"""What the lessons in notebooks/ share: displays, drawings, intervals, costs and timings. Needs IPython (the
extra `notebooks`)."""

from outrider.app.lessons.costs import RoundCost, same_text, speedup
from outrider.app.lessons.display import SMALL, explore, picture, say, scaled, show
from outrider.app.lessons.drawings import bars, distributions, rounds, token_strip
from outrider.app.lessons.intervals import (
    Interval,
    accepted,
    by_prompt,
    difference,
    equivalents_per_token,
    mean,
    median,
    median_ratio,
    ratio,
    tokens_per_pass,
)
from outrider.app.lessons.timings import Comparison, Timing, compare

__all__ = [
    "SMALL",
    "Comparison",
    "Interval",
    "RoundCost",
    "Timing",
    "accepted",
    "bars",
    "by_prompt",
    "compare",
    "difference",
    "distributions",
    "equivalents_per_token",
    "explore",
    "mean",
    "median",
    "median_ratio",
    "picture",
    "ratio",
    "rounds",
    "same_text",
    "say",
    "scaled",
    "show",
    "speedup",
    "token_strip",
    "tokens_per_pass",
]
