"""Decode requests that enter and leave a batch while others are decoded (continuous batching).

Prints each answer when it is finished, with its number, and at the end the tokens per target pass of each and
how many tokens at the beginning of its prompt were not read again.
"""

import argparse

from outrider import text

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--batch-size", type=int, default=4, help="requests decoded at once; the others wait")
parser.add_argument("--max-new-tokens", type=int, default=24)
options = parser.parse_args()

lm = text.load(options.model)
with lm.batch(rows=options.batch_size, drafter="prompt-lookup", max_new_tokens=options.max_new_tokens) as batch:
    requests = [batch.add(f"Name a town that starts with the letter {letter}.") for letter in "ABCDEF"]
    for piece in batch:
        if piece.finish_reason is not None:
            print(f"{piece.row}: {requests[piece.row].text!r}")

for request in requests:
    tokens_per_pass = request.result.trace.summary().tokens_per_pass
    print(f"{request.number}: {tokens_per_pass:.2f} tokens per target pass, {request.reused} prompt tokens reused")
