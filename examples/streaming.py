"""Print text as it is decoded, and stop early.

Prints one line per target pass: how many tokens were drafted and accepted, and the text that became certain.
"""

import argparse

from outrider import text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--characters", type=int, default=200, help="stop after this much text")
parser.add_argument("--max-new-tokens", type=int, default=128)
options = parser.parse_args()

lm = text.load(options.model)
prompt = "Repeat this list three times: apples, pears, plums, cherries."
stream = lm.stream(prompt, drafter="suffix", max_new_tokens=options.max_new_tokens)
length = 0
for piece in stream:
    print(f"{len(piece.step.drafted):3} drafted, {piece.step.accepted:2} accepted: {piece.text!r}")
    length += len(piece.text)
    if length >= options.characters:
        stream.close()  # ends the generation and frees the cache

(result,) = stream.results
print(f"{len(result.tokens)} tokens in {len(result.trace.steps)} target passes")
