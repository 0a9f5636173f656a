"""What was aimed at, beside what was measured: the report says itself where it falls short, how far, and why.

A mark is a figure of a section's JSON and the least or the most it should be. Knows the JSON of benches alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.app.report.tables import work

Row = Mapping[str, Any]
Found = Sequence[Mapping[str, Any]]
_TWO_CORES = "trained on two cores alone; `outrider train` goes on"
_LONG_PROMPTS = "reading a long prompt counts, which no guess shortens, and guesses make a call dearer on two cores"
_ONE_PAIR = "the spread is that of one pair of seeds, which may come out next to alike by chance"


@dataclass(frozen=True)
class Mark:
    """`figure` reads it off a section's JSON, or gives None where that has no such row."""

    modality: str
    section: str
    words: str
    figure: Callable[[Found], float | None]
    least: float | None = None
    most: float | None = None
    why: str = ""

    @property
    def wanted(self) -> str:
        return f"at least {self.least:g}" if self.least is not None else f"at most {self.most:g}"

    def missed(self, value: float) -> bool:
        return (self.least is not None and value < self.least) or (self.most is not None and value > self.most)


def _rows(found: Found, temperature: float | None, drafter: str | None, rule: str | None) -> list[Row]:
    """Those of a drafter, of any of several with commas between them, or of all but plain decoding."""
    names = drafter.split(",") if drafter else ()
    return [
        row
        for one in found
        if temperature is None or one["settings"].get("temperature") == temperature
        for row in [*one["rows"], *one.get("peers", ())]
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
) -> Callable[[Found], float | None]:
    """The largest of a column, of one drafter or of any; `part` is of the row: without_looping, say."""

    def figure(found: Found) -> float | None:
        rows = _rows(found, temperature, drafter, rule)
        values = [(row.get(part) or row)[key] if part else row[key] for row in rows]
        return max((one for one in values if one is not None), default=None)

    return figure


def _relaxed(key: str) -> Callable[[Found], float | None]:
    def figure(found: Found) -> float | None:
        return max((row[key] for one in found for row in one["rows"] if not row["lossless"]), default=None)

    return figure


def _judged(measure: str, *, spreads: bool = False) -> Callable[[Found], float | None]:
    """How much more of it relaxed pictures have than plain decoding's; in spreads of two of plain decoding's seeds."""

    def figure(found: Found) -> float | None:
        rows = [row for one in found for row in one["rows"] if measure in row["quality"]]
        plain = [float(row["quality"][measure]) for row in rows if row["drafter"] == "plain"]
        bent = [float(row["quality"][measure]) for row in rows if not row["lossless"]]
        if not bent or len(plain) < 2:
            return None
        return (bent[0] - plain[0]) / (abs(plain[1] - plain[0]) if spreads else 1)

    return figure


def _beside(peer: str, drafter: str = "plain") -> Callable[[Found], float | None]:
    """How many times faster plain decoding is than a peer's in the same run; or a drafter than the peer at its best."""

    def figure(found: Found) -> float | None:
        ours = [row["tokens_per_second"] for one in found for row in one["rows"] if row["drafter"] == drafter]
        peers = [row for one in found for row in one["peers"] if row["engine"] == peer]
        theirs = [row["tokens_per_second"] for row in peers if drafter != "plain" or row["drafter"] == "plain"]
        return max(ours) / max(theirs) if ours and theirs else None

    return figure


def _of_tasks(*names: str) -> Callable[[Found], float | None]:
    """The largest speedup of any drafter, on average over some tasks, or all; without outputs that loop."""

    def figure(found: Found) -> float | None:
        means = []
        for row in _rows(found, 0.0, None, "exact"):
            tasks = (row["without_looping"] or {}).get("tasks") or row["tasks"]
            some = [tasks.get(name) for name in names or tasks]
            if some and all(some):
                means.append(sum(one["speedup"] for one in some) / len(some))
        return max(means, default=None)

    return figure


def _worst_task(drafter: str) -> Callable[[Found], float | None]:
    def figure(found: Found) -> float | None:
        rows = _rows(found, 0.0, drafter, "exact")
        return min((one["speedup"] for row in rows for one in row["tasks"].values() if one), default=None)

    return figure


def _heard(measure: str, drafter: str = "plain") -> Callable[[Found], float | None]:
    def figure(found: Found) -> float | None:
        rows = [row for one in found for row in one["rows"] if row["drafter"] == drafter and measure in row["quality"]]
        return float(rows[0]["quality"][measure]["value"]) if rows else None

    return figure


def _apart(measure: str, key: str = "apart") -> Callable[[Found], float | None]:
    """How much more of it is heard of the relaxed row with the most tokens a call than of plain decoding."""

    def figure(found: Found) -> float | None:
        rows = [row for one in found for row in one["rows"] if not row["lossless"] and measure in row["quality"]]
        best = max(rows, key=lambda row: float(row["tokens_per_call"]), default=None)
        return None if best is None else float(best["quality"][measure][key])

    return figure


def _rung(name: str, measure: str) -> Callable[[Found], float | None]:
    """What is heard of somebody who drafts nothing: the teacher, the codec."""

    def figure(found: Found) -> float | None:
        rungs = [one["ladder"][name] for one in found if name in one.get("ladder", {})]
        return float(rungs[0][measure]["value"]) if rungs else None

    return figure


def _plain(key: str) -> Callable[[Found], float | None]:
    def figure(found: Found) -> float | None:
        rows = [row for one in found for row in one["rows"] if row["drafter"] == "plain" and key in row]
        return float(rows[0][key]) if rows else None

    return figure


def _work(found: Found) -> float | None:
    rows = [row for one in found for row in one["rows"] if row["drafter"] == "plain"]
    return work(rows[0]) if rows else None


_CALLS, _SOUND = "tokens_per_call", "without_looping"
MARKS = (
    Mark("text", "peers-bfloat16", "plain decoding, times transformers'", _beside("transformers"), 3.0),
    Mark("text", "peers-int4", "plain decoding in 4 bits, times OpenVINO's", _beside("openvino-genai"), 1.0),
    Mark("text", "peers-int4", "EAGLE-3 in 4 bits, times OpenVINO's best", _beside("openvino-genai", "eagle3"), 1.0),
    Mark(
        "text",
        "editing",
        "input-guided drafting on editing, tokens a call",
        _best(_CALLS, "input-guided"),
        2.5,
    ),
    Mark("text", "given", "the best without training, speedup, on average over tasks", _of_tasks(), 1.25),
    Mark(
        "text",
        "given",
        "the same, on summaries and retrieval",
        _of_tasks("summarization", "rag"),
        1.5,
        why=_LONG_PROMPTS,
    ),
    Mark("text", "given", "the guard at its slowest task, speedup", _worst_task("guarded"), 0.95),
    Mark("text", "trained", "EAGLE-3, tokens a call", _best(_CALLS, "eagle3", part=_SOUND), 2.2, why=_TWO_CORES),
    Mark("text", "trained", "Medusa, tokens a call", _best(_CALLS, "medusa", part=_SOUND), 1.6, why=_TWO_CORES),
    Mark(
        "text", "trained", "draft model, tokens a call", _best(_CALLS, "draft-model", part=_SOUND), 1.8, why=_TWO_CORES
    ),
    Mark(
        "text",
        "trained",
        "the best trained drafter, alone or as auto has it, speedup",
        _best("speedup", "draft-model,medusa,hydra,eagle3,dspark,kangaroo,auto", part=_SOUND),
        1.25,
        why=_TWO_CORES,
    ),
    Mark("image", "methods", "coupled Jacobi, codes a call", _best(_CALLS, "jacobi", temperature=1.0), 2.0),
    Mark("image", "methods", "the best exact method, codes a call", _best(_CALLS, temperature=1.0), 2.5),
    Mark("image", "methods", "the best exact method, speedup", _best("speedup", temperature=1.0), 1.4),
    Mark("image", "relaxed", "the best relaxed rule, codes a call", _relaxed(_CALLS), 4.0),
    Mark("image", "relaxed", "the best relaxed rule, speedup", _relaxed("speedup"), 2.0),
    Mark("image", "judged", "the relaxed rule judged, codes a call", _relaxed(_CALLS), 4.0),
    Mark(
        "image",
        "judged",
        "its KID above plain decoding's, in spreads of seeds",
        _judged("KID", spreads=True),
        most=1.0,
        why=_ONE_PAIR,
    ),
    Mark("image", "judged", "its prompts met, above plain decoding's", _judged("top-5"), -0.02),
    Mark(
        "speech",
        "speed",
        "heads with the speech tree, tokens a call",
        _best(_CALLS, "medusa,hydra", temperature=None),
        1.4,
    ),
    Mark("speech", "speed", "the best exact method, speedup", _best("speedup", temperature=None), 1.2),
    Mark(
        "speech",
        "speed",
        "the best under tolerance, speedup",
        _best("speedup", temperature=None, rule="tolerance"),
        1.7,
    ),
    Mark("speech", "speed", "work of plain decoding, seconds for a second of sound", _work, most=1.0),
    Mark("speech", "judged", "tolerance, tokens a call", _relaxed(_CALLS), 2.5),
    Mark(
        "speech",
        "judged",
        "its word error above plain decoding's, at 95 %",
        _apart("word_error", "apart_high"),
        most=0.02,
    ),
    Mark("speech", "judged", "its DNSMOS above plain decoding's", _apart("dnsmos"), -0.05),
    Mark("speech", "judged", "word error of plain decoding", _heard("word_error"), most=0.12),
    Mark("speech", "judged", "DNSMOS of plain decoding", _heard("dnsmos"), 2.8),
    Mark("speech", "judged", "plain decoding that comes to no end", _heard("missing_end"), most=0.02),
    Mark(
        "speech",
        "judged",
        "word error of what the codec leaves of the teacher",
        _rung("codec", "word_error"),
        most=0.04,
    ),
    Mark("speech", "judged", "nats of the voice's own distribution", _plain("target_entropy"), 1.5),
)


def short(everything: Mapping[str, Mapping[str, Found]]) -> str:
    """Every mark that is missed, with the distance; how many are met; and those that nothing was measured for."""
    missed, met, unknown = [], 0, []
    for mark in MARKS:
        value = mark.figure(everything.get(mark.modality, {}).get(mark.section, ()))
        named = f"{mark.modality}, {mark.words}"
        if value is None:
            unknown.append(named)
        elif mark.missed(value):
            bound = mark.least if mark.least is not None else mark.most
            assert bound is not None
            why = f"; {mark.why}" if mark.why else ""
            missed.append(f"- {named}: {value:.2f}, wanted {mark.wanted} ({abs((value - bound) / bound):.0%} off{why})")
        else:
            met += 1
    parts = ["\n".join(missed) + "\n"] if missed else []
    parts.append(f"{met} of {len(MARKS)} marks are met, {len(missed)} missed, {len(unknown)} not measured here.\n")
    return "\n".join(parts)
