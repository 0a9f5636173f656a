"""Generate text with a drafter and compare it with plain decoding.

Prints the text, whether the tokens are those of plain decoding, and the tokens per target pass.
"""

import argparse

from outrider import text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--drafter", default="draft-model", help="a name of `outrider methods`")
parser.add_argument("--max-new-tokens", type=int, default=64)
options = parser.parse_args()

lm = text.load(options.model)
prompt = "Write two sentences about the sea."
plain = lm.generate(prompt, drafter=None, max_new_tokens=options.max_new_tokens)
fast = lm.generate(prompt, drafter=options.drafter, max_new_tokens=options.max_new_tokens)

print(fast.text)
print("same tokens as plain decoding:", fast.tokens == plain.tokens)
print(f"{fast.trace.summary().tokens_per_pass:.2f} tokens per target pass")
