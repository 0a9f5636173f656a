"""Rows of the drafters that derive drafts from the target's own passes: Jacobi and Lookahead decoding."""

from __future__ import annotations

from outrider.core.drafters.parallel_decoding.jacobi import FILLERS, RENEWALS, Jacobi
from outrider.core.drafters.parallel_decoding.lookahead import Lookahead
from outrider.core.methods.row import Input, Method
from outrider.core.protocol import Capability

JACOBI = Method(
    name="jacobi",
    make=Jacobi,
    systems=(
        "Filler tokens + Jacobi decoding",
        "Speculative Jacobi decoding (SJD)",
        "Coupled redraws (MC-SJD, SJD-PAC's continuation)",
        "Spatial initialisation",
    ),
    summary="refines a window of guesses for the next tokens with every target pass until they converge",
    paper="Accelerating Transformer Inference for Translation via Parallel Decoding (arXiv 2305.10427)",
    topology=("window",),
    draft_tokens=("window",),
    choices={"filler": FILLERS, "renew": RENEWALS},
    inputs={"columns": Input.COLUMNS},
    defaults={
        "image": {"window": 16, "renew": "couple", "filler": "above"},
        "speech": {"window": 16, "renew": "couple"},
    },
    capabilities=(Capability.STANDALONE, Capability.WEIGHT_FREE),
    test_options=(
        {"window": 2, "renew": "greedy", "filler": "copy"},
        {"window": 2, "renew": "redraw", "filler": "random"},
        {"window": 2, "renew": "couple", "filler": "pad"},
        {"window": 2, "renew": "gumbel", "filler": "left", "columns": 2},
        {"window": 3, "renew": "couple", "filler": "above", "columns": 2},
    ),
)

LOOKAHEAD = Method(
    name="lookahead",
    make=Lookahead,
    systems=("LOOKAHEAD",),
    summary="collects n-grams from Jacobi iterations and verifies them in the same target pass",
    paper="Break the Sequential Dependency of LLM Inference Using Lookahead Decoding (arXiv 2402.02057)",
    topology=("tree",),
    capabilities=(Capability.STANDALONE, Capability.WEIGHT_FREE),
    test_options=({"window": 2, "ngram": 2, "guesses": 2}, {"window": 1, "ngram": 3, "guesses": 2}),
)

ROWS = (
    JACOBI,
    LOOKAHEAD,
)
