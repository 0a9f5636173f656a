"""Every drafter and rule by name: the explicit tables that the code, the command line and the tests all read.

A new method is one function or class in its family's file and one row here; the conformance suite then tests it.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.core.decode import Drafter, Rule
from outrider.core.drafters.adaptive import Adaptive
from outrider.core.drafters.ahead import LookaheadEmbeddings, PaSS
from outrider.core.drafters.bestfirst import SpecExec
from outrider.core.drafters.calibrated import Sequoia
from outrider.core.drafters.cascade import CSDrafting
from outrider.core.drafters.cheaper import qspec, sparse_cache, triforce
from outrider.core.drafters.crossvocab import CrossVocabulary, Renamed
from outrider.core.drafters.ctc import CtcFrames
from outrider.core.drafters.ensemble import Ensemble
from outrider.core.drafters.exits import ExitHead, KangarooHead
from outrider.core.drafters.falcon import FalconHead
from outrider.core.drafters.feature import Eagle3Head, EagleHead, eagle2
from outrider.core.drafters.guarded import guarded
from outrider.core.drafters.guided import InputGuided
from outrider.core.drafters.heads import HydraHeads, MedusaHeads
from outrider.core.drafters.jacobi import Jacobi
from outrider.core.drafters.learned import Learned
from outrider.core.drafters.lookahead import Lookahead
from outrider.core.drafters.lookup import PromptLookup
from outrider.core.drafters.merged import SpecInfer
from outrider.core.drafters.model import (
    DraftModel,
    DynamicTree,
    SampledTree,
    TopKTree,
    bild,
    on_the_fly_window,
    specdec_pp,
)
from outrider.core.drafters.mtp import MtpModules
from outrider.core.drafters.ngram import ANPD, NGrammys
from outrider.core.drafters.parallel import AmphistaHeads, BlockwiseHeads, DFlashBlock, DSparkBlock, SpecDecBlock
from outrider.core.drafters.predrafted import Predrafted, pearl
from outrider.core.drafters.recycling import TokenRecycling
from outrider.core.drafters.retrieval import REST
from outrider.core.drafters.skip import draft_on_the_fly, draft_verify, swift
from outrider.core.drafters.spatial import SpatialHeads
from outrider.core.drafters.suffix import Suffix
from outrider.core.errors import InvalidOption, unknown
from outrider.core.policies import AcceptanceHead
from outrider.core.rules.codebook import Annealed, Grouped, Lantern, LanternPlus
from outrider.core.rules.exact import Block, Exact, GumbelMatch, SampleMatch, Token
from outrider.core.rules.neighbours import AdditiveBeta, CoarseGroups, Tolerance, TopKMembership
from outrider.core.rules.relaxed import Distance, Lenience, Threshold, TopBeta, Trust, Typical, VerifyEvery

ALL = ("text", "image", "speech")


@dataclass(frozen=True, kw_only=True)
class Method:
    """One row: what it is called, what of the literature it stands for, and how to make it."""

    name: str
    make: Callable[..., Any]
    systems: tuple[str, ...]
    summary: str
    paper: str
    topology: tuple[str, ...]  # of the drafts it makes, or takes: chain, tree, window
    modalities: tuple[str, ...] = ALL
    needs: tuple[str, ...] = ()  # what `make` must be given besides options
    lossless: bool | None = None  # None for drafters, which cannot change what comes out
    anchor: Mapping[str, Any] | None = None  # the options at which a relaxed rule is exact
    trials: tuple[Mapping[str, Any], ...] = ({},)  # small settings that between them reach every branch, for the tests
    pupil: Callable[..., Any] | None = None  # what is trained, where a drafter needs that
    small: Mapping[str, Any] = field(default_factory=dict)  # a pupil's small settings, for the tests

    @property
    def module(self) -> str:
        return str((self.pupil or self.make).__module__)

    @property
    def options(self) -> dict[str, Any]:
        """What may be set, and to what it is set if nobody does."""
        parameters = inspect.signature(self.make).parameters.values()
        return {one.name: one.default for one in parameters if one.name not in self.needs}


def _table(*methods: Method) -> dict[str, Method]:
    return {method.name: method for method in methods}


_HEAD = AcceptanceHead(  # reads a law's facts: made up, for the tests
    {"out.weight": torch.tensor([[2.5, 1.0, -0.3, -0.2]]), "out.bias": torch.tensor([0.4])}
)
_SMALL = {"prompt-lookup": {"length": 2}, "token-recycling": {"nodes": 3, "depth": 2}}

DRAFTERS = _table(
    Method(
        name="draft-model",
        make=DraftModel,
        systems=("Speculative decoding", "Speculative sampling"),
        summary="a smaller model drafts a chain, token by token",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
        topology=("chain",),
        needs=("model",),
        trials=({"length": 3}, {"length": 3, "policy": "confidence"}, {"length": 2, "policy": "window"}),
    ),
    Method(
        name="sampled-tree",
        make=SampledTree,
        systems=("Recursive rejection sampling", "SpecInfer's sampled trees"),
        summary="a smaller model draws several successors a node, with or without replacement",
        paper="Recursive Speculative Decoding (arXiv 2402.14160)",
        topology=("tree",),
        needs=("model",),
        trials=({"shape": (-1, -1, 0, 1)}, {"shape": (-1, -1, 0, 0), "replacement": True}),
    ),
    Method(
        name="top-k-tree",
        make=TopKTree,
        systems=("Static token trees",),
        summary="a static tree of a smaller model's likeliest tokens",
        paper="SpecInfer: Accelerating LLM Serving with Tree-based Speculative Inference (arXiv 2305.09781)",
        topology=("tree",),
        needs=("model",),
        trials=({"shape": (-1, -1, 0, 0, 1)},),
    ),
    Method(
        name="dynamic-tree",
        make=DynamicTree,
        systems=("EAGLE-2's dynamic tree",),
        summary="a tree that grows where a smaller model is sure of itself, re-ranked as a whole",
        paper="EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858)",
        topology=("tree",),
        needs=("model",),
        trials=({"nodes": 4, "width": 2, "depth": 2},),
    ),
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
    Method(
        name="ensemble",
        make=Ensemble,
        systems=("Suffix first, else token recycling", "Merged drafts of several drafters"),
        summary="the likeliest guesses of several drafters, merged into one tree",
        paper="SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666)",
        topology=("tree",),
        trials=({"nodes": 3}, {"drafters": ("prompt-lookup", "token-recycling"), "nodes": 3}),
    ),
    Method(
        name="specinfer",
        make=SpecInfer,
        systems=("SpecInfer",),
        summary="samples of one or several smaller models, merged into a tree; siblings drawn with replacement",
        paper="SpecInfer: Accelerating LLM Serving with Tree-based Speculative Inference (arXiv 2305.09781)",
        topology=("tree",),
        needs=("model",),
        trials=({"samples": 2, "depth": 2},),
    ),
    Method(
        name="specexec",
        make=SpecExec,
        systems=("SpecExec",),
        summary="the most probable tree of up to a thousand guesses, found best first, in one target pass",
        paper="SpecExec: Massively Parallel Speculative Decoding for Interactive LLM Inference (arXiv 2406.02532)",
        topology=("tree",),
        needs=("model",),
        trials=({"nodes": 4, "batch": 2, "width": 2, "passes": 3},),
    ),
    Method(
        name="predrafted",
        make=Predrafted,
        systems=("Speculative speculative decoding", "Saguaro", "Parallel draft and verify"),
        summary="a smaller model drafts behind the likely verdicts while the target is still verifying",
        paper="Speculative Speculative Decoding (arXiv 2603.03251)",
        topology=("chain",),
        needs=("model",),
        trials=({"length": 1, "outcomes": 2}, {"length": 2, "outcomes": 1, "first": 1}),
    ),
    Method(
        name="pearl",
        make=pearl,
        systems=("PEARL",),
        summary="a smaller model drafts on while its draft is verified, its first guess being verified meanwhile",
        paper="PEARL: Parallel Speculative Decoding with Adaptive Draft Length (arXiv 2408.11850)",
        topology=("chain",),
        needs=("model",),
        trials=({"length": 2},),
    ),
    Method(
        name="cs-drafting",
        make=CSDrafting,
        systems=("CS Drafting",),
        summary="a cascade: n-grams draft for the smaller model, and take over at later positions",
        paper="Cascade Speculative Drafting for Even Faster LLM Inference (arXiv 2312.11462)",
        topology=("chain",),
        needs=("model",),
        trials=({"lengths": (2, 1), "inner": 2, "levels": 2}, {"lengths": (2, 0), "inner": 1}),
    ),
    Method(
        name="cross-vocabulary",
        make=CrossVocabulary,
        systems=("Cross-vocabulary drafting",),
        summary="a smaller model with another tokenizer: its words tokenised anew, or the tokens that both have",
        paper="Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for Heterogeneous "
        "Vocabularies (arXiv 2502.05202)",
        topology=("chain",),
        needs=("model",),
        trials=(
            {"length": 2},
            {"length": 2, "way": "shared", "bridge": Renamed({0: 1, 2: 0}, unknown=2)},
            {"length": 2, "policy": "confidence", "bridge": Renamed({0: 2, 1: 1})},
        ),
    ),
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
    Method(
        name="sequoia",
        make=Sequoia,
        systems=("Sequoia",),
        summary="a tree of the shape that is best for measured acceptance, drawn without replacement",
        paper="Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding (arXiv 2402.12374)",
        topology=("tree",),
        needs=("model",),
        trials=({"acceptance": (0.5, 0.3, 0.1), "nodes": 4, "depth": 2},),
    ),
    Method(
        name="specdec-plus-plus",
        make=specdec_pp,
        systems=("SpecDec++",),
        summary="a smaller model drafts until a trained head sees the risk of a rejection",
        paper="SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths (arXiv 2405.19715)",
        topology=("chain",),
        needs=("model", "head"),
        trials=({"head": _HEAD, "tap": None, "length": 3, "threshold": 0.8},),
    ),
    Method(
        name="bild",
        make=bild,
        systems=("BiLD's drafting",),
        summary="a smaller model drafts until it is unsure; lossless but with the rule 'bild'",
        paper="Speculative Decoding with Big Little Decoder (arXiv 2302.07863)",
        topology=("chain",),
        needs=("model",),
        trials=({"length": 3, "fallback": 0.42},),
    ),
    Method(
        name="on-the-fly-window",
        make=on_the_fly_window,
        systems=("On-the-fly window",),
        summary="a smaller model drafts as far as should be fastest for what was accepted lately",
        paper="A Drop-In Solution for On-the-Fly Adaptation of Speculative Decoding (ACL 2025.acl-long.482)",
        topology=("chain",),
        needs=("model",),
        trials=({"length": 2, "most": 3}, {"by": "steps", "length": 1, "most": 3}),
    ),
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
    Method(
        name="medusa",
        make=Learned,
        pupil=MedusaHeads,
        systems=("Medusa",),
        summary="heads on the target's last state, each for one of the next tokens; a tree of their likeliest",
        paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"heads": 2, "layers": 2, "vocabulary": (2, 0)},
        trials=(
            {"shape": (-1, -1, 0)},
            {"grow": "dynamic", "nodes": 2, "depth": 2},
            {"grow": "chain", "length": 2},
            {"grow": "sampled", "shape": (-1, -1, 0)},
        ),
    ),
    Method(
        name="spatial",
        make=Learned,
        pupil=SpatialHeads,
        systems=("Hawk", "Heads that look right and below (spatial)"),
        summary="heads that see the target's last state and its state above the place they guess; a tree",
        paper="Hawk: Leveraging Spatial Context for Faster Autoregressive Text-to-Image Generation (arXiv 2510.25739)",
        topology=("tree", "chain"),
        modalities=("image",),
        needs=("pupil",),
        small={"heads": 2, "columns": 3, "vocabulary": (2, 0)},
        trials=(
            {"shape": (-1, -1, 0)},
            {"grow": "dynamic", "nodes": 2, "depth": 2},
            {"grow": "chain", "length": 2},
            {"grow": "sampled", "shape": (-1, -1, 0)},
        ),
    ),
    Method(
        name="hydra",
        make=Learned,
        pupil=HydraHeads,
        systems=("Hydra",),
        summary="heads that also see the tokens drafted before theirs; a tree that grows where they are sure",
        paper="Hydra: Sequentially-Dependent Draft Heads for Medusa Decoding (arXiv 2402.05109)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"heads": 2, "vocabulary": (2, 0)},
        trials=(
            {"grow": "tree", "shape": (-1, -1, 0, 1)},
            {"nodes": 3, "width": 2, "depth": 2},
            {"grow": "chain", "length": 2, "policy": "confidence"},
            {"grow": "sampled", "shape": (-1, -1, 0)},
        ),
    ),
    Method(
        name="eagle",
        make=Learned,
        pupil=EagleHead,
        systems=("EAGLE",),
        summary="one layer foresees the target's next states, token after token; a static tree",
        paper="EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty (arXiv 2401.15077)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"normed": False},
        trials=({"shape": (-1, -1, 0)}, {"grow": "chain", "length": 2}, {"grow": "sampled", "shape": (-1, -1, 0)}),
    ),
    Method(
        name="eagle2",
        make=eagle2,
        pupil=EagleHead,
        systems=("EAGLE-2",),
        summary="EAGLE's layer; a tree that grows where it is sure of itself, re-ranked as a whole",
        paper="EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees (arXiv 2406.16858)",
        topology=("tree", "chain"),
        needs=("pupil",),
        trials=({"nodes": 3, "width": 2, "depth": 2},),
    ),
    Method(
        name="eagle3",
        make=Learned,
        pupil=Eagle3Head,
        systems=("EAGLE-3", "EAGLE-3.1"),
        summary="one layer on states tapped at three depths, trained on its own states, with fewer words",
        paper="EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test "
        "(arXiv 2503.01840)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"taps": ("layer.0", "layer.1", "last"), "vocabulary": (2, 0)},
        trials=(
            {"nodes": 3, "width": 2, "depth": 2},
            {"grow": "tree", "shape": (-1, -1, 0)},
            {"grow": "chain", "length": 3},
            {"grow": "sampled", "shape": (-1, -1, 1)},
        ),
    ),
    Method(
        name="blockwise",
        make=Learned,
        pupil=BlockwiseHeads,
        systems=("Blockwise decoding",),
        summary="residual heads on the target's last state, a chain; verifying and predicting are one pass",
        paper="Blockwise Parallel Decoding for Deep Autoregressive Models (arXiv 1811.03115)",
        topology=("chain", "tree"),
        needs=("pupil",),
        small={"heads": 2, "hidden": 4},
        trials=({"length": 2},),
    ),
    Method(
        name="amphista",
        make=Learned,
        pupil=AmphistaHeads,
        systems=("Amphista",),
        summary="heads that look at one another both ways, behind two layers that adapt the target's states",
        paper="Amphista: Bi-directional Multi-head Decoding for Accelerating LLM Inference (arXiv 2406.13170)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"heads": 2},
        trials=({"shape": (-1, -1, 0)}, {"grow": "chain", "length": 2}),
    ),
    Method(
        name="dflash",
        make=Learned,
        pupil=DFlashBlock,
        systems=("DFlash",),
        summary="a block of masks filled in at once by layers that read the target's tapped states",
        paper="DFlash: Block Diffusion for Flash Speculative Decoding (arXiv 2602.06036)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"block": 2, "layers": 2, "taps": ("layer.0", "last"), "vocabulary": (2, 0)},
        trials=({"nodes": 3, "depth": 2}, {"grow": "chain", "length": 2}),
    ),
    Method(
        name="dspark",
        make=Learned,
        pupil=DSparkBlock,
        systems=("DSpark",),
        summary="DFlash's block, corrected from left to right by the token before; can stop where it is unsure",
        paper="DSpark (arXiv 2607.05147)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"block": 2, "rank": 2, "taps": ("layer.0", "last")},
        trials=({"nodes": 3, "width": 2, "depth": 2}, {"grow": "chain", "length": 2, "policy": "confident"}),
    ),
    Method(
        name="specdec",
        make=Learned,
        pupil=SpecDecBlock,
        systems=("SpecDec",),
        summary="an independent drafter: deep encoder, shallow decoder, one query a place, all filled in at once",
        paper="Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation "
        "(arXiv 2203.16487)",
        topology=("chain", "tree"),
        needs=("pupil",),
        small={"block": 2, "encoder": 1},
        trials=({"length": 2},),
    ),
    Method(
        name="falcon",
        make=Learned,
        pupil=FalconHead,
        systems=("Falcon",),
        summary="several states foreseen in one pass, the next pass going on from what was drafted; a static tree",
        paper="Falcon: Faster and Parallel Inference of Large Language Models through Enhanced Semi-Autoregressive "
        "Drafting and Custom-Designed Decoding Tree (arXiv 2412.12639)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"block": 2, "anchors": 4},
        trials=(
            {"shape": (-1, -1, 0)},
            {"grow": "dynamic", "nodes": 3, "width": 2, "depth": 3},
            {"grow": "chain", "length": 3},
            {"grow": "sampled", "shape": (-1, -1, 0)},
        ),
    ),
    Method(
        name="pass",
        make=PaSS,
        pupil=LookaheadEmbeddings,
        systems=("PaSS",),
        summary="the target itself guesses behind learned inputs, in the pass that verifies its last guesses",
        paper="PaSS: Parallel Speculative Sampling (arXiv 2311.13581)",
        topology=("chain", "tree"),
        modalities=("text",),
        needs=("pupil",),
        small={"embeddings": 2, "anchors": 4},
        trials=({}, {"shape": (-1, -1, 0)}, {"apart": True}),
    ),
    Method(
        name="layer-skip",
        make=Learned,
        pupil=ExitHead,
        systems=("LayerSkip",),
        summary="the target's first layers and a trained exit draft; verifying goes on from their states",
        paper="LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding (arXiv 2404.16710)",
        topology=("chain", "tree"),
        needs=("pupil",),
        small={"exit": 1, "hidden": 4},
        trials=({"length": 2}, {"grow": "tree", "shape": (-1, -1, 0)}),
    ),
    Method(
        name="kangaroo",
        make=Learned,
        pupil=KangarooHead,
        systems=("Kangaroo",),
        summary="the target's first layers and a trained adapter of one attention draft until unsure",
        paper="Kangaroo: Lossless Self-Speculative Decoding via Double Early Exiting (arXiv 2404.18911)",
        topology=("chain", "tree"),
        needs=("pupil",),
        small={"exit": 1},
        trials=({"length": 2, "policy": "confidence"}, {"grow": "dynamic", "nodes": 3, "width": 2, "depth": 2}),
    ),
    Method(
        name="mtp",
        make=Learned,
        pupil=MtpModules,
        systems=("MTP (DeepSeek)", "FastMTP"),
        summary="modules one after another, each on the state before it and the next token; or one, used again",
        paper="DeepSeek-V3 Technical Report (arXiv 2412.19437)",
        topology=("chain", "tree"),
        needs=("pupil",),
        small={"modules": 2},
        trials=({"length": 3}, {"grow": "dynamic", "nodes": 3, "width": 2, "depth": 3}),
    ),
    Method(
        name="ctc",
        make=Learned,
        pupil=CtcFrames,
        systems=("CTC drafting",),
        summary="frames with blanks and repeats for the next tokens at once, collapsed before they are verified",
        paper="Speculative Decoding with CTC-based Draft Model for LLM Inference Acceleration (arXiv 2412.00061)",
        topology=("tree", "chain"),
        needs=("pupil",),
        small={"frames": 3, "length": 2},
        trials=({"nodes": 4, "depth": 2},),
    ),
)

RULES = _table(
    Method(
        name="exact",
        make=Exact,
        systems=("The lossless default",),
        summary="block verification for chains drawn whole, rejection for other draws, one draw a level for guesses",
        paper="Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)",
        topology=("chain", "tree", "window"),
        lossless=True,
    ),
    Method(
        name="token",
        make=Token,
        systems=("Token rejection", "With replacement (SpecInfer)", "Without replacement", "One-hot tree"),
        summary="accept each guess with min(1, p/q), else draw from what is left",
        paper="Accelerating Large Language Model Decoding with Speculative Sampling (arXiv 2302.01318)",
        topology=("chain", "tree", "window"),
        lossless=True,
    ),
    Method(
        name="block",
        make=Block,
        systems=("Block verification",),
        summary="judge a drawn chain as a whole: accepts at least as much as token rejection",
        paper="Block Verification Accelerates Speculative Decoding (arXiv 2403.10444)",
        topology=("chain",),
        lossless=True,
    ),
    Method(
        name="sample-match",
        make=SampleMatch,
        systems=("Sample-and-match",),
        summary="the target draws behind every node; the draft is followed while it agrees",
        paper="SpecExec: Massively Parallel Speculative Decoding (arXiv 2406.02532)",
        topology=("chain", "tree", "window"),
        lossless=True,
    ),
    Method(
        name="gumbel-match",
        make=GumbelMatch,
        systems=("Gumbel-match",),
        summary="the same with noise keyed by position: plain and speculative output are identical",
        paper="Parallel Sampling via coupled Gumbel noise, as in speculative coupled decoding (arXiv 2510.24211)",
        topology=("chain", "tree", "window"),
        lossless=True,
    ),
    Method(
        name="threshold",
        make=Threshold,
        systems=("Threshold on p/q", "Deterministic verification", "Conservative verification"),
        summary="accept where p/q reaches a threshold; at 1 or more exact",
        paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"threshold": 1.0},
        trials=({"threshold": 0.5}, {}),
    ),
    Method(
        name="lenience",
        make=Lenience,
        systems=("Lenience",),
        summary="accept with min(1, p / (l q)); l = 1 is exact",
        paper="DistillSpec: Improving Speculative Decoding via Knowledge Distillation (arXiv 2310.08461)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"lenience": 1.0},
    ),
    Method(
        name="tolerance",
        make=Tolerance,
        systems=("Tolerance (VADUSA)",),
        summary="accept what is among tau draws from the target's law; tau = 1 is exact",
        paper="Fast and High-Quality Auto-Regressive Speech Synthesis via Speculative Decoding (arXiv 2410.21951)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"tau": 1},
        trials=({"tau": 12}, {"tau": 2}),
    ),
    Method(
        name="additive-beta",
        make=AdditiveBeta,
        systems=("Additive beta (SSD)",),
        summary="accept with min(1, p/q + beta); beta = 0 is exact",
        paper="Speech Speculative Decoding (arXiv 2505.15380)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"beta": 0.0},
    ),
    Method(
        name="top-k-membership",
        make=TopKMembership,
        systems=("Top-k membership (Llasa+)",),
        summary="accept what is among the target's k likeliest; k = 0 is exact",
        paper="Llasa+: Free Lunch for Accelerated and Streaming Llama-Based Speech Synthesis (arXiv 2508.06262)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"k": 0},
        trials=({}, {"k": 1}),
    ),
    Method(
        name="coarse-groups",
        make=CoarseGroups,
        systems=("Coarse groups (PCG)",),
        summary="compare groups of tokens with similar embeddings; similarity above 1 is exact",
        paper="Principled Coarse-Grained Acceptance for Speculative Decoding in Speech (arXiv 2511.13732)",
        topology=("chain", "tree", "window"),
        modalities=("speech",),
        lossless=False,
        anchor={"similarity": 1.5},
        trials=({"similarity": 0.5}, {"similarity": 0.3}),
    ),
    Method(
        name="typical",
        make=Typical,
        systems=("Typical acceptance (Medusa)",),
        summary="accept what is not improbable for the law's entropy; epsilon=1, delta=inf is exact",
        paper="Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads (arXiv 2401.10774)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"epsilon": 1.0, "delta": math.inf},
        trials=({}, {"epsilon": 0.3, "delta": 0.6}),
    ),
    Method(
        name="trust",
        make=Trust,
        systems=("Accept outright",),
        summary="accept down to a depth without looking, then strictly; depth 0 is exact",
        paper="Speculative Decoding and Beyond: An In-Depth Survey of Techniques (arXiv 2502.19732)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"depth": 0},
        trials=({}, {"depth": 1}),
    ),
    Method(
        name="verify-every",
        make=VerifyEvery,
        systems=("Verify part",),
        summary="verify one guess in so many, accept those between; one in one is exact",
        paper="Speculative Decoding and Beyond: An In-Depth Survey of Techniques (arXiv 2502.19732)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"every": 1},
    ),
    Method(
        name="top-beta",
        make=TopBeta,
        systems=("Top-beta + gap (SpecDec)",),
        summary="accept what is among the likeliest few and not far below the likeliest; beta=0 is exact",
        paper="Speculative Decoding: Exploiting Speculative Execution for Accelerating Seq2seq Generation "
        "(arXiv 2203.16487)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"beta": 0},
        trials=({"beta": 3, "gap": 2.0}, {"beta": 1, "gap": 0.5}),
    ),
    Method(
        name="lantern",
        make=Lantern,
        systems=("LANTERN",),
        summary="a guess counts with its nearest neighbours, up to a mass of delta; delta 0 is exact",
        paper="LANTERN: Accelerating Visual Autoregressive Models with Relaxed Speculative Decoding (arXiv 2410.03355)",
        topology=("chain", "tree", "window"),
        modalities=("image", "speech"),
        lossless=False,
        anchor={"delta": 0.0},
        trials=({"delta": 0.4, "k": 2}, {"delta": 0.2, "k": 1}),
    ),
    Method(
        name="lantern-plus-plus",
        make=LanternPlus,
        systems=("LANTERN++",),
        summary="the same, up to a multiple of the guess's own mass; ratio 0 is exact",
        paper="LANTERN++: Enhancing Relaxed Speculative Decoding with Static Tree Drafting for Visual Auto-regressive "
        "Models (arXiv 2502.06352)",
        topology=("chain", "tree", "window"),
        modalities=("image", "speech"),
        lossless=False,
        anchor={"ratio": 0.0},
        trials=({"ratio": 3.0, "k": 2}, {"ratio": 1.0, "k": 1}),
    ),
    Method(
        name="grouped",
        make=Grouped,
        systems=("GSD",),
        summary="judge a guess with the codes that are as likely and look like it; span 0 is exact",
        paper="Grouped Speculative Decoding for Autoregressive Image Generation (arXiv 2508.07747)",
        topology=("chain", "tree", "window"),
        modalities=("image", "speech"),
        lossless=False,
        anchor={"span": 0},
        trials=({"span": 2, "gap": 0.6, "reach": 1.5}, {"span": 1, "gap": 0.4, "reach": 9.0}),
    ),
    Method(
        name="annealed",
        make=Annealed,
        systems=("COOL-SD",),
        summary="accept with min(1, w p/q), w falling with depth; weight 1 is exact",
        paper="COOL-SD: annealed relaxation of speculative decoding for autoregressive image generation "
        "(arXiv 2601.09212)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"weight": 1.0},
        trials=({"weight": 3.0}, {"weight": 1.5, "nu": 0.0}),
    ),
    Method(
        name="bild",
        make=Distance,
        systems=("BiLD distance",),
        summary="accept while -log p is within a distance; distance 0 is exact",
        paper="Speculative Decoding with Big Little Decoder (arXiv 2302.07863)",
        topology=("chain", "tree", "window"),
        lossless=False,
        anchor={"distance": 0.0},
        trials=({"distance": 2.0}, {"distance": 1.0}),
    ),
)


# these read words, or see their target through less of it: not for targets of two streams, or on code of others
OF_TEXT = (
    *("input-guided", "rest", "n-grammys", "cross-vocabulary"),
    *("sparse-cache", "triforce", "qspec", "swift", "draft-on-the-fly"),
)


def make_drafter(name: str | None, **options: Any) -> Drafter | None:
    """A drafter by name; None is plain decoding."""
    if name is None:
        return None
    drafter: Drafter = _make("drafter", DRAFTERS, name, options)
    return drafter


def make_rule(name: str = "exact", **options: Any) -> Rule:
    """A rule by name."""
    rule: Rule = _make("rule", RULES, name, options)
    return rule


def _make(what: str, table: dict[str, Method], name: str, options: dict[str, Any]) -> Any:
    if name not in table:
        raise unknown(what, name, table)
    method = table[name]
    for given in options:
        if given not in method.options and given not in method.needs:
            raise unknown(f"option of the {what} '{name}'", given, [*method.needs, *method.options])
    for need in method.needs:
        if options.get(need) is None:
            raise InvalidOption(f"the {what} '{name}' needs {need}=...: {method.summary}")
    return method.make(**options)
