"""The pages of `outrider report`: one for each modality, and a summary of all, from the JSON of their benchmarks.

Every figure stands under the command that measured it, and sections without results name the command that measures
them. Runs nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.app.report.sections import CURVES, GPU_REPORT, METHODS, REPORTS, SECTIONS, Section
from outrider.app.report.tables import Result, grouped, paying, sampled, table, tables
from outrider.app.report.weights import recipe_of, untrained
from outrider.core.assets.files import write_atomically

_HOW = (
    "Speeds are medians over prompts. A speedup is the median of ratios to plain decoding in the same run, where both "
    "take turns, with a 95 % interval; `decoding` is the speedup without prefill. Tokens / pass are tokens per target "
    "pass; passes / token count every pass of every model by the bytes it reads, where a full target pass is 1."
)
_OTHERS = {
    "retrieval": "answers from documents",
    "simulation": "other devices, simulated",
    "vllm": "our drafters in vLLM",
}


def read_results(folder: Path, section: Section) -> list[dict[str, Any]]:
    """The JSON of a section's commands, for those that have been run."""
    results = [json.loads(file.read_text(encoding="utf-8")) for file in section.files(folder) if file.is_file()]
    return [result for result in results if "command" in result]


# ---- one modality


def modality_page(folder: Path, modality: str) -> str:
    """The report of one modality as Markdown, from the results in its folder."""
    title = "GPU" if modality == GPU_REPORT else modality.capitalize()
    parts, absent = [f"# {title} benchmarks\n"], []
    described = False
    for section in REPORTS[modality]:
        results = read_results(folder, section)
        if not results:
            absent.append(_absent(modality, section))
            continue
        if not described:
            parts += [environment(results) + "\n", _HOW + "\n"]
            described = True
        parts += [f"## {section.title}\n", section.about + "\n", *map(provenance, results), *tables(modality, results)]
        parts += [*sampled(results, folder), *(paying(results) if section.pays else [])]
        parts += [f"![{section.title}]({name})\n" for name in section.pictures if (folder / name).is_file()]
        if section.before == CURVES and (folder / "curves.md").is_file():
            parts += ["![acceptance by position](curves.png)\n", (folder / "curves.md").read_text(encoding="utf-8")]
        parts += _unmeasured(modality, section, results)
    if absent:
        parts += ["## Not measured here\n", "\n".join(absent) + "\n"]
    return "\n".join(parts).rstrip() + "\n"


def environment(results: Sequence[Result]) -> str:
    """The machines and versions with which results were measured."""
    lines = []
    for result in results:
        facts = {**result["machine"], **({"cpu": result["cpu"]} if result.get("cpu") else {})}
        machine = ", ".join(f"{key} {value}" for key, value in facts.items() if value not in (None, "", []))
        versions = ", ".join(f"{name} {value}" for name, value in result["versions"].items() if value)
        lines.append(f"Machine: {machine}. Versions: {versions}.")
    return "\n\n".join(dict.fromkeys(lines))


def provenance(result: Result) -> str:
    """The command of a result, with its commit, date, duration and processor."""
    facts = [f"commit {result['commit']}" if result.get("commit") else "", str(result.get("date", ""))]
    facts += [f"{result['seconds']:,} s" if "seconds" in result else "", str(result.get("cpu") or "")]
    details = ", ".join(filter(None, facts))
    return f"`{result['command']}`" + (f" ({details})" if details else "") + "\n"


def _absent(modality: str, section: Section) -> str:
    """A list entry with the commands that would measure a section."""
    prompts = " --prompts FILE" if any("{prompts}" in command for command in section.commands) else ""
    command = f"outrider report {modality} --only {section.name}{prompts}"
    missing = untrained(modality, section.needs)
    train = f"`outrider train {' '.join(missing)}`, then " if missing else ""
    return f"- {section.title}: {train}`{command}`"


def _unmeasured(modality: str, section: Section, results: Sequence[Result]) -> list[str]:
    """The drafters of a section's commands that have no row: with the recipes that would train them, or measured at the
    next opportunity."""
    named: dict[str, None] = {}
    for command in section.commands:
        words = command.split()
        if "--drafters" in words:
            named |= dict.fromkeys(words[words.index("--drafters") + 1].split(","))
    measured = {str(row.get("drafter")).partition(",")[0] for result in results for row in result["rows"]}
    by_recipe: dict[str | None, list[str]] = {}
    for name in named:
        if name not in measured:
            by_recipe.setdefault(recipe_of(modality, name), []).append(name)
    missing = set(untrained(modality, sorted(recipe for recipe in by_recipe if recipe)))
    untrainable = [f"{', '.join(by_recipe[each])} (`outrider train {each}`)" for each in by_recipe if each in missing]
    later = [name for recipe, names in by_recipe.items() if recipe not in missing for name in names]
    lines = [f"Not measured, because their weights are missing: {'; '.join(untrainable)}.\n"] if untrainable else []
    return [*lines, *([f"Not measured yet: {', '.join(later)}.\n"] if later else [])]


# ---- the summary


def write_summary(base: Path, goals: str = "") -> Path:
    """Write the summary of all modalities and its plots; `goals` is the text of a section on missed goals."""
    from outrider.app.report.figures import draw

    folders = {name: base / "reports" / name for name in SECTIONS}
    everything = {
        name: {section.name: read_results(folders[name], section) for section in sections}
        for name, sections in SECTIONS.items()
    }
    methods = {name: sections[METHODS] for name, sections in everything.items() if sections[METHODS]}
    plots = draw(methods, base / "reports")
    path = base / "REPORT.md"
    write_atomically(path, _summary(base, everything, methods, plots, goals))
    return path


def _summary(
    base: Path,
    everything: Mapping[str, Mapping[str, Sequence[Result]]],
    methods: Mapping[str, Sequence[Result]],
    plots: Sequence[Path],
    goals: str,
) -> str:
    results = [result for sections in everything.values() for group in sections.values() for result in group]
    parts = ["# Outrider benchmarks\n"]
    parts.append("Written by `outrider report all`; every table stands under the command that measured it.\n")
    if results:
        parts += [environment(results) + "\n", _HOW + "\n"]
    if methods:
        parts += ["## Tokens per target pass\n", "Temperature 0 / 1; plain decoding has 1.00.\n"]
        parts += [_matrix(methods), *(f"![{plot.stem}](reports/{plot.name})\n" for plot in plots)]
    for name, group in methods.items():
        parts += [f"## {name.capitalize()}: {SECTIONS[name][0].title.lower()}\n", *map(provenance, group)]
        parts += grouped(group, _main)
        parts += _unmeasured(name, SECTIONS[name][0], group)
    for name, sections in everything.items():
        for section in SECTIONS[name]:
            if section.main and sections[section.name]:
                parts += [f"## {name.capitalize()}: {section.title.lower()}\n", section.about + "\n"]
                parts += [*map(provenance, sections[section.name]), *tables(name, sections[section.name], brief=True)]
    if goals:
        parts += ["## Missed goals\n", goals]
    absent = [
        _absent(name, section).replace("- ", f"- {name}: ", 1)
        for name in SECTIONS
        for section in SECTIONS[name]
        if not everything[name][section.name]
    ]
    if absent:
        parts += ["## Not measured here\n", "\n".join(absent) + "\n"]
    pages = {name: f"{name}, all sections" for name in SECTIONS} | _OTHERS
    links = [
        f"- [{about}](reports/{name}/{file.name})"
        for name, about in pages.items()
        for file in sorted((base / "reports" / name).glob("REPORT.*"))
    ]
    parts += ["## More reports\n", "\n".join(links) + "\n"]
    return "\n".join(parts).rstrip() + "\n"


def _main(results: Sequence[Result]) -> list[str]:
    """One table with the columns that all modalities have."""
    from outrider.app.bench.tables import COLUMNS

    titles = ("speedup (95 %)", "tokens / pass", "accepted", "passes / token")
    body = []
    for row in (row for result in results for row in result["rows"]):
        same = "-" if row["identical"] is None else f"{row['identical']:.0%}"
        body.append([str(row["drafter"]), *(str(COLUMNS[title][0](row)) for title in titles), same])
    return [table(("", *titles, "same output"), body)]


def _matrix(methods: Mapping[str, Sequence[Result]]) -> str:
    """Tokens per target pass of every drafter, a column for each modality."""
    by_drafter: dict[str, dict[tuple[str, float], float]] = {}
    for name, group in methods.items():
        for result in group:
            for row in result["rows"]:
                key = name, float(result["settings"]["temperature"])
                by_drafter.setdefault(str(row["drafter"]), {})[key] = row["tokens_per_pass"]
    body = []
    for drafter, values in by_drafter.items():
        cells = [[f"{values[name, t]:.2f}" if (name, t) in values else "-" for t in (0.0, 1.0)] for name in methods]
        body.append([drafter, *("-" if set(pair) == {"-"} else " / ".join(pair) for pair in cells)])
    return table(("", *methods), body)
