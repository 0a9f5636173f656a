"""The pages of `outrider report`: of what a folder of JSON holds, and of all modalities together.

Every figure stands beside the command that found it; what was not measured is said with the command that would. Knows
the JSON of benches; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.app.report.sections import CURVES, METHODS, NOT_MEASURED, SECTIONS, Section
from outrider.app.report.tables import Found, apart, paying, sampled, table, tables
from outrider.app.report.weights import recipe_of, untrained

_HOW = (
    "Speeds are medians over prompts; a speedup is the median of ratios to plain decoding in the same run, in turns, "
    "with a 95 % interval, and `decoding` the same without the prompt's reading; passes/tok counts every pass of every "
    "model by the bytes it reads, a whole pass of the target being 1."
)
_OTHERS = {
    "retrieval": "answers from documents",
    "simulation": "other devices, simulated",
    "vllm": "drafters of ours on vLLM",
}


def held(folder: Path, section: Section) -> list[dict[str, Any]]:
    """A section's JSON, as far as it was measured."""
    found = [json.loads(file.read_text(encoding="utf-8")) for file in section.files(folder) if file.is_file()]
    return [one for one in found if "command" in one]


# ---- one modality


def written(folder: Path, modality: str) -> str:
    """The page of what a modality's folder holds."""
    parts, absent = [f"# {modality.capitalize()}, measured\n"], []
    described = False
    for section in SECTIONS[modality]:
        found = held(folder, section)
        if not found:
            absent.append(_absent(modality, section))
            continue
        if not described:
            parts += [place(found) + "\n", _HOW + "\n"]
            described = True
        parts += [f"## {section.title}\n", section.about + "\n", *map(said, found), *tables(modality, found)]
        parts += [*sampled(found, folder), *(paying(found) if section.pays else [])]
        parts += [f"![{section.title}]({name})\n" for name in section.pictures if (folder / name).is_file()]
        if section.before == CURVES and (folder / "curves.md").is_file():
            parts += ["![acceptance by place](curves.png)\n", (folder / "curves.md").read_text(encoding="utf-8")]
        if gone := _left_out(modality, section, found):
            parts.append(f"Left out, for want of weights: {gone}.\n")
    if reasons := NOT_MEASURED[modality]:
        absent += [f"- `{name}`: {why}" for name, why in reasons.items()]
    if absent:
        parts += ["## Not measured here\n", "\n".join(absent) + "\n"]
    return "\n".join(parts).rstrip() + "\n"


def place(found: Sequence[Found]) -> str:
    """Where it was measured: every machine and version that figures come from."""
    lines = []
    for one in found:
        facts = {**one["machine"], **({"cpu": one["cpu"]} if one.get("cpu") else {})}
        machine = ", ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, "", []))
        versions = ", ".join(f"{name} {value}" for name, value in one["versions"].items() if value)
        lines.append(f"Machine: {machine}. Versions: {versions}.")
    return "\n\n".join(dict.fromkeys(lines))


def said(found: Found) -> str:
    """The command, and when and on what it was run."""
    facts = [f"commit {found['commit']}" if found.get("commit") else "", str(found.get("date", ""))]
    facts += [f"{found['seconds']:,} s" if "seconds" in found else "", str(found.get("cpu") or "")]
    rest = ", ".join(filter(None, facts))
    return f"`{found['command']}`" + (f" ({rest})" if rest else "") + "\n"


def _absent(modality: str, section: Section) -> str:
    given = any("{prompts}" in command for command in section.commands)
    command = f"outrider report {modality} --only {section.name}{' --prompts FILE' if given else ''}"
    lacking = untrained(modality, section.needs)
    first = f"`outrider train {' '.join(lacking)}`, then " if lacking else ""
    return f"- {section.title}: {first}`{command}`"


def _left_out(modality: str, section: Section, found: Sequence[Found]) -> str:
    """Drafters of a section's commands that have no row, by the recipe that would train them."""
    named: dict[str, None] = {}
    for command in section.commands:
        words = command.split()
        if "--drafters" in words:
            named |= dict.fromkeys(words[words.index("--drafters") + 1].split(","))
    there = {str(row.get("drafter")) for one in found for row in one["rows"]}
    by_recipe: dict[str, list[str]] = {}
    for name in named:
        if name not in there and (recipe := recipe_of(modality, name)):
            by_recipe.setdefault(recipe, []).append(name)
    return "; ".join(f"{', '.join(names)} (`outrider train {recipe}`)" for recipe, names in by_recipe.items())


# ---- all of them


def write_all(base: Path, goals: str = "") -> Path:
    """The page of all modalities, and its pictures; `goals`: a section on what falls short."""
    from outrider.app.report.figures import draw

    folders = {name: base / "reports" / name for name in SECTIONS}
    everything = {name: {one.name: held(folders[name], one) for one in SECTIONS[name]} for name in SECTIONS}
    methods = {name: sections[METHODS] for name, sections in everything.items() if sections[METHODS]}
    drawn = draw(methods, base / "reports")
    path = base / "REPORT.md"
    path.write_text(_whole(base, everything, methods, drawn, goals), encoding="utf-8")
    return path


def _whole(
    base: Path,
    everything: Mapping[str, Mapping[str, Sequence[Found]]],
    methods: Mapping[str, Sequence[Found]],
    drawn: Sequence[Path],
    goals: str,
) -> str:
    found = [one for sections in everything.values() for some in sections.values() for one in some]
    parts = ["# Outrider, measured\n"]
    parts.append("Written by `outrider report all`; every table stands under the command that found it.\n")
    if found:
        parts += [place(found) + "\n", _HOW + "\n"]
    if methods:
        parts += ["## Tokens of a call of the target\n", "Temperature 0 / 1; plain decoding has 1.00.\n"]
        parts += [_matrix(methods), *(f"![{one.stem}](reports/{one.name})\n" for one in drawn)]
    for name, some in methods.items():
        parts += [f"## {name.capitalize()}: {SECTIONS[name][0].title.lower()}\n", *map(said, some)]
        parts += apart(some, _main)
        if gone := _left_out(name, SECTIONS[name][0], some):
            parts.append(f"Left out, for want of weights: {gone}.\n")
    for name, sections in everything.items():
        for section in SECTIONS[name]:
            if section.main and sections[section.name]:
                parts += [f"## {name.capitalize()}: {section.title.lower()}\n", section.about + "\n"]
                parts += [*map(said, sections[section.name]), tables(name, sections[section.name])[0]]
    if goals:
        parts += ["## Where it falls short\n", goals]
    absent = [
        _absent(name, one).replace("- ", f"- {name}: ", 1)
        for name in SECTIONS
        for one in SECTIONS[name]
        if not everything[name][one.name]
    ]
    if absent:
        parts += ["## Not measured here\n", "\n".join(absent) + "\n"]
    pages = {name: f"all of {name}" for name in SECTIONS} | _OTHERS
    links = [
        f"- [{about}](reports/{name}/{file.name})"
        for name, about in pages.items()
        for file in sorted((base / "reports" / name).glob("REPORT.*"))
    ]
    parts += ["## More\n", "\n".join(links) + "\n"]
    return "\n".join(parts).rstrip() + "\n"


def _main(found: Sequence[Found]) -> list[str]:
    """The columns that all modalities have."""
    from outrider.app.bench.tables import COLUMNS

    titles = ("speedup (95 %)", "tok/call", "accepted", "passes/tok")
    body = []
    for row in (row for one in found for row in one["rows"]):
        same = "-" if row["identical"] is None else f"{row['identical']:.0%}"
        body.append([str(row["drafter"]), *(str(COLUMNS[title][0](row)) for title in titles), same])
    return [table(("", *titles, "same output"), body)]


def _matrix(methods: Mapping[str, Sequence[Found]]) -> str:
    calls: dict[str, dict[tuple[str, float], float]] = {}
    for name, some in methods.items():
        for one in some:
            for row in one["rows"]:
                key = name, float(one["settings"]["temperature"])
                calls.setdefault(str(row["drafter"]), {})[key] = row["tokens_per_pass"]
    body = []
    for drafter, values in calls.items():
        cells = [[f"{values[name, t]:.2f}" if (name, t) in values else "-" for t in (0.0, 1.0)] for name in methods]
        body.append([drafter, *("-" if set(one) == {"-"} else " / ".join(one) for one in cells)])
    return table(("", *methods), body)
