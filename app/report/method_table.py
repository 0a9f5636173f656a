"""The Markdown table of every method: the published systems it implements, and the modalities it runs on.

`outrider methods --markdown` prints it, and docs/guides/where-methods-run.md contains it.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from outrider.app.report.tables import table
from outrider.app.report.weights import recipe_of

_TARGETS = {"text": (), "image": ("tokens",), "speech": ("codec", "voice")}  # parts of our own targets
_SIGNS = {"yes": "✓", "train": "○", "no": ""}


def markdown() -> str:
    """The tables of drafters and of rules: ✓ runs, ○ runs once its weights are trained."""
    from outrider.core.methods import DRAFTERS, RULES
    from outrider.image.resolve_drafter import drafters as of_image
    from outrider.image.resolve_drafter import rules as rules_of_image
    from outrider.speech.resolve_drafter import drafters as of_speech
    from outrider.speech.resolve_drafter import rules as rules_of_speech
    from outrider.text.resolve_drafter import drafters as of_text
    from outrider.text.resolve_drafter import rules as rules_of_text

    known = {"text": of_text(), "image": of_image(), "speech": of_speech()}
    body = [
        [
            f"`{name}`",
            "; ".join(method.systems),
            *(_SIGNS[_state(modality, name, names)] for modality, names in known.items()),
        ]
        for name, method in DRAFTERS.items()
    ]
    parts = [table(("drafter", "implements", *known), body, left=2)]
    known = {"text": rules_of_text(), "image": rules_of_image(), "speech": rules_of_speech()}
    body = [
        [
            f"`{name}`",
            "; ".join(method.systems),
            "lossless" if method.lossless else "relaxed",
            *(_SIGNS["yes" if name in names else "no"] for names in known.values()),
        ]
        for name, method in RULES.items()
    ]
    return "\n".join([*parts, table(("rule", "implements", "", *known), body, left=3)])


def _state(modality: str, drafter: str, known: list[str]) -> str:
    if drafter not in known:
        return "no"
    if not set(_TARGETS[modality]) <= shipped(modality):
        return "train"
    recipe = recipe_of(modality, drafter).removeprefix(f"{modality}-")
    return "yes" if not recipe or recipe in shipped(modality) else "train"


def shipped(modality: str) -> set[str]:
    """The parts whose weights are in the package, by the names of their files."""
    folder = Path(str(resources.files(f"outrider.{modality}"))) / "weights"
    return {path.name.split(".")[-2] for path in folder.glob("*.safetensors")}
