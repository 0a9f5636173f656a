"""Rows of the drafters that draft with a smaller model."""

from __future__ import annotations

from functools import partial

import torch

from outrider.core.drafters.draft_model.cross_vocabulary import cross_vocabulary
from outrider.core.drafters.draft_model.cs_drafting import CSDrafting
from outrider.core.drafters.draft_model.model import DraftModel, DynamicTree, SampledTree, TopKTree
from outrider.core.drafters.draft_model.overlapped import FAN_OUTS, Overlapped
from outrider.core.drafters.draft_model.pearl import Pearl
from outrider.core.drafters.draft_model.sequoia import Sequoia
from outrider.core.drafters.draft_model.specexec import SpecExec
from outrider.core.drafters.draft_model.specinfer import SpecInfer
from outrider.core.drafters.draft_model.vocab_bridge import Renamed
from outrider.core.drafters.length_policies import AcceptanceHead
from outrider.core.methods.row import Input, Method
from outrider.core.protocol import Capability

_HEAD = AcceptanceHead(  # invented weights on features of a distribution, for tests
    {"out.weight": torch.tensor([[2.5, 1.0, -0.3, -0.2]]), "out.bias": torch.tensor([0.4])}
)

DRAFT_MODEL = Method(
    name="draft-model",
    make=DraftModel,
    systems=("Speculative decoding", "Speculative sampling"),
    summary="drafts a chain with a smaller model, token by token",
    paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
    topology=("chain",),
    samples_chain=True,
    capabilities=(Capability.BATCHED, Capability.DISCARDS),
    vllm="draft_model",
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"length": 3}, {"length": 3, "policy": "confidence"}, {"length": 2, "policy": "window"}),
)

SAMPLED_TREE = Method(
    name="sampled-tree",
    make=SampledTree,
    systems=("Recursive rejection sampling", "SpecInfer's sampled trees"),
    summary="samples several children per node from a smaller model, with or without replacement",
    paper="Recursive Speculative Decoding (arXiv 2402.14160)",
    topology=("tree",),
    capabilities=(Capability.BATCHED, Capability.DISCARDS),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"tree": (-1, -1, 0, 1)}, {"tree": (-1, -1, 0, 0), "replacement": True}),
)

TOP_K_TREE = Method(
    name="top-k-tree",
    make=TopKTree,
    systems=("Static token trees",),
    summary="fills a static tree with a smaller model's most probable tokens",
    paper="SpecInfer: Accelerating LLM Serving with Tree-based Speculative Inference (arXiv 2305.09781)",
    topology=("tree",),
    capabilities=(Capability.BATCHED, Capability.DISCARDS),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"tree": (-1, -1, 0, 0, 1)},),
)

DYNAMIC_TREE = Method(
    name="dynamic-tree",
    make=DynamicTree,
    systems=("EAGLE-2's dynamic tree",),
    summary="expands a smaller model's most probable nodes and keeps the best ones as the tree",
    paper="EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858)",
    topology=("tree",),
    capabilities=(Capability.BATCHED, Capability.DISCARDS),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"nodes": 4, "width": 2, "depth": 2},),
)

SPECINFER = Method(
    name="specinfer",
    make=SpecInfer,
    systems=("SpecInfer",),
    summary="merges samples of one or several smaller models into a tree, drawn with replacement",
    paper="SpecInfer: Accelerating LLM Serving with Tree-based Speculative Inference (arXiv 2305.09781)",
    topology=("tree",),
    inputs={"model": Input.DRAFT_MODEL, "other_models": Input.DRAFT_MODELS},
    test_options=({"samples": 2, "depth": 2},),
)

SPECEXEC = Method(
    name="specexec",
    make=SpecExec,
    systems=("SpecExec",),
    summary="builds a smaller model's most probable tree best first, up to a thousand nodes per target pass",
    paper="SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference (arXiv 2406.02532)",
    ranges={"nodes": (8, 64, 8)},
    topology=("tree",),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"nodes": 4, "batch": 2, "width": 2, "passes": 3},),
)

PREDRAFTED = Method(
    name="predrafted",
    make=Overlapped,
    systems=("Speculative speculative decoding", "Saguaro", "Parallel draft and verify"),
    summary="drafts for the likely outcomes of verification while the target is still verifying",
    paper="Speculative Speculative Decoding (arXiv 2603.03251)",
    topology=("chain",),
    samples_chain=True,
    capabilities=(Capability.OVERLAPPED,),
    inputs={"model": Input.DRAFT_MODEL},
    choices={"fan_out": FAN_OUTS},
    test_options=(
        {"length": 1, "outcomes": 2},
        {"length": 2, "outcomes": 1, "first_length": 1},
        {"length": 1, "outcomes": 3, "width": 1, "fan_out": "geometric", "downscale": 0.5},
    ),
)

PEARL = Method(
    name="pearl",
    make=Pearl,
    systems=("PEARL",),
    summary="drafts while the target verifies, which verifies the first of these tokens in the same pass",
    paper="PEARL: Parallel Speculative Decoding with Adaptive Draft Length (arXiv 2408.11850)",
    topology=("chain",),
    samples_chain=True,
    capabilities=(Capability.OVERLAPPED,),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"length": 2}, {"length": 1}),
)

CS_DRAFTING = Method(
    name="cs-drafting",
    make=CSDrafting,
    systems=("CS Drafting",),
    summary="cascades drafters: n-grams draft for the smaller model, and alone at later positions",
    paper="Cascade Speculative Drafting for Even Faster LLM Inference (arXiv 2312.11462)",
    topology=("chain",),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=(
        {"lengths": (2, 1), "inner_length": 2, "max_ngram": 2},
        {"lengths": (2, 0), "inner_length": 1, "lenience": 3.0},
    ),
)

CROSS_VOCABULARY = Method(
    name="cross-vocabulary",
    make=cross_vocabulary,
    systems=("Cross-vocabulary drafting",),
    summary="drafts with a smaller model of another tokenizer, by retokenizing or by shared tokens",
    paper="Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous "
    "Vocabularies (arXiv 2502.05202)",
    topology=("chain",),
    modalities=("text",),
    inputs={"model": Input.FOREIGN_MODEL, "bridge": Input.BRIDGE},
    test_options=(
        {"length": 2},
        {"length": 2, "method": "shared", "bridge": Renamed({0: 1, 2: 0}, unknown=2)},
        {"length": 2, "policy": "confidence", "bridge": Renamed({0: 2, 1: 1})},
    ),
)

SEQUOIA = Method(
    name="sequoia",
    make=Sequoia,
    systems=("Sequoia",),
    summary="samples the tree shape that is optimal for measured acceptance rates, without replacement",
    paper="Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (arXiv 2402.12374)",
    topology=("tree",),
    capabilities=(Capability.DISCARDS,),
    inputs={"model": Input.DRAFT_MODEL, "acceptance": Input.ACCEPTANCE},
    test_options=({"acceptance": (0.5, 0.3, 0.1), "nodes": 4, "depth": 2},),
)

SPECDEC_PLUS_PLUS = Method(
    name="specdec-plus-plus",
    make=partial(DraftModel, policy="risk", length=16, threshold=0.7),
    systems=("SpecDec++",),
    summary="drafts with a smaller model until a trained head predicts a rejection",
    paper="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv 2405.19715)",
    topology=("chain",),
    samples_chain=True,
    capabilities=(Capability.DISCARDS,),
    inputs={"model": Input.DRAFT_MODEL, "head": Input.ACCEPTANCE_HEAD},
    test_options=({"head": _HEAD, "tap": None, "length": 3, "threshold": 0.8},),
)

BILD = Method(
    name="bild",
    make=partial(DraftModel, policy="confidence", length=12, threshold=0.5),
    systems=("BiLD's drafting",),
    summary="drafts with a smaller model while its confidence is high; lossless unless the rule is 'bild'",
    paper="Speculative Decoding with Big Little Decoder (arXiv 2302.07863)",
    topology=("chain",),
    samples_chain=True,
    capabilities=(Capability.BATCHED, Capability.DISCARDS),
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"length": 3, "threshold": 0.42},),
)

ON_THE_FLY_WINDOW = Method(
    name="on-the-fly-window",
    make=partial(DraftModel, policy="best", max_length=16),
    systems=("On-the-fly window",),
    summary="drafts with a smaller model, with the length that is fastest at the recent acceptance rate",
    paper="A Drop-In Solution for On-the-Fly Adaptation of Speculative Decoding (ACL 2025.acl-long.482)",
    topology=("chain",),
    draft_tokens=("length", "max_length"),
    samples_chain=True,
    capabilities=(Capability.DISCARDS,),
    choices={"policy": ("best", "window")},
    inputs={"model": Input.DRAFT_MODEL},
    test_options=({"length": 2, "max_length": 3}, {"policy": "window", "length": 1, "max_length": 3}),
)

ROWS = (
    DRAFT_MODEL,
    SAMPLED_TREE,
    TOP_K_TREE,
    DYNAMIC_TREE,
    SPECINFER,
    SPECEXEC,
    PREDRAFTED,
    PEARL,
    CS_DRAFTING,
    CROSS_VOCABULARY,
    SEQUOIA,
    SPECDEC_PLUS_PLUS,
    BILD,
    ON_THE_FLY_WINDOW,
)
