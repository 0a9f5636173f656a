"""Rows of the combined drafters, which merge, choose or guard other drafters."""

from __future__ import annotations

from outrider.core.drafters.combined.adaptive import Adaptive
from outrider.core.drafters.combined.auto import Auto
from outrider.core.drafters.combined.ensemble import Ensemble
from outrider.core.drafters.combined.guarded import Guarded
from outrider.core.methods.lookup import PROMPT_LOOKUP, SUFFIX, TOKEN_RECYCLING
from outrider.core.methods.row import Input, Method
from outrider.core.protocol import Capability

_MEMBERS = {"drafters": (SUFFIX.name, TOKEN_RECYCLING.name), "options": None}
_SMALL = {PROMPT_LOOKUP.name: {"length": 2}, TOKEN_RECYCLING.name: {"nodes": 3, "depth": 2}}

ENSEMBLE = Method(
    name="ensemble",
    make=Ensemble,
    systems=("Merged drafts of several drafters",),
    summary="merges the most probable drafted tokens of several drafters into one tree",
    paper="SAM Decoding: Speculative Decoding via Suffix Automaton (arXiv 2411.10666)",
    topology=("tree",),
    inputs={"drafters": Input.DRAFTERS},
    presets=_MEMBERS,
    capabilities=(Capability.BATCHED, Capability.COMBINES),
    test_options=({"nodes": 3}, {"drafters": (PROMPT_LOOKUP.name, TOKEN_RECYCLING.name), "nodes": 3}),
)

ADAPTIVE = Method(
    name="adaptive",
    make=Adaptive,
    systems=("Adaptive drafter choice", "Complexity estimate"),
    summary="chooses a drafter for each round, by past speedup or by the complexity of the text",
    paper="Context-Aware Assistant Selection for Improved Inference Acceleration (arXiv 2408.08470)",
    topology=("chain", "tree"),
    inputs={"drafters": Input.DRAFTERS},
    presets=_MEMBERS,
    capabilities=(Capability.COMBINES, Capability.CROWD_AWARE),
    test_options=(
        {"drafters": (PROMPT_LOOKUP.name, TOKEN_RECYCLING.name, "plain"), "options": _SMALL},
        {"drafters": (PROMPT_LOOKUP.name, TOKEN_RECYCLING.name), "options": _SMALL, "by": "complexity"},
    ),
)

GUARDED = Method(
    name="guarded",
    make=Guarded,
    systems=("Break-even guard",),
    summary="runs any drafter, but skips drafting when it is predicted to be slower than plain decoding",
    paper="Fast Inference from Transformers via Speculative Decoding (arXiv 2211.17192)",
    topology=("chain", "tree"),
    inputs={"drafter": Input.DRAFTER, "costs": Input.PASS_COSTS},
    presets={"drafter": PROMPT_LOOKUP.name, "options": None},
    capabilities=(Capability.BATCHED, Capability.CROWD_AWARE),
    test_options=({"options": {"length": 2}, "probe": 2, "min_speedup": 1.5},),
)

AUTO = Method(  # not in the table of drafters, because only text measures the costs it needs
    name="auto",
    make=Auto,
    systems=(),
    summary="merges training-free drafters and a draft head, if there is one, as far as is predicted to pay off here",
    paper="",
    topology=("tree",),
    draft_tokens=("max_guesses",),
    ranges={"max_guesses": (1, 32, 1)},
    modalities=("text",),
    inputs={"drafters": Input.DRAFTERS, "costs": Input.PASS_COSTS},
    presets=_MEMBERS,
    capabilities=(Capability.BATCHED, Capability.COMBINES),
)

ROWS = (
    ENSEMBLE,
    ADAPTIVE,
    GUARDED,
)
