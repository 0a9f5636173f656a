"""Rows of the drafters that draft with the target itself, with fewer layers, fewer bits or a smaller KV cache."""

from __future__ import annotations

from outrider.core.drafters.self_speculative.layer_skip import draft_on_the_fly, draft_verify, swift
from outrider.core.drafters.self_speculative.sparse_view import qspec, sparse_cache, triforce
from outrider.core.methods.row import Input, Method

SPARSE_CACHE = Method(
    name="sparse-cache",
    make=sparse_cache,
    systems=("MagicDec",),
    summary="drafts with the target over the first and latest entries of its KV cache",
    paper="MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation (arXiv 2408.11049)",
    ranges={"window": (16, 512, 16)},
    topology=("chain",),
    samples_chain=True,
    self_drafting=True,
    test_options=({"length": 2, "sinks": 1, "window": 2},),
)

TRIFORCE = Method(
    name="triforce",
    make=triforce,
    systems=("TriForce's self-drafting",),
    summary="drafts with the target over the chunks of its KV cache that get the most attention",
    paper="TriForce: Lossless Acceleration of Long Sequence Generation with Hierarchical Speculative Decoding "
    "(arXiv 2404.11912)",
    topology=("chain",),
    samples_chain=True,
    self_drafting=True,
    test_options=({"length": 2, "sinks": 1, "window": 2, "chunks": 2, "chunk": 2, "refresh": 2},),
)

QSPEC = Method(
    name="qspec",
    make=qspec,
    systems=("QSpec",),
    summary="drafts with the target quantized to fewer bits, over the same KV cache",
    paper="QSpec: Speculative Decoding with Complementary Quantization Schemes (arXiv 2410.11305)",
    topology=("chain",),
    samples_chain=True,
    self_drafting=True,
    test_options=({"length": 2},),
)

DRAFT_VERIFY = Method(
    name="draft-verify",
    make=draft_verify,
    systems=("Draft & Verify",),
    summary="drafts with the target minus a fixed set of sublayers chosen by Bayesian optimization",
    paper="Draft & Verify: Lossless LLM Acceleration via Self-Speculative Decoding (arXiv 2309.08168)",
    topology=("chain",),
    samples_chain=True,
    inputs={"skip": Input.SKIP},
    self_drafting=True,
    test_options=({"skip": ("mlp.0",), "length": 2, "threshold": 0.4},),
)

SWIFT = Method(
    name="swift",
    make=swift,
    systems=("SWIFT",),
    summary="drafts a tree with the target minus sublayers that are chosen during generation",
    paper="SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration (arXiv 2410.06916)",
    topology=("tree",),
    self_drafting=True,
    test_options=(
        {"nodes": 3, "depth": 2, "threshold": 0.4, "candidates": (1, 2, 2, 3), "window": 2, "bayes_interval": 0},
    ),
)

DRAFT_ON_THE_FLY = Method(
    name="draft-on-the-fly",
    make=draft_on_the_fly,
    systems=("Draft on the Fly",),
    summary="drafts with the target minus the sublayers that change their input least on the prompt",
    paper="Draft on the Fly: Adaptive Self-Speculative Decoding using Cosine Similarity (arXiv 2410.01028)",
    topology=("chain",),
    samples_chain=True,
    self_drafting=True,
    test_options=({"length": 2, "skip_ratio": 0.5, "threshold": 0.3},),
)

ROWS = (
    SPARSE_CACHE,
    TRIFORCE,
    QSPEC,
    DRAFT_VERIFY,
    SWIFT,
    DRAFT_ON_THE_FLY,
)
