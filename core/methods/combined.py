"""Rows of the drafters that merge, choose between or guard other drafters."""

from __future__ import annotations

from outrider.core.drafters.combined.adaptive import Adaptive
from outrider.core.drafters.combined.ensemble import Ensemble
from outrider.core.drafters.combined.guarded import guarded
from outrider.core.methods.row import Method
from outrider.core.protocol import Capability

_SMALL = {"prompt-lookup": {"length": 2}, "token-recycling": {"nodes": 3, "depth": 2}}

ENSEMBLE = Method(
    name="ensemble",
    make=Ensemble,
    systems=("Suffix first, else token recycling", "Merged drafts of several drafters"),
    summary="the likeliest guesses of several drafters, merged into one tree",
    paper="SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666)",
    topology=("tree",),
    capabilities=(Capability.BATCHED, Capability.COMBINES),
    trials=({"nodes": 3}, {"drafters": ("prompt-lookup", "token-recycling"), "nodes": 3}),
)

ADAPTIVE = Method(
    name="adaptive",
    make=Adaptive,
    systems=("Adaptive drafter choice", "Complexity estimate"),
    summary="the drafter that has been worth most, chosen for each step; or by how complex the text looks",
    paper="Context-Aware Assistant Selection for Improved Inference Acceleration (arXiv 2408.08470)",
    topology=("chain", "tree"),
    capabilities=(Capability.COMBINES, Capability.CROWD_AWARE),
    trials=(
        {"drafters": ("prompt-lookup", "token-recycling", "plain"), "options": _SMALL},
        {"drafters": ("prompt-lookup", "token-recycling"), "options": _SMALL, "by": "complexity"},
    ),
)

GUARDED = Method(
    name="guarded",
    make=guarded,
    systems=("Break-even guard",),
    summary="any drafter, switched off where it is predicted to be slower than plain decoding",
    paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
    topology=("chain", "tree"),
    capabilities=(Capability.BATCHED, Capability.CROWD_AWARE),
    trials=({"options": {"length": 2}, "probe": 2, "min_speedup": 1.5},),
)

ROWS = (
    ENSEMBLE,
    ADAPTIVE,
    GUARDED,
)
