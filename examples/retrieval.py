"""Answer a question from documents with RaLMSpec: lookups are speculated on and verified together.

Prints the answer, whether it is that of one lookup every few tokens, and the calls of the document store of both.
Needs the extra `retrieval`.
"""

import argparse

from outrider import text
from outrider.text.rag.ralm import Speculation, Writer
from outrider.text.rag.retrievers import BM25

DOCUMENTS = [
    "Reykjavik is the capital of Iceland and its largest town.",
    "Geysir is a hot spring in the southwest of Iceland; it gave all geysers their name.",
    "Lisbon is the capital of Portugal, at the mouth of the Tagus.",
    "The Tagus is the longest river of the Iberian Peninsula.",
]

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("question", nargs="?", default="What is the capital of Iceland?")
parser.add_argument("--model", default="smollm2-135m")
parser.add_argument("--max-new-tokens", type=int, default=32)
options = parser.parse_args()

lm = text.load(options.model)
writer = Writer(lm, BM25(DOCUMENTS), drafter="prompt-lookup", max_new_tokens=options.max_new_tokens)
plain = writer.plain(options.question)
fast = writer.speculative(options.question, Speculation(ahead=3))
print(fast.text)
print("same tokens as without speculation:", fast.tokens == plain.tokens)
print(f"calls of the store: {fast.lookups.calls}, without speculation {plain.lookups.calls}")
