"""Draw an image under an exact and under a relaxed acceptance rule.

Writes one PNG per rule. Prints the tokens per target pass and the total variation: 0 for the exact rule; for the
relaxed one, how far the distributions it emitted from were from the target's, summed over the image.
"""

import argparse
from pathlib import Path

from outrider import image

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prompt", default="red heart")
parser.add_argument("--delta", type=float, default=0.1, help="mass that neighbouring codes may add; 0 is exact")
parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to")
options = parser.parse_args()

im = image.load("emoji")
for rule, rule_options in (("exact", {}), ("lantern", {"delta": options.delta})):
    out = im.generate(options.prompt, drafter="jacobi", rule=rule, rule_options=rule_options, seed=0)
    out.image.resize((256, 256)).save(options.output / f"{rule}.png")
    summary = out.trace.summary()
    print(
        f"{rule}: {summary.tokens_per_pass:.2f} tokens per target pass, {summary.total_variation:.2f} total variation"
    )
