"""Compare drafters on a prompt: tokens per target pass, and time relative to plain decoding in the same run.

Prints one line per drafter. `outrider bench text` does the same over many prompts, in turns, with intervals.
"""

import argparse

from outrider import text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--drafters", nargs="+", default=["prompt-lookup", "suffix", "token-recycling", "ensemble"])
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

lm = text.load(options.model)
prompt = "Repeat this list three times: apples, pears, plums, cherries."
lm.generate(prompt, drafter=None, max_new_tokens=4)  # warms up
plain = lm.generate(prompt, drafter=None, max_new_tokens=options.max_new_tokens)
for name in options.drafters:
    out = lm.generate(prompt, drafter=name, max_new_tokens=options.max_new_tokens)
    summary = out.trace.summary()
    print(
        f"{name:16} {summary.tokens_per_pass:.2f} tokens per target pass, {summary.acceptance_rate:4.0%} accepted, "
        f"{plain.trace.summary().seconds / summary.seconds:.2f}x, same output: {out.tokens == plain.tokens}"
    )
