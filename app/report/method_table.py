"""Every method as a Markdown table: what of the literature it stands for, and on what it runs.

The README holds it; `outrider methods --markdown` prints it. Knows the tables of methods and which weights ship.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from outrider.app.report.tables import table
from outrider.app.report.weights import recipe_of

_TARGETS = {"text": (), "image": ("tokens",), "speech": ("codec", "voice")}  # what is drafted for, where it is ours
_SIGNS = {"yes": "✓", "train": "○", "no": ""}


def markdown() -> str:
    """Drafters, then rules: ✓ runs, ○ runs once its weights are trained."""
    from outrider.core.methods import DRAFTERS, RULES
    from outrider.image.resolve_drafter import drafters as of_image
    from outrider.image.resolve_drafter import rules as rules_of_image
    from outrider.speech.model import drafters as of_speech
    from outrider.speech.model import rules as rules_of_speech
    from outrider.text.model import drafters as of_text
    from outrider.text.model import rules as rules_of_text

    known = {"text": of_text(), "image": of_image(), "speech": of_speech()}
    body = [
        [f"`{name}`", "; ".join(method.systems), *(_SIGNS[_state(one, name, some)] for one, some in known.items())]
        for name, method in DRAFTERS.items()
    ]
    parts = [table(("drafter", "stands for", *known), body, left=2)]
    judged = {"text": rules_of_text(), "image": rules_of_image(), "speech": rules_of_speech()}
    body = [
        [
            f"`{name}`",
            "; ".join(method.systems),
            "exact" if method.lossless else "relaxed",
            *(_SIGNS["yes" if name in some else "no"] for some in judged.values()),
        ]
        for name, method in RULES.items()
    ]
    return "\n".join([*parts, table(("rule", "stands for", "", *judged), body, left=3)])


def _state(modality: str, drafter: str, known: list[str]) -> str:
    if drafter not in known:
        return "no"
    if not set(_TARGETS[modality]) <= shipped(modality):
        return "train"
    recipe = recipe_of(modality, drafter).removeprefix(f"{modality}-")
    return "yes" if not recipe or recipe in shipped(modality) else "train"


def shipped(modality: str) -> set[str]:
    """The parts whose weights are in the package, by what their files are called."""
    folder = Path(str(resources.files(f"outrider.{modality}"))) / "weights"
    return {path.name.split(".")[-2] for path in folder.glob("*.safetensors")}
