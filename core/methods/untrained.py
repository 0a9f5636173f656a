"""Rows of the drafters that need neither training nor a smaller model: those that guess from what was read and scored,
the target itself with a thinner cache or fewer bits, or with layers skipped, and what merges or chooses drafters."""

from __future__ import annotations

from outrider.core.drafters.combined.adaptive import Adaptive
from outrider.core.drafters.combined.ensemble import Ensemble
from outrider.core.drafters.combined.guarded import guarded
from outrider.core.drafters.lookup.input_guided import InputGuided
from outrider.core.drafters.lookup.ngram import ANPD, NGrammys
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.drafters.lookup.retrieval import REST
from outrider.core.drafters.lookup.suffix import Suffix
from outrider.core.drafters.lookup.token_recycling import TokenRecycling
from outrider.core.drafters.parallel_decoding.jacobi import Jacobi
from outrider.core.drafters.parallel_decoding.lookahead import Lookahead
from outrider.core.drafters.self_speculative.layer_skip import draft_on_the_fly, draft_verify, swift
from outrider.core.drafters.self_speculative.sparse_view import qspec, sparse_cache, triforce
from outrider.core.methods.row import Method

_SMALL = {"prompt-lookup": {"length": 2}, "token-recycling": {"nodes": 3, "depth": 2}}

READ = (
    Method(
        name="jacobi",
        make=Jacobi,
        systems=(
            "Filler tokens + Jacobi decoding",
            "Speculative Jacobi decoding (SJD)",
            "Coupled redraws (MC-SJD, SJD-PAC's continuation)",
            "Spatial initialisation",
        ),
        summary="a window of guesses, renewed by every pass until it settles",
        paper="Accelerating Transformer Inference for Translation via Parallel Decoding (arXiv 2305.10427)",
        topology=("window",),
        trials=(
            {"window": 2, "renew": "greedy", "filler": "copy"},
            {"window": 2, "renew": "redraw", "filler": "random"},
            {"window": 2, "renew": "couple", "filler": "pad"},
            {"window": 2, "renew": "gumbel", "filler": "left", "columns": 2},
            {"window": 3, "renew": "couple", "filler": "above", "columns": 2},
        ),
    ),
    Method(
        name="prompt-lookup",
        make=PromptLookup,
        systems=("LLMA", "Prompt lookup"),
        summary="copy what followed the longest recent match in the text or in references",
        paper="Inference with Reference: Lossless Acceleration of Large Language Models (arXiv 2304.04487)",
        topology=("chain",),
        trials=({"length": 2, "longest": 2}, {"length": 2, "references": ((0, 1, 2, 0, 2, 1, 1),)}),
    ),
    Method(
        name="input-guided",
        make=InputGuided,
        systems=("Aggressive (input-guided) decoding",),
        summary="copy the input; after a mismatch go on by single tokens until it is met again",
        paper="Instantaneous Grammatical Error Correction with Shallow Aggressive Decoding (arXiv 2106.04970)",
        topology=("chain", "tree"),
        trials=({"length": 2, "anchor": 1}, {"source": (0, 1, 2, 0, 2, 1, 1), "length": 2, "hedge": 1}),
    ),
    Method(
        name="rest",
        make=REST,
        systems=("REST",),
        summary="a tree of what follows the end of the text in a corpus, by exact suffix",
        paper="REST: Retrieval-Based Speculative Decoding (arXiv 2311.08252)",
        topology=("tree",),
        trials=({"store": ((0, 1, 2, 0, 2, 1, 1, 0, 0, 2),), "nodes": 3, "length": 2, "shortest": 1},),
    ),
    Method(
        name="anpd",
        make=ANPD,
        systems=("ANPD",),
        summary="a chain read off n-gram counts of several levels, which every token updates",
        paper="Lossless Acceleration of LLM via Adaptive N-gram Parallel Decoding (arXiv 2404.08698)",
        topology=("chain",),
        trials=({"length": 2, "levels": 2},),
    ),
    Method(
        name="n-grammys",
        make=NGrammys,
        systems=("N-Grammys",),
        summary="continuations from the text and from the target's own bigrams, side by side",
        paper="The N-Grammys: Accelerating Autoregressive Inference with Learning-Free Batched Speculation "
        "(arXiv 2411.03786)",
        topology=("tree",),
        needs=("model",),
        trials=({"drafts": 2, "length": 2},),
    ),
    Method(
        name="lookahead",
        make=Lookahead,
        systems=("LOOKAHEAD",),
        summary="Jacobi trajectories make n-grams beside those that are tried, in the same pass",
        paper="Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (arXiv 2402.02057)",
        topology=("tree",),
        trials=({"window": 2, "ngram": 2, "guesses": 2}, {"window": 1, "ngram": 3, "guesses": 2}),
    ),
    Method(
        name="suffix",
        make=Suffix,
        systems=("Suffix automaton (SAM-Decoding)", "SuffixDecoding"),
        summary="a tree of what followed the longest matches in the text and in past outputs, by frequency",
        paper="SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666)",
        topology=("tree",),
        trials=({"nodes": 3, "depth": 2},),
    ),
    Method(
        name="token-recycling",
        make=TokenRecycling,
        systems=("Token Recycling",),
        summary="a tree of the successors each token was last scored with",
        paper="Turning Trash into Treasure: Accelerating Inference with Token Recycling (arXiv 2408.08696)",
        topology=("tree",),
        trials=(
            {"nodes": 3, "depth": 2},
            {"shape": (-1, -1, 0), "successors": 2},
            {"shape": "static", "nodes": 3, "depth": 2},
        ),
    ),
)

THINNED = (
    Method(
        name="sparse-cache",
        make=sparse_cache,
        systems=("MagicDec",),
        summary="the target with the first and the latest entries of its cache drafts for itself with all of them",
        paper="MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation (arXiv 2408.11049)",
        topology=("chain",),
        trials=({"length": 2, "sinks": 1, "window": 2},),
    ),
    Method(
        name="triforce",
        make=triforce,
        systems=("TriForce's self-drafting",),
        summary="the target with those chunks of its cache that it asks for most drafts for itself with all of it",
        paper="TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding "
        "(arXiv 2404.11912)",
        topology=("chain",),
        trials=({"length": 2, "sinks": 1, "window": 2, "chunks": 2, "chunk": 2, "refresh": 2},),
    ),
    Method(
        name="qspec",
        make=qspec,
        systems=("QSpec",),
        summary="the target in fewer bits drafts for itself, over the same cache",
        paper="QSpec: Speculative Decoding with Complementary Quantization Schemes (arXiv 2410.11305)",
        topology=("chain",),
        trials=({"length": 2},),
    ),
)

MERGED = (
    Method(
        name="ensemble",
        make=Ensemble,
        systems=("Suffix first, else token recycling", "Merged drafts of several drafters"),
        summary="the likeliest guesses of several drafters, merged into one tree",
        paper="SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666)",
        topology=("tree",),
        trials=({"nodes": 3}, {"drafters": ("prompt-lookup", "token-recycling"), "nodes": 3}),
    ),
)

CHOSEN = (
    Method(
        name="adaptive",
        make=Adaptive,
        systems=("Adaptive drafter choice", "Complexity estimate"),
        summary="the drafter that has been worth most, chosen for each step; or by how complex the text looks",
        paper="Context-Aware Assistant Selection for Improved Inference Acceleration (arXiv 2408.08470)",
        topology=("chain", "tree"),
        trials=(
            {"drafters": ("prompt-lookup", "token-recycling", "plain"), "options": _SMALL},
            {"drafters": ("prompt-lookup", "token-recycling"), "options": _SMALL, "by": "complexity"},
        ),
    ),
    Method(
        name="guarded",
        make=guarded,
        systems=("Break-even guard",),
        summary="any drafter, switched off where it is predicted to be slower than plain decoding",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
        topology=("chain", "tree"),
        trials=({"options": {"length": 2}, "probe": 2, "least": 1.5},),
    ),
)

SKIPPED = (
    Method(
        name="draft-verify",
        make=draft_verify,
        systems=("Draft & Verify",),
        summary="the target without a fixed set of sublayers, found beforehand by Bayesian optimisation",
        paper="Draft & Verify: Lossless LLM Acceleration via Self-Speculative Decoding (arXiv 2309.08168)",
        topology=("chain",),
        needs=("skip",),
        trials=({"skip": ("mlp.0",), "length": 2, "bound": 0.4},),
    ),
    Method(
        name="swift",
        make=swift,
        systems=("SWIFT",),
        summary="the target without sublayers that are searched for on the running text; a tree cut where unsure",
        paper="SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv 2410.06916)",
        topology=("tree",),
        trials=({"nodes": 3, "width": 2, "depth": 2, "window": 2, "bayes": 0},),
    ),
    Method(
        name="draft-on-the-fly",
        make=draft_on_the_fly,
        systems=("Draft on the Fly",),
        summary="the target without the sublayers that change least on the prompt",
        paper="Draft on the Fly: Adaptive Self-Speculative Decoding using Cosine Similarity (arXiv 2410.01028)",
        topology=("chain",),
        trials=({"length": 2, "share": 0.5, "bound": 0.3},),
    ),
)
