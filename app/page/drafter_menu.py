"""The menu of drafters: five recommended ones with a line each, plain decoding, and the others by family.

Reads the tables of methods; independent of Gradio.
"""

from __future__ import annotations

from collections.abc import Mapping

from outrider.app.page.backends.interface import Backend, selectable_drafters
from outrider.core.bench.runner import PLAIN
from outrider.core.methods import (
    AUTO,
    combined,
    draft_model,
    lookup,
    parallel_decoding,
    self_speculative,
    trained,
)

RECOMMENDED: Mapping[str, Mapping[str, str]] = {  # by modality: drafters to begin with, and what they are good for
    "text": {
        AUTO.name: "chooses by itself and measures what pays; needs no training",
        "eagle3": "a small trained head; most accepted guesses on any prompt",
        "prompt-lookup": "copies from the prompt; for edits, summaries, quotations",
        "token-recycling": "remembers what the target found likely; needs no training",
        "draft-model": "a second, smaller model guesses",
    },
    "image": {
        "jacobi": "refines a window of guesses in every pass; needs no training",
        "spatial": "guesses from the codes above and beside",
        "token-recycling": "remembers which code followed which",
        "suffix": "finds the longest repetition so far",
        "draft-model": "a second, smaller model guesses",
    },
    "speech": {
        "jacobi": "refines a window of guesses in every pass; needs no training",
        "suffix": "finds the longest repetition so far",
        "token-recycling": "remembers which token followed which",
        "eagle3": "a small trained head",
        "draft-model": "a second, smaller model guesses",
    },
}
FAMILIES = {
    "Lookup": lookup.ROWS,
    "Parallel decoding": parallel_decoding.ROWS,
    "Draft model": draft_model.ROWS,
    "The target itself": self_speculative.ROWS,
    "Trained": trained.ROWS,
    "Combined": combined.ROWS,
}


def drafter_menu(backend: Backend) -> list[tuple[str, str]]:
    """The choices of the dropdown with their labels: recommended ones, no drafting, and the others by family."""
    names = selectable_drafters(backend)
    if backend.is_server:
        return [(name, name) for name in names]
    best = {name: text for name, text in RECOMMENDED[backend.name].items() if name in names}
    menu = [(f"★ {name}: {text}", name) for name, text in best.items()]
    menu += [(f"{PLAIN}: no guesses", PLAIN)] if PLAIN in names else []
    for title, rows in FAMILIES.items():
        rest = [row.name for row in rows if row.name in names and row.name not in best]
        menu += [(f"{title} · {name}", name) for name in rest]
    known = {name for _, name in menu}
    return [*menu, *((name, name) for name in names if name not in known)]
