"""What the lessons in notebooks/ share: displays, drawings and intervals. Needs IPython (the extra `notebooks`)."""

from outrider.app.lessons.costs import RoundCost, same_text, speedup
from outrider.app.lessons.display import SMALL, explore, picture, say, scaled, show
from outrider.app.lessons.drawings import bars, distributions, token_strip
from outrider.app.lessons.intervals import (
    Interval,
    accepted,
    by_prompt,
    difference,
    equivalents_per_token,
    mean,
    ratio,
    tokens_per_pass,
)

__all__ = [
    "SMALL",
    "Interval",
    "RoundCost",
    "accepted",
    "bars",
    "by_prompt",
    "difference",
    "distributions",
    "equivalents_per_token",
    "explore",
    "mean",
    "picture",
    "ratio",
    "same_text",
    "say",
    "scaled",
    "show",
    "speedup",
    "token_strip",
    "tokens_per_pass",
]
