"""What the reports measured of a relaxed rule's default setting, in a sentence: whether it saves target passes, and
whether the result was judged close to that of plain decoding.

The numbers are in the rows of the rules (outrider.core.methods.rules).
"""

from __future__ import annotations

from outrider.core.methods.row import ALL, Method
from outrider.core.methods.rules import EXACT


def fewer(rule: Method, modality: str) -> bool:
    """Whether a relaxed rule's default was measured to emit fewer tokens per target pass than `exact`."""
    return modality in rule.measured and rule.measured[modality] < EXACT.measured[modality]


def verdict(rule: Method, modality: str) -> str:
    """A relaxed rule's default in one modality; empty for lossless rules."""
    if rule.lossless is not False:
        return ""
    if modality not in rule.measured:
        return "not measured"
    found = f"{rule.measured[modality]:.2f} tokens a pass ({EXACT.name} {EXACT.measured[modality]:.2f})"
    if fewer(rule, modality):
        return f"{found}: fewer than {EXACT.name}, and not exact; not recommended"
    judged = "judged close to plain decoding" if modality in rule.as_good else "quality not judged"
    return f"{found}, {judged}"


def verdicts(rule: Method) -> dict[str, str]:
    """By modality: what was measured, if anything was."""
    return {name: verdict(rule, name) for name in ALL if name in rule.measured and rule.lossless is False}
