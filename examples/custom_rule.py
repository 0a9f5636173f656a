"""An acceptance rule: accept like rejection sampling, or with a fixed chance what that would reject.

Prints, for two settings, the tokens per target pass and the total variation. At chance 0 the rule is exact.
"""

from dataclasses import dataclass

from outrider.core.decode import decode
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.rules.acceptance import strict
from outrider.core.rules.rejection import rejection
from outrider.core.testing.table_target import TableTarget
from outrider.core.trace import Trace


@dataclass(frozen=True, kw_only=True)
class SecondChance:
    chance: float = 0.2

    @property
    def lossless(self) -> bool:
        return self.chance == 0

    def accept(self, distribution, left, q, depth):
        """The chance to accept each token: `left` is what earlier siblings left of p, q the drafter's distribution."""
        exact = strict(left, q)  # min(1, p / q)
        return (exact + (1 - exact) * self.chance) * (distribution.probs > 0)

    def __call__(self, draft, scores, rng):
        return rejection(draft, scores, rng, self.accept)


if __name__ == "__main__":
    for chance in (0.0, 0.2):
        target, small = TableTarget(100, sharpness=2.0), TableTarget(100, sharpness=2.0, blur=0.5)
        drafter, rule = DraftModel(small, length=4), SecondChance(chance=chance)
        steps = decode(target, drafter, rule, [[1, 2]], max_new_tokens=200, seed=0)
        summary = Trace(tuple(steps)).summary()
        print(f"chance {chance}: {summary.tokens_per_pass:.2f} tokens per target pass, ", end="")
        print(f"{summary.total_variation:.2f} total variation")
