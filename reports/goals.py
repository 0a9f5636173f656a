"""The goals of this project beside what was measured: which are missed, by how much, and why.

    python reports/goals.py [FOLDER]

prints Markdown from the JSON of the benchmarks in FOLDER (default: this one). `outrider report all` in a checkout puts
it on the page; the package does not contain it. A goal is a figure of a section's JSON and its minimum or maximum.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.app.report.pages import read_results
from outrider.app.report.sections import SECTIONS
from outrider.app.report.tables import real_time_factor

Row = Mapping[str, Any]
Results = Sequence[Mapping[str, Any]]
_TWO_CORES = "trained on two cores alone; `outrider train` goes on"
_LONG_PROMPTS = "no draft shortens reading a long prompt, and on two cores a longer draft makes a target pass slower"
_ONE_PAIR = "measured from one pair of seeds, which may be close by chance"


@dataclass(frozen=True)
class Goal:
    """`figure` reads it from a section's JSON; None if that has no such row."""

    modality: str
    section: str
    words: str
    figure: Callable[[Results], float | None]
    minimum: float | None = None
    maximum: float | None = None
    why: str = ""

    @property
    def wanted(self) -> str:
        return f"at least {self.minimum:g}" if self.minimum is not None else f"at most {self.maximum:g}"

    def missed(self, value: float) -> bool:
        return (self.minimum is not None and value < self.minimum) or (
            self.maximum is not None and value > self.maximum
        )


def _rows(results: Results, temperature: float | None, drafter: str | None, rule: str | None) -> list[Row]:
    """The rows of a drafter, of several separated by commas, or of all but plain decoding."""
    names = drafter.split(",") if drafter else ()
    return [
        row
        for section in results
        if temperature is None or section["settings"].get("temperature") == temperature
        for row in [*section["rows"], *section.get("peers", ())]
        if row["drafter"] in names or (drafter is None and row["drafter"] != "plain")
        if rule is None or row["rule"] == rule
    ]


def _best(
    key: str,
    drafter: str | None = None,
    *,
    temperature: float | None = 0.0,
    rule: str | None = "exact",
    part: str = "",
) -> Callable[[Results], float | None]:
    """The maximum of a column, for one drafter or any; `part`: a nested group of the row, such as without_looping."""

    def figure(results: Results) -> float | None:
        rows = _rows(results, temperature, drafter, rule)
        values = [(row.get(part) or row)[key] if part else row[key] for row in rows]
        return max((one for one in values if one is not None), default=None)

    return figure


def _relaxed(key: str) -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        return max((row[key] for section in results for row in section["rows"] if not row["lossless"]), default=None)

    return figure


def _judged(measure: str, *, spreads: bool = False) -> Callable[[Results], float | None]:
    """The measure of relaxed pictures minus that of plain decoding; `spreads`: in differences of two seeds of plain."""

    def figure(results: Results) -> float | None:
        rows = [row for section in results for row in section["rows"] if measure in row["quality"]]
        plain = [float(row["quality"][measure]) for row in rows if row["drafter"] == "plain"]
        bent = [float(row["quality"][measure]) for row in rows if not row["lossless"]]
        if not bent or len(plain) < 2:
            return None
        return (bent[0] - plain[0]) / (abs(plain[1] - plain[0]) if spreads else 1)

    return figure


def _beside(peer: str, drafter: str = "plain") -> Callable[[Results], float | None]:
    """Our speed over a peer's in the same run: plain decoding over its plain decoding, or a drafter over its best."""

    def figure(results: Results) -> float | None:
        ours = [row["tokens_per_second"] for section in results for row in section["rows"] if row["drafter"] == drafter]
        peers = [row for section in results for row in section["peers"] if row["engine"] == peer]
        theirs = [row["tokens_per_second"] for row in peers if drafter != "plain" or row["drafter"] == "plain"]
        return max(ours) / max(theirs) if ours and theirs else None

    return figure


def _of_tasks(*names: str) -> Callable[[Results], float | None]:
    """The largest mean speedup of any drafter over some tasks, or all, without outputs that loop."""

    def figure(results: Results) -> float | None:
        means = []
        for row in _rows(results, 0.0, None, "exact"):
            tasks = (row["without_looping"] or {}).get("tasks") or row["tasks"]
            some = [tasks.get(name) for name in names or tasks]
            if some and all(some):
                means.append(sum(one["speedup"] for one in some) / len(some))
        return max(means, default=None)

    return figure


def _worst_task(drafter: str) -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        rows = _rows(results, 0.0, drafter, "exact")
        return min((one["speedup"] for row in rows for one in row["tasks"].values() if one), default=None)

    return figure


def _heard(measure: str, drafter: str = "plain") -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        rows = [
            row
            for section in results
            for row in section["rows"]
            if row["drafter"] == drafter and measure in row["quality"]
        ]
        return float(rows[0]["quality"][measure]["value"]) if rows else None

    return figure


def _apart(measure: str, key: str = "apart") -> Callable[[Results], float | None]:
    """The measure of the relaxed row with the most tokens per target pass, minus that of plain decoding."""

    def figure(results: Results) -> float | None:
        rows = [
            row for section in results for row in section["rows"] if not row["lossless"] and measure in row["quality"]
        ]
        best = max(rows, key=lambda row: float(row["tokens_per_pass"]), default=None)
        return None if best is None else float(best["quality"][measure][key])

    return figure


def _rung(name: str, measure: str) -> Callable[[Results], float | None]:
    """A measure of a reference that drafts nothing: the teacher, the codec."""

    def figure(results: Results) -> float | None:
        rungs = [section["ladder"][name] for section in results if name in section.get("ladder", {})]
        return float(rungs[0][measure]["value"]) if rungs else None

    return figure


def _plain(key: str) -> Callable[[Results], float | None]:
    def figure(results: Results) -> float | None:
        rows = [row for section in results for row in section["rows"] if row["drafter"] == "plain" and key in row]
        return float(rows[0][key]) if rows else None

    return figure


def _work(results: Results) -> float | None:
    rows = [row for section in results for row in section["rows"] if row["drafter"] == "plain"]
    return real_time_factor(rows[0]) if rows else None


_CALLS, _SOUND = "tokens_per_pass", "without_looping"
GOALS = (
    Goal("text", "engines-bfloat16", "plain decoding, speed relative to transformers", _beside("transformers"), 3.0),
    Goal(
        "text",
        "engines-int4",
        "plain decoding in 4 bits, speed relative to OpenVINO GenAI",
        _beside("openvino-genai"),
        1.0,
    ),
    Goal(
        "text",
        "engines-int4",
        "EAGLE-3 in 4 bits, speed relative to OpenVINO GenAI's best",
        _beside("openvino-genai", "eagle3"),
        1.0,
    ),
    Goal(
        "text",
        "editing",
        "input-guided drafting on editing, tokens per target pass",
        _best(_CALLS, "input-guided"),
        2.5,
    ),
    Goal("text", "given", "the best without training, mean speedup over tasks", _of_tasks(), 1.25),
    Goal(
        "text",
        "given",
        "the same, on summarisation and retrieval",
        _of_tasks("summarization", "rag"),
        1.5,
        why=_LONG_PROMPTS,
    ),
    Goal("text", "given", "guarded on its slowest task, speedup", _worst_task("guarded"), 0.95),
    Goal(
        "text", "trained", "EAGLE-3, tokens per target pass", _best(_CALLS, "eagle3", part=_SOUND), 2.2, why=_TWO_CORES
    ),
    Goal(
        "text", "trained", "Medusa, tokens per target pass", _best(_CALLS, "medusa", part=_SOUND), 1.6, why=_TWO_CORES
    ),
    Goal(
        "text",
        "trained",
        "draft model, tokens per target pass",
        _best(_CALLS, "draft-model", part=_SOUND),
        1.8,
        why=_TWO_CORES,
    ),
    Goal(
        "text",
        "trained",
        "the best trained drafter, alone or in auto, speedup",
        _best("speedup", "draft-model,medusa,hydra,eagle3,dspark,kangaroo,auto", part=_SOUND),
        1.25,
        why=_TWO_CORES,
    ),
    Goal("image", "methods", "coupled Jacobi, codes per target pass", _best(_CALLS, "jacobi", temperature=1.0), 2.0),
    Goal("image", "methods", "the best exact method, codes per target pass", _best(_CALLS, temperature=1.0), 2.5),
    Goal("image", "methods", "the best exact method, speedup", _best("speedup", temperature=1.0), 1.4),
    Goal("image", "relaxed", "the best relaxed rule, codes per target pass", _relaxed(_CALLS), 4.0),
    Goal("image", "relaxed", "the best relaxed rule, speedup", _relaxed("speedup"), 2.0),
    Goal("image", "judged", "the relaxed rule judged, codes per target pass", _relaxed(_CALLS), 4.0),
    Goal(
        "image",
        "judged",
        "its KID above plain decoding's, in differences between seeds",
        _judged("KID", spreads=True),
        maximum=1.0,
        why=_ONE_PAIR,
    ),
    Goal("image", "judged", "its top-5 prompt agreement above plain decoding's", _judged("top-5"), -0.02),
    Goal(
        "speech",
        "speed",
        "heads with the speech tree, tokens per target pass",
        _best(_CALLS, "medusa,hydra", temperature=None),
        1.4,
    ),
    Goal("speech", "speed", "the best exact method, speedup", _best("speedup", temperature=None), 1.2),
    Goal(
        "speech",
        "speed",
        "the best under tolerance, speedup",
        _best("speedup", temperature=None, rule="tolerance"),
        1.7,
    ),
    Goal("speech", "speed", "real-time factor of plain decoding", _work, maximum=1.0),
    Goal("speech", "judged", "tolerance, tokens per target pass", _relaxed(_CALLS), 2.5),
    Goal(
        "speech",
        "judged",
        "its word error above plain decoding's, at 95 %",
        _apart("word_error", "apart_high"),
        maximum=0.02,
    ),
    Goal("speech", "judged", "its DNSMOS above plain decoding's", _apart("dnsmos"), -0.05),
    Goal("speech", "judged", "word error of plain decoding", _heard("word_error"), maximum=0.12),
    Goal("speech", "judged", "DNSMOS of plain decoding", _heard("dnsmos"), 2.8),
    Goal("speech", "judged", "share of plain decoding without an end token", _heard("missing_end"), maximum=0.02),
    Goal(
        "speech",
        "judged",
        "word error of the teacher passed through the codec",
        _rung("codec", "word_error"),
        maximum=0.04,
    ),
    Goal("speech", "judged", "entropy per token of plain decoding", _plain("target_entropy"), 1.5),
)


def short(everything: Mapping[str, Mapping[str, Results]]) -> str:
    """Every missed goal with its distance, and how many are met, missed and not measured."""
    missed, met, unknown = [], 0, []
    for goal in GOALS:
        value = goal.figure(everything.get(goal.modality, {}).get(goal.section, ()))
        named = f"{goal.modality}, {goal.words}"
        if value is None:
            unknown.append(named)
        elif goal.missed(value):
            bound = goal.minimum if goal.minimum is not None else goal.maximum
            assert bound is not None
            why = f"; {goal.why}" if goal.why else ""
            missed.append(f"- {named}: {value:.2f}, wanted {goal.wanted} ({abs((value - bound) / bound):.0%} off{why})")
        else:
            met += 1
    parts = ["\n".join(missed) + "\n"] if missed else []
    parts.append(f"{met} of {len(GOALS)} goals are met, {len(missed)} missed, {len(unknown)} not measured here.\n")
    return "\n".join(parts)


def main(folder: Path) -> None:
    found = {
        name: {section.name: read_results(folder / name, section) for section in SECTIONS[name]} for name in SECTIONS
    }
    print(short(found), end="")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent)
