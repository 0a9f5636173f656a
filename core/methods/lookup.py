"""Rows of the drafters that look up continuations of the latest tokens in the text, a corpus or past target passes."""

from __future__ import annotations

from outrider.core.drafters.lookup import ngram, retrieval
from outrider.core.drafters.lookup.input_guided import InputGuided
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.lookup.sam import SamDecoding
from outrider.core.drafters.lookup.suffix import Suffix
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.methods.row import Input, Method
from outrider.core.protocol import Capability

PROMPT_LOOKUP = Method(
    name="prompt-lookup",
    make=PromptLookup,
    systems=("LLMA", "Prompt lookup"),
    summary="copies what followed the longest recent match in the text or in reference texts",
    paper="Inference with Reference: Lossless Acceleration of Large Language Models (arXiv 2304.04487)",
    topology=("chain",),
    inputs={"references": Input.TEXTS},
    vllm="ngram",
    capabilities=(Capability.BATCHED, Capability.CATCHES_UP, Capability.WEIGHT_FREE),
    test_options=({"length": 2, "max_ngram": 2}, {"length": 2, "references": ((0, 1, 2, 0, 2, 1, 1),)}),
)

INPUT_GUIDED = Method(
    name="input-guided",
    make=InputGuided,
    systems=("Aggressive (input-guided) decoding",),
    summary="copies the input; after a mismatch, decodes token by token until it matches again",
    paper="Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding (arXiv 2106.04970)",
    topology=("chain", "tree"),
    draft_tokens=("length",),
    modalities=("text", "speech"),
    inputs={"source": Input.TEXT},
    capabilities=(Capability.WEIGHT_FREE,),
    test_options=({"length": 2, "anchor": 1}, {"source": (0, 1, 2, 0, 2, 1, 1), "length": 2, "hedge": 1}),
)

REST = Method(
    name="rest",
    make=retrieval.REST,
    systems=("REST",),
    summary="drafts a tree of the continuations of the text's longest suffix found in a corpus",
    paper="REST: Retrieval-Based Speculative Decoding (arXiv 2311.08252)",
    ranges={"max_ngram": (1, 32, 1)},
    topology=("tree",),
    modalities=("text",),
    inputs={"store": Input.DATASTORE},
    capabilities=(Capability.WEIGHT_FREE,),
    test_options=({"store": ((0, 1, 2, 0, 2, 1, 1, 0, 0, 2),), "nodes": 3, "length": 2, "min_ngram": 1},),
)

ANPD = Method(
    name="anpd",
    make=ngram.ANPD,
    systems=("ANPD",),
    summary="drafts a chain from n-gram counts of several orders, updated with every token",
    paper="Lossless Acceleration of LLM via Adaptive N-gram Parallel Decoding (arXiv 2404.08698)",
    topology=("chain",),
    capabilities=(Capability.WEIGHT_FREE,),
    test_options=({"length": 2, "max_ngram": 2},),
)

N_GRAMMYS = Method(
    name="n-grammys",
    make=ngram.NGrammys,
    systems=("N-Grammys",),
    summary="drafts continuations from the text and from the target's bigrams, side by side",
    paper="The N-Grammys: Accelerating Autoregressive Inference with Learning-Free Batched Speculation "
    "(arXiv 2411.03786)",
    topology=("tree",),
    modalities=("text",),
    inputs={"model": Input.TARGET, "bigrams": Input.BIGRAMS},
    capabilities=(Capability.WEIGHT_FREE,),
    test_options=({"drafts": 2, "length": 2},),
)

SUFFIX = Method(
    name="suffix",
    make=Suffix,
    systems=("SuffixDecoding",),
    summary="drafts a tree of what followed the longest matches in the text and past outputs, by frequency",
    paper="SuffixDecoding: Extreme Speculative Decoding for Emerging AI Applications (arXiv 2411.04975)",
    topology=("tree",),
    vllm="suffix",
    capabilities=(Capability.BATCHED, Capability.CATCHES_UP, Capability.WEIGHT_FREE),
    test_options=({"nodes": 3, "depth": 2},),
)

SAM_DECODING = Method(
    name="sam-decoding",
    make=SamDecoding,
    systems=("SAM Decoding", "Suffix first, else token recycling"),
    summary="copies after the longest match in the text or a corpus; without a long one, token recycling drafts",
    paper="SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666)",
    topology=("tree",),
    modalities=("text",),
    inputs={"corpus": Input.DATASTORE},
    capabilities=(Capability.WEIGHT_FREE,),
    test_options=(
        {"length": 2, "threshold": 1, "nodes": 3},
        {"corpus": ((0, 1, 2, 0, 2, 1, 1, 0, 0, 2),), "length": 2, "threshold": 2, "bias": 0, "nodes": 2},
    ),
)

TOKEN_RECYCLING = Method(
    name="token-recycling",
    make=TokenRecycling,
    systems=("Token Recycling",),
    summary="drafts a tree from each token's most probable successors in past target passes",
    paper="Turning Trash into Treasure: Accelerating Inference with Token Recycling (arXiv 2408.08696)",
    topology=("tree",),
    inputs={"initial_table": Input.SUCCESSORS},
    capabilities=(Capability.BATCHED, Capability.CATCHES_UP, Capability.WEIGHT_FREE),
    test_options=(
        {"nodes": 3, "depth": 2},
        {"tree": (-1, -1, 0), "successors": 2},
        {"tree": "static", "nodes": 3, "depth": 2},
    ),
)

ROWS = (
    PROMPT_LOOKUP,
    INPUT_GUIDED,
    REST,
    ANPD,
    N_GRAMMYS,
    SUFFIX,
    SAM_DECODING,
    TOKEN_RECYCLING,
)
