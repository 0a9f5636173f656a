"""A trace as a story for the stepper of the page: a sentence for every target pass, and its guesses as plain data.

The data is JSON in an attribute, which `app/page/static/page.js` draws as text only. Pure functions of traces; the text
of a token is given by a function. Independent of models and pages.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import islice
from typing import Any

from outrider.app.viz.dice import dice
from outrider.app.viz.svg import Drawing, cut, safe, visible
from outrider.app.viz.trace_html import Name, layout, numbered, shown_nodes
from outrider.core.trace import Step, Trace

_ROOM = 1_500_000  # characters of JSON after which no more steps are told
_LONGEST = 60  # characters of a token
_COMMITTED = 64  # tokens of one step
_LIKELIEST = 4  # of the target at one position
_ENDINGS = {"end": " The answer ends here.", "stop": " A stop string ends it here.", "limit": " The limit is reached."}


def sentence(step: Step, name: Name = numbered) -> str:
    """What happened in a step, in one sentence made from its numbers. `app/viewer/page/story.js` says the same."""
    if not step.emitted:
        return "Nothing was committed."
    last, ending = _quoted(step.emitted[-1], name), _ENDINGS.get(step.finish or "", "")
    if not step.drafted:
        return f"No guess: one target pass wrote {last}.{ending}"
    guessed, kept = len(step.drafted), step.accepted
    how_many = "none" if not kept else str(kept) if kept < guessed else "it" if kept == 1 else "all"
    text = f"Guessed {guessed}{' in a tree' if guessed > max(_depths(step)) else ''}, kept {how_many}"
    if step.sources[-1] == "bonus":
        text += f"; the same target pass added {last}"
    elif step.sources[-1] == "resampled":
        wrong = [step.drafted[node] for node in _refused(step)]
        instead = f", not {_quoted(wrong[0], name)}" if wrong and wrong[0] >= 0 else ""
        text += f"; the target wanted {last}{instead}, so the rest was discarded"
    relaxed = step.sources.count("relaxed")
    return f"{text}.{f' {relaxed} of them only because the rule is relaxed.' if relaxed else ''}{ending}"


def _quoted(token: int, name: Name) -> str:
    """A token in a sentence; other engines do not say which those below 0 were."""
    return "another token" if token < 0 else f"“{cut(visible(name(token)), 24).strip() or '␣'}”"


def _depths(step: Step) -> list[int]:
    depths: list[int] = []
    for parent in step.parents:
        depths.append(1 if parent < 0 else depths[parent] + 1)
    return depths


def _refused(step: Step) -> list[int]:
    """The nodes that were tried where the path ended, and rejected."""
    last = step.path[-1] if step.path else -1
    return [node for node, parent in enumerate(step.parents) if parent == last and step.tried[node]]


def story(trace: Trace, name: Name = numbered) -> Drawing:
    """All steps as JSON for an attribute, those of one round together; as many rounds as fit."""
    names: dict[str, int] = {}

    def named(token: int) -> int:
        return names.setdefault(cut(visible(name(token)), _LONGEST), len(names))

    rounds: list[dict[str, Any]] = []
    room = _ROOM
    for place, (step, thrown) in enumerate(zip(trace.steps, dice(trace), strict=True)):
        told = _told(step, thrown, name, named)
        told["s"] = place
        room -= 60 + 80 * len(told["nodes"]) + 90 * len(told["out"]) + len(told["say"])
        if room < 0 or sum(map(len, names)) > _ROOM:
            break
        if rounds and rounds[-1]["index"] == step.index:
            rounds[-1]["rows"].append(told)
        else:
            rounds.append({"index": step.index, "ms": round(1e3 * step.times.total, 2), "rows": [told]})
    told_steps = sum(len(round_["rows"]) for round_ in rounds)
    data = {"names": list(names), "rounds": rounds, "rows": sorted({step.row for step in trace.steps})[:64]}
    data |= {"missing": len(trace.steps) - told_steps, "lossless": trace.lossless}
    data |= {"greedy": trace.options.get("temperature") == 0}
    return Drawing(safe(json.dumps(data, separators=(",", ":"), allow_nan=False)))


def _told(step: Step, thrown: Sequence[float | None], name: Name, named: Any) -> dict[str, Any]:
    """One step: its nodes as [name, column, line, state, p, q, chance, dice] and its committed tokens as
    [name, source, node, likeliest tokens of the target]."""
    shown = shown_nodes(step)
    columns, lines = layout(shown, {node: step.parents[node] for node in shown})
    path = {node: step.sources[level] for level, node in enumerate(step.path) if level < len(step.sources)}
    nodes = []
    for node in shown:
        state = path.get(node) or ("rejected" if step.tried[node] else "untried")
        numbers = _rounded(step.p, node), None if step.fixed[node] else _rounded(step.q, node)
        extra = _rounded(step.chance, node), _rounded(thrown, node) if step.tried[node] else None
        nodes.append([named(step.drafted[node]), columns[node], lines[node], state, *numbers, *extra])
    place = {node: index for index, node in enumerate(shown)}
    out: list[list[Any]] = []
    for level, (token, source) in islice(enumerate(zip(step.emitted, step.sources, strict=True)), _COMMITTED):
        node_place = place.get(step.path[level]) if level < len(step.path) else None
        likely = step.alternatives[level][:_LIKELIEST] if level < len(step.alternatives) else ()
        out.append([named(token), source, node_place, [[named(other), round(share, 4)] for other, share in likely]])
    hidden = len(step.drafted) - len(shown)
    told: dict[str, Any] = {"row": step.row, "say": sentence(step, name), "nodes": nodes, "out": out, "more": hidden}
    if step.note:
        told["note"] = visible(step.note[:160])
    if step.total_variation:
        told["tv"] = round(sum(step.total_variation), 4)
    return told


def _rounded(values: Sequence[float | None], place: int) -> float | None:
    value = values[place] if place < len(values) else None
    return None if value is None else round(value, 4)
