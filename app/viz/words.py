"""The ten words of the page, with their meanings. docs/glossary.md begins with the same."""

from __future__ import annotations

from outrider.app.viz.svg import Drawing, safe

WORDS = {
    "Target": "The model whose output is wanted.",
    "Drafter": "The component that guesses: a lookup table, a smaller model, trained heads, or the target itself.",
    "Guess": "A token that the drafter proposes. The guesses for one target pass are a draft: a chain or a tree.",
    "Target pass": "One pass of the target, which checks all guesses at once and adds a token of its own.",
    "Accepted": "Said of a guess that the acceptance rule lets into the output.",
    "Rejected": "Said of a guess that the rule refuses: the target's own token stands there; the rest is discarded.",
    "Acceptance rule": "Decides which guesses are accepted, from p, the target's probability of a guess, and q, the "
    "drafter's.",
    "Lossless": "Said of a rule under which the output has exactly the target's distribution. Other rules are relaxed.",
    "Tokens per target pass": "Output tokens divided by target passes. Without guesses it is 1; a speedup cannot be "
    "higher.",
    "Total variation": "How far a relaxed rule moved a token's distribution from the target's, from 0 to 1.",
}


def words() -> Drawing:
    """The words as a list of definitions."""
    inner = "".join(f"<dt>{safe(word)}</dt><dd>{safe(meaning)}</dd>" for word, meaning in WORDS.items())
    return Drawing(f'<dl class="or-words">{inner}</dl>')
