"""What the reports measured of a relaxed rule's default setting, in a sentence: whether it pays, and whether the result
is as good as that of plain decoding. The numbers are in the rows of the rules (outrider.core.methods.rules)."""

from __future__ import annotations

from outrider.core.methods.row import ALL, Method
from outrider.core.methods.rules import EXACT


def slower(rule: Method, modality: str) -> bool:
    """Whether a relaxed rule's default was measured to emit fewer tokens per target pass than `exact`."""
    return not rule.lossless and rule.measured.get(modality, 1e9) < EXACT.measured.get(modality, 0)


def verdict(rule: Method, modality: str) -> str:
    """A relaxed rule's default in one modality; empty for lossless rules."""
    if rule.lossless is not False:
        return ""
    if modality not in rule.measured:
        return "not measured"
    found = f"{rule.measured[modality]:.2f} tokens a pass ({EXACT.name} {EXACT.measured[modality]:.2f})"
    if slower(rule, modality):
        return f"{found}: slower than {EXACT.name}, and not exact; not recommended"
    judged = "as good as plain decoding" if modality in rule.as_good else "quality not judged"
    return f"{found}, {judged}"


def verdicts(rule: Method) -> dict[str, str]:
    """By modality: what was measured, if anything was."""
    return {name: verdict(rule, name) for name in ALL if name in rule.measured and rule.lossless is False}
