"""Read a text aloud with coupled Jacobi decoding.

Writes a WAV file. Prints the seconds of sound and the tokens per target pass.
"""

import argparse

from outrider import speech

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--text", default="Good morning.")
parser.add_argument("--output", default="morning.wav")
options = parser.parse_args()

sp = speech.load()
out = sp.generate(options.text, drafter="jacobi", seed=0)
out.save(options.output)
print(f"{len(out.sound.samples) / sp.sample_rate:.1f} seconds of sound")
print(f"{out.trace.summary().tokens_per_pass:.2f} tokens per target pass")
