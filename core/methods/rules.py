"""Rows of the acceptance rules: exact ones, and relaxed ones with the options at which they are exact."""

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
    summary="block verification for chains drawn whole, rejection for other draws, one draw a level for guesses",
    paper="Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)",
    topology=("chain", "tree", "window"),
    lossless=True,
)

TOKEN = Method(
    name="token",
    make=Token,
    systems=("Token rejection", "With replacement (SpecInfer)", "Without replacement", "One-hot tree"),
    summary="accept each guess with min(1, p/q), else draw from what is left",
    paper="Accelerating Large Language Model Decoding with Speculative Sampling (arXiv 2302.01318)",
    topology=("chain", "tree", "window"),
    lossless=True,
)

BLOCK = Method(
    name="block",
    make=Block,
    systems=("Block verification",),
    summary="judge a drawn chain as a whole: accepts at least as much as token rejection",
    paper="Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)",
    topology=("chain",),
    samples_chain=True,
    lossless=True,
)

SAMPLE_MATCH = Method(
    name="sample-match",
    make=SampleMatch,
    systems=("Sample-and-match",),
    summary="the target draws behind every node; the draft is followed while it agrees",
    paper="SpecExec: Massively Parallel Speculative Decoding (arXiv 2406.02532)",
    topology=("chain", "tree", "window"),
    lossless=True,
)

GUMBEL_MATCH = Method(
    name="gumbel-match",
    make=GumbelMatch,
    systems=("Gumbel-match",),
    summary="the same with noise keyed by position: plain and speculative output are identical",
    paper="Parallel Sampling via coupled Gumbel noise, as in speculative coupled decoding (arXiv 2510.24211)",
    topology=("chain", "tree", "window"),
    lossless=True,
    same_tokens=True,
)

THRESHOLD = Method(
    name="threshold",
    make=Threshold,
    systems=("Threshold on p/q", "Deterministic verification", "Conservative verification"),
    summary="accept where p/q reaches a threshold; at 1 or more exact",
    paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"threshold": 1.0},
    trials=({"threshold": 0.5}, {}),
)

LENIENCE = Method(
    name="lenience",
    make=Lenience,
    systems=("Lenience",),
    summary="accept with min(1, p / (l q)); l = 1 is exact",
    paper="DistillSpec: Improving Speculative Decoding via Knowledge Distillation (arXiv 2310.08461)",
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"lenience": 1.0},
)

TOLERANCE = Method(
    name="tolerance",
    make=Tolerance,
    systems=("Tolerance (VADUSA)",),
    summary="accept what is among tau draws from the target's distribution; tau = 1 is exact",
    paper="Fast and High-Quality Auto-Regressive Speech Synthesis via Speculative Decoding (arXiv 2410.21951)",
    topology=("chain", "tree", "window"),
    defaults={"speech": {"tau": 30}},  # so many draws change few words of what is heard (reports/speech)
    lossless=False,
    anchor={"tau": 1},
    trials=({"tau": 12}, {"tau": 2}),
)

ADDITIVE_BETA = Method(
    name="additive-beta",
    make=AdditiveBeta,
    systems=("Additive beta (SSD)",),
    summary="accept with min(1, p/q + beta); beta = 0 is exact",
    paper="Speech Speculative Decoding (arXiv 2505.15380)",
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"beta": 0.0},
)

TOP_K_MEMBERSHIP = Method(
    name="top-k-membership",
    make=TopKMembership,
    systems=("Top-k membership (Llasa+)",),
    summary="accept what is among the target's k likeliest; k = 0 is exact",
    paper="Llasa+: Free Lunch for Accelerated and Streaming Llama-Based Speech Synthesis (arXiv 2508.06262)",
    ranges={"k": (0, 20, 1)},
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"k": 0},
    trials=({}, {"k": 1}),
)

COARSE_GROUPS = Method(
    name="coarse-groups",
    make=CoarseGroups,
    systems=("Coarse groups (PCG)",),
    summary="compare groups of tokens with similar embeddings; similarity above 1 is exact",
    paper="Principled Coarse-Grained Acceptance for Speculative Decoding in Speech (arXiv 2511.13732)",
    topology=("chain", "tree", "window"),
    inputs={"embeddings": Input.EMBEDDINGS},
    modalities=("speech",),
    lossless=False,
    anchor={"similarity": 1.5},
    trials=({"similarity": 0.5}, {"similarity": 0.3}),
)

TYPICAL = Method(
    name="typical",
    make=Typical,
    systems=("Typical acceptance (Medusa)",),
    summary="accept what is not improbable for the distribution's entropy; epsilon=1, delta=inf is exact",
    paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774)",
    ranges={"delta": (0.05, 2, 0.05)},
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"epsilon": 1.0, "delta": math.inf},
    trials=({}, {"epsilon": 0.3, "delta": 0.6}),
)

TRUST = Method(
    name="trust",
    make=Trust,
    systems=("Accept outright",),
    summary="accept down to a depth without looking, then strictly; depth 0 is exact",
    paper="Speculative Decoding and Beyond: An In-Depth Survey of Techniques (arXiv 2502.19732)",
    ranges={"depth": (0, 8, 1)},
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"depth": 0},
    trials=({}, {"depth": 1}),
)

VERIFY_EVERY = Method(
    name="verify-every",
    make=VerifyEvery,
    systems=("Verify part",),
    summary="verify one guess in so many, accept those between; one in one is exact",
    paper="Speculative Decoding and Beyond: An In-Depth Survey of Techniques (arXiv 2502.19732)",
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"every": 1},
)

TOP_BETA = Method(
    name="top-beta",
    make=TopBeta,
    systems=("Top-beta + gap (SpecDec)",),
    summary="accept what is among the likeliest few and not far below the likeliest; beta=0 is exact",
    paper="Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation "
    "(arXiv 2203.16487)",
    ranges={"beta": (0, 8, 1)},
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"beta": 0},
    trials=({"beta": 3, "gap": 2.0}, {"beta": 1, "gap": 0.5}),
)

LANTERN = Method(
    name="lantern",
    make=Lantern,
    systems=("LANTERN",),
    summary="a guess counts with its nearest neighbours, up to a mass of delta; delta 0 is exact",
    paper="LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding (arXiv 2410.03355)",
    topology=("chain", "tree", "window"),
    inputs={"neighbours": Input.NEIGHBOURS},
    modalities=("image", "speech"),
    lossless=False,
    anchor={"delta": 0.0},
    trials=({"delta": 0.4, "k": 2}, {"delta": 0.2, "k": 1}),
)

LANTERN_PLUS_PLUS = Method(
    name="lantern-plus-plus",
    make=LanternPlus,
    systems=("LANTERN++",),
    summary="the same, up to a multiple of the guess's own mass; ratio 0 is exact",
    paper="LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual Auto-regressive "
    "Models (arXiv 2502.06352)",
    topology=("chain", "tree", "window"),
    inputs={"neighbours": Input.NEIGHBOURS},
    modalities=("image", "speech"),
    lossless=False,
    anchor={"ratio": 0.0},
    trials=({"ratio": 3.0, "k": 2}, {"ratio": 1.0, "k": 1}),
)

GROUPED = Method(
    name="grouped",
    make=Grouped,
    systems=("GSD",),
    summary="judge a guess with the codes that are as likely and look like it; span 0 is exact",
    paper="Grouped Speculative Decoding for Autoregressive Image Generation (arXiv 2508.07747)",
    ranges={"gap": (0, 1, 0.05)},
    topology=("chain", "tree", "window"),
    inputs={"codes": Input.CODES},
    modalities=("image", "speech"),
    lossless=False,
    anchor={"span": 0},
    trials=({"span": 2, "gap": 0.6, "reach": 1.5}, {"span": 1, "gap": 0.4, "reach": 9.0}),
)

ANNEALED = Method(
    name="annealed",
    make=Annealed,
    systems=("COOL-SD",),
    summary="accept with min(1, w p/q), w falling with depth; weight 1 is exact",
    paper="COOL-SD: annealed relaxation of speculative decoding for autoregressive image generation (arXiv 2601.09212)",
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"weight": 1.0},
    trials=({"weight": 3.0}, {"weight": 1.5, "nu": 0.0}),
)

BILD = Method(
    name="bild",
    make=Distance,
    systems=("BiLD distance",),
    summary="accept while -log p is within a distance; distance 0 is exact",
    paper="Speculative Decoding with Big Little Decoder (arXiv 2302.07863)",
    topology=("chain", "tree", "window"),
    lossless=False,
    anchor={"distance": 0.0},
    trials=({"distance": 2.0}, {"distance": 1.0}),
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
