"""Speak a sentence that begins as another take of it did and ends at a given length.

Writes constrained.wav. Prints how many tokens of the beginning are kept, whether the last token is the end, and the
tokens per target pass: forced tokens are guesses that are always right.
"""

import argparse
from pathlib import Path

from outrider import speech
from outrider.core.constraint import Positions

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", default="Good morning to all of you.")
parser.add_argument("--kept", type=int, default=20, help="tokens of the first take to begin with")
parser.add_argument("--output", type=Path, default=Path("constrained.wav"))
options = parser.parse_args()

voice = speech.load()
first = voice.generate(options.text, seed=1).tokens
free = [tuple(range(first[-1]))] * (len(first) - options.kept - 1)  # any code, but not yet the end token
shape = Positions([*((token,) for token in first[: options.kept]), *free, (first[-1],)])
second = voice.generate(options.text, seed=2, constraint=shape)
same = sum(a == b for a, b in zip(first[: options.kept], second.tokens, strict=False))
print(
    f"{same} of {options.kept} tokens kept, {len(second.tokens)} tokens as before: {len(first) == len(second.tokens)}"
)
print(f"{second.trace.summary().tokens_per_pass:.2f} tokens per target pass")
second.save(str(options.output))
