"""What the lessons in notebooks/ share: displays, drawings and intervals. Needs IPython (the extra `notebooks`)."""

from outrider.app.lessons.display import SMALL, explore, picture, say, scaled, show
from outrider.app.lessons.drawings import bars, distributions, token_strip
from outrider.app.lessons.intervals import Interval, accepted, difference, mean, ratio, tokens_per_pass

__all__ = [
    "SMALL",
    "Interval",
    "accepted",
    "bars",
    "difference",
    "distributions",
    "explore",
    "mean",
    "picture",
    "ratio",
    "say",
    "scaled",
    "show",
    "token_strip",
    "tokens_per_pass",
]
