"""Rows of the acceptance rules: lossless ones, and relaxed ones with the options at which they are exact."""

from __future__ import annotations

import math

from outrider.core.methods.row import Input, Method
from outrider.core.rules.codebook import Annealed, Grouped, Lantern, LanternPlus
from outrider.core.rules.exact import Block, Exact, GumbelMatch, SampleMatch, Token
from outrider.core.rules.neighbours import AdditiveBeta, CoarseGroups, Tolerance, TopKMembership
from outrider.core.rules.relaxed import Distance, Lenience, Threshold, TopBeta, Trust, Typical, VerifyEvery

EXACT = Method(
    name="exact",
    make=Exact,
    systems=("The lossless default",),
    summary="picks a lossless rule by the kind of draft: block verification, rejection or matching",
    paper="Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)",
    topology=("chain", "tree", "window"),
    lossless=True,
    measured={"text": 2.05, "image": 5.18, "speech": 3.09},
)

TOKEN = Method(
    name="token",
    make=Token,
    systems=("Token rejection", "With replacement (SpecInfer)", "Without replacement", "One-hot tree"),
    summary="accepts a token with probability min(1, p/q), else draws from the residual distribution",
    paper="Accelerating Large Language Model Decoding with Speculative Sampling (arXiv 2302.01318)",
    topology=("chain", "tree", "window"),
    lossless=True,
)

BLOCK = Method(
    name="block",
    make=Block,
    systems=("Block verification",),
    summary="verifies a sampled chain as a whole, which accepts at least as many tokens as `token`",
    paper="Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)",
    topology=("chain",),
    samples_chain=True,
    lossless=True,
)

SAMPLE_MATCH = Method(
    name="sample-match",
    make=SampleMatch,
    systems=("Sample-and-match",),
    summary="draws the target's own token at every node and accepts the draft while it matches",
    paper="SpecExec: Massively Parallel Speculative Decoding (arXiv 2406.02532)",
    topology=("chain", "tree", "window"),
    lossless=True,
)

GUMBEL_MATCH = Method(
    name="gumbel-match",
    make=GumbelMatch,
    systems=("Gumbel-match",),
    summary="like `sample-match`, with noise keyed by position: the tokens equal those of plain decoding",
    paper="Parallel Sampling via coupled Gumbel noise, as in speculative coupled decoding (arXiv 2510.24211)",
    topology=("chain", "tree", "window"),
    lossless=True,
    same_tokens=True,
)

THRESHOLD = Method(
    name="threshold",
    make=Threshold,
    systems=("Threshold on p/q", "Deterministic verification", "Conservative verification"),
    summary="accepts if p/q reaches a threshold; exact at 1 or more",
    paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"threshold": 1.0},
    test_options=({"threshold": 0.5}, {}),
    measured={"text": 2.18, "speech": 2.87},
)

LENIENCE = Method(
    name="lenience",
    make=Lenience,
    systems=("Lenience",),
    summary="accepts with probability min(1, p / (l q)); exact at l = 1",
    paper="DistillSpec: Improving Speculative Decoding via Knowledge Distillation (arXiv 2310.08461)",
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"lenience": 1.0},
    measured={"text": 2.19, "speech": 3.62},
)

TOLERANCE = Method(
    name="tolerance",
    make=Tolerance,
    systems=("Tolerance (VADUSA)",),
    summary="accepts a token that is among tau draws from the target's distribution; exact at tau = 1",
    paper="Fast and High-Quality Auto-Regressive Speech Synthesis via Speculative Decoding (arXiv 2410.21951)",
    topology=("chain", "tree", "window"),
    defaults={"speech": {"tau": 30}},  # changes few recognised words (reports/speech)
    lossless=False,
    exact_at={"tau": 1},
    test_options=({"tau": 12}, {"tau": 2}),
    measured={"text": 2.05, "image": 5.6, "speech": 4.11},
    as_good=("image", "speech"),
)

ADDITIVE_BETA = Method(
    name="additive-beta",
    make=AdditiveBeta,
    systems=("Additive beta (SSD)",),
    summary="accepts with probability min(1, p/q + beta); exact at beta = 0",
    paper="Speech Speculative Decoding (arXiv 2505.15380)",
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"beta": 0.0},
    measured={"text": 2.05, "image": 6.78, "speech": 3.99},
)

TOP_K_MEMBERSHIP = Method(
    name="top-k-membership",
    make=TopKMembership,
    systems=("Top-k membership (Llasa+)",),
    summary="accepts the target's k most probable tokens, else draws from them; exact at k = 0",
    paper="Llasa+: Free Lunch for Accelerated and Streaming Llama-Based Speech Synthesis (arXiv 2508.06262)",
    ranges={"k": (0, 500, 1)},
    defaults={"speech": {"k": 10}},  # of 1,001 codes, as few as the paper's 500 of 65,536
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"k": 0},
    test_options=({"k": 2}, {"k": 1}),
    measured={"text": 4.64, "image": 11.47, "speech": 3.74},
)

COARSE_GROUPS = Method(
    name="coarse-groups",
    make=CoarseGroups,
    systems=("Coarse groups (PCG)",),
    summary="accepts by the mass of groups of tokens with similar embeddings; exact at similarity > 1",
    paper="Principled Coarse-Grained Acceptance for Speculative Decoding in Speech (arXiv 2511.13732)",
    topology=("chain", "tree", "window"),
    inputs={"embeddings": Input.EMBEDDINGS},
    modalities=("speech",),
    lossless=False,
    exact_at={"similarity": 1.5},
    test_options=({"similarity": 0.5}, {"similarity": 0.3}),
    measured={"speech": 3.26},
)

TYPICAL = Method(
    name="typical",
    make=Typical,
    systems=("Typical acceptance (Medusa)",),
    summary="accepts if p >= min(epsilon, delta exp(-entropy)); exact at epsilon = 1, delta = inf",
    paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774)",
    ranges={"delta": (0.05, 2, 0.05)},
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"epsilon": 1.0, "delta": math.inf},
    test_options=({}, {"epsilon": 0.3, "delta": 0.6}),
    measured={"text": 3.56, "image": 5.34, "speech": 3.19},
)

TRUST = Method(
    name="trust",
    make=Trust,
    systems=("Accept outright",),
    summary="accepts everything down to a depth, and verifies strictly below it; exact at depth 0",
    paper="Speculative Decoding and Beyond: An In-Depth Survey of Techniques (arXiv 2502.19732)",
    ranges={"depth": (0, 8, 1)},
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"depth": 0},
    test_options=({}, {"depth": 1}),
    measured={"text": 4.06, "speech": 4.95},
)

VERIFY_EVERY = Method(
    name="verify-every",
    make=VerifyEvery,
    systems=("Verify part",),
    summary="verifies every n-th level strictly and accepts the levels between; exact at every = 1",
    paper="Speculative Decoding and Beyond: An In-Depth Survey of Techniques (arXiv 2502.19732)",
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"every": 1},
    measured={"text": 3.72, "speech": 4.8},
)

TOP_BETA = Method(
    name="top-beta",
    make=TopBeta,
    systems=("Top-beta + gap (SpecDec)",),
    summary="accepts the target's beta most probable tokens within a gap of the top one; exact at beta = 0",
    paper="Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation "
    "(arXiv 2203.16487)",
    ranges={"beta": (0, 8, 1)},
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"beta": 0},
    test_options=({"beta": 3, "gap": 2.0}, {"beta": 1, "gap": 0.5}),
    measured={"text": 2.47, "speech": 1.8},
)

LANTERN = Method(
    name="lantern",
    make=Lantern,
    systems=("LANTERN",),
    summary="adds the mass of a code's nearest neighbours, up to delta, to its p; exact at delta = 0",
    paper="LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding (arXiv 2410.03355)",
    topology=("chain", "tree", "window"),
    inputs={"neighbours": Input.NEIGHBOURS},
    modalities=("image", "speech"),
    lossless=False,
    exact_at={"delta": 0.0},
    test_options=({"delta": 0.4, "k": 2}, {"delta": 0.2, "k": 1}),
    measured={"image": 7.17, "speech": 3.9},
)

LANTERN_PLUS_PLUS = Method(
    name="lantern-plus-plus",
    make=LanternPlus,
    systems=("LANTERN++",),
    summary="like `lantern`, with at most `ratio` times the code's own mass added; exact at ratio = 0",
    paper="LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual Auto-regressive "
    "Models (arXiv 2502.06352)",
    topology=("chain", "tree", "window"),
    inputs={"neighbours": Input.NEIGHBOURS},
    modalities=("image", "speech"),
    lossless=False,
    exact_at={"ratio": 0.0},
    test_options=({"ratio": 3.0, "k": 2}, {"ratio": 1.0, "k": 1}),
    measured={"image": 6.43, "speech": 3.67},
)

GROUPED = Method(
    name="grouped",
    make=Grouped,
    systems=("GSD",),
    summary="accepts by the mass of codes with similar probabilities and vectors; exact at span = 0",
    paper="Grouped Speculative Decoding for Autoregressive Image Generation (arXiv 2508.07747)",
    ranges={"gap": (0, 1, 0.05)},
    topology=("chain", "tree", "window"),
    inputs={"codes": Input.CODES},
    modalities=("image", "speech"),
    lossless=False,
    exact_at={"span": 0},
    test_options=({"span": 2, "gap": 0.6, "reach": 1.5}, {"span": 1, "gap": 0.4, "reach": 9.0}),
    measured={"image": 6.12, "speech": 3.28},
    as_good=("image",),
)

ANNEALED = Method(
    name="annealed",
    make=Annealed,
    systems=("COOL-SD",),
    summary="accepts with probability min(1, w p/q), where w falls with depth; exact at weight = 1, nu = 0",
    paper="COOL-SD: annealed relaxation of speculative decoding for autoregressive image generation (arXiv 2601.09212)",
    topology=("chain", "tree", "window"),
    lossless=False,
    # windows have no length to average over; images: the most tokens a pass judged close to plain
    defaults={
        "image": {"weight": 4.0, "nu": 0.1, "length": 0},
        "speech": {"weight": 2.0, "length": 0},
        "text": {"weight": 2.0, "length": 0},
    },
    ranges={"length": (0, 16, 1)},
    exact_at={"weight": 1.0, "nu": 0.0},
    test_options=({"weight": 3.0, "length": 0}, {"weight": 1.5, "nu": 0.0}, {"weight": 2.0, "length": 2}, {}),
    measured={"text": 2.23, "image": 7.41, "speech": 3.72},
    as_good=("image",),
)

BILD = Method(
    name="bild",
    make=Distance,
    systems=("BiLD distance",),
    summary="accepts while -log p is at most a distance; exact at distance = 0",
    paper="Speculative Decoding with Big Little Decoder (arXiv 2302.07863)",
    topology=("chain", "tree", "window"),
    lossless=False,
    exact_at={"distance": 0.0},
    test_options=({"distance": 2.0}, {"distance": 1.0}),
    measured={"text": 2.92, "speech": 2.62},
)

ROWS = (
    EXACT,
    TOKEN,
    BLOCK,
    SAMPLE_MATCH,
    GUMBEL_MATCH,
    THRESHOLD,
    LENIENCE,
    TOLERANCE,
    ADDITIVE_BETA,
    TOP_K_MEMBERSHIP,
    COARSE_GROUPS,
    TYPICAL,
    TRUST,
    VERIFY_EVERY,
    TOP_BETA,
    LANTERN,
    LANTERN_PLUS_PLUS,
    GROUPED,
    ANNEALED,
    BILD,
)
