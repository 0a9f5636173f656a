"""Prove a drafter and rules of your own exact: enumerate every random decision of the real loop.

Prints the largest total variation between the output's distribution and the target's: rounding for an exact method,
far more for a relaxed rule.
"""

from custom_drafter import LastTime
from custom_rule import SecondChance

from outrider.core.distribution import Sampling
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.testing.table_target import TableTarget

PROMPTS = [[0, 1, 0], [2]]  # rows of different lengths share a batch
SAMPLING = Sampling(temperature=0.7, repetition_penalty=1.3)


def target(blur=0.0):
    """A table of three tokens: small enough to enumerate every branch."""
    return TableTarget(3, sharpness=1.0, blur=blur)


def distance(drafter, rule) -> float:
    case = Case(target=target, drafter=drafter, rule=rule, prompts=PROMPTS, sampling=SAMPLING, limits=(3, 2))
    expected = [
        target_distribution(target(), prompt, SAMPLING, limit) for prompt, limit in zip(PROMPTS, (3, 2), strict=True)
    ]
    return max(map(total_variation, enumerate_output(case), expected))


if __name__ == "__main__":
    print(f"LastTime, exact rule:      {distance(LastTime, Exact()):.1e}")
    for chance in (0.0, 0.2):
        rule = SecondChance(chance=chance)
        print(f"SecondChance(chance={chance}): {distance(lambda: DraftModel(target(blur=0.5), length=2), rule):.1e}")
