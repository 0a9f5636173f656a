"""Redraw the middle of a picture: the codes around it are forced, whatever the drafter.

Writes the picture before and after. Prints how many codes around the middle are those of the first picture, and the
tokens per target pass: forced codes are guesses that are always right.
"""

import argparse
from pathlib import Path

from outrider import image
from outrider.core.constraint import Positions

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--prompt", default="red heart")
parser.add_argument("--then", default="yellow star")
parser.add_argument("--border", type=int, default=4, help="rows and columns of codes to keep on each side")
parser.add_argument("--output", type=Path, default=Path(), help="the folder to write to")
options = parser.parse_args()

im = image.load("emoji")
before = im.generate(options.prompt, seed=0)
side, border = len(before.grid), options.border


def kept(place: int) -> bool:
    row, column = divmod(place, side)
    return not (border <= row < side - border and border <= column < side - border)


around = Positions([(code,) if kept(place) else None for place, code in enumerate(before.tokens)])
after = im.generate(options.then, seed=0, constraint=around)
pairs = list(enumerate(zip(before.tokens, after.tokens, strict=True)))
same = sum(old == new for place, (old, new) in pairs if kept(place))
print(f"{same} of {sum(kept(place) for place, _ in pairs)} codes around the middle kept")
print(f"{after.trace.summary().tokens_per_pass:.2f} tokens per target pass")
for name, result in (("before", before), ("after", after)):
    result.image.resize((256, 256)).save(options.output / f"{name}.png")
