"""The pages of `outrider report`: of what a folder of JSON holds, and of all modalities together.

Every figure stands beside the command that found it; what was not measured is said with the command that would. Knows
the JSON of benches; measures nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.app.report_sections import CURVES, METHODS, NOT_MEASURED, SECTIONS, Section

Found = Mapping[str, Any]
Row = Mapping[str, Any]
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
        parts += _paying(found) if section.pays else []
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
    from outrider.app.report import untrained

    given = any("{prompts}" in command for command in section.commands)
    command = f"outrider report {modality} --only {section.name}{' --prompts FILE' if given else ''}"
    lacking = untrained(modality, section.needs)
    first = f"`outrider train {' '.join(lacking)}`, then " if lacking else ""
    return f"- {section.title}: {first}`{command}`"


def _left_out(modality: str, section: Section, found: Sequence[Found]) -> str:
    """Drafters of a section's commands that have no row, by the recipe that would train them."""
    from outrider.app.report import recipe_of

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


# ---- tables


def tables(modality: str, found: Sequence[Found]) -> list[str]:
    """What a section's JSON says, as Markdown."""
    if modality == "image":
        return _apart(found, lambda some: [_pictures(some)])
    if modality == "speech":
        return _apart(found, lambda some: [_speech(some)])
    return _text(found)


def _apart(found: Sequence[Found], drawn: Any) -> list[str]:
    """Tables of what was measured alike: reports of other precisions and temperatures stand under their own words."""
    for key, form in (("dtype", "In {}:\n"), ("temperature", "Temperature {:g}:\n")):
        values = list(dict.fromkeys(one["settings"].get(key) for one in found))
        if len(values) > 1:
            groups = [(value, [one for one in found if one["settings"].get(key) == value]) for value in values]
            return [part for value, some in groups for part in (form.format(value), *_apart(some, drawn))]
    return list(drawn(found))


def _text(found: Sequence[Found]) -> list[str]:
    from outrider.app.bench_engine import lines as engine_lines

    first = found[0]["rows"][0]
    if "engine" in found[0]:
        return [table(*engine_lines(one["rows"])) for one in found]
    if "perplexity" in first:
        cells = {"": "{dtype}", "perplexity": "{perplexity:.2f}", "agrees": "{agreement:.1%}"}
        cells |= {"tok/s": "{tokens_per_second:.1f}", "slowest to fastest": "{slowest:.0f}-{fastest:.0f}"}
        return [_formatted(cells, found[0]["rows"])]
    if "together" in first:
        cells = {"": "{dtype}", "drafter": "{drafter}", "tok/s in all": "{together:.0f}"}
        cells |= {"one after another": "{alone:.0f}", "ratio": "{ratio:.2f}", "same output": "{same} of {rows}"}
        return [_formatted(cells, [{**row, "ratio": row["together"] / row["alone"]} for row in found[0]["rows"]])]
    return _apart([one for one in found if one["rows"]], _benched)


def _benched(found: Sequence[Found]) -> list[str]:
    """What `bench text` says: everything, then without what loops, then by task."""
    from outrider.app.bench_views import COLUMNS, name_of, remarks

    titles = [title for title in COLUMNS if title != "quartiles"]

    def named(row: Row) -> str:
        plain = row["rule"] == "exact" or row["drafter"] == "plain"
        return name_of(row) if plain else f"{name_of(row)}, rule {row['rule']}"

    def of(rows: Iterable[Row]) -> str:
        return table(("", *titles), [[named(row), *(str(COLUMNS[title][0](row)) for title in titles)] for row in rows])

    everyone = [row for number, one in enumerate(found) for row in one["rows"][min(number, 1) :]]
    everyone += [row for one in found for row in one["peers"]]
    parts = [of(everyone)]
    looping = found[0]["settings"].get("looping", [])
    without = [{**row, **row["without_looping"]} for row in everyone if row["without_looping"]]
    if looping and without:
        count = found[0]["settings"]["prompts"]
        parts += [f"Without the {len(looping)} of {count} prompts on which plain decoding goes round in circles:\n"]
        parts.append(of(without))
    tasks = sorted({task for row in everyone for task in row["tasks"]})
    if len(tasks) > 1:
        for key, words in (("speedup", ""), ("decode_speedup", ", without the prompt's reading")):
            speeds = [[(row["tasks"].get(task) or {}).get(key) for task in tasks] for row in everyone]
            if any(one for cells in speeds for one in cells):
                body = [
                    [named(row), *("-" if not one else f"{one:.2f}" for one in (_average(cells), *cells))]
                    for row, cells in zip(everyone, speeds, strict=True)
                ]
                said = f"By task, times plain decoding's tokens a second{words}:\n"
                parts += [said, table(("", "on average", *tasks), body)]
    lines = [f"- {line.plain}" for one in found for line in remarks(one)]
    return [*parts, *(["\n".join(lines) + "\n"] if lines else [])]


def _paying(found: Sequence[Found]) -> list[str]:
    """Where each drafter starts to pay: predicted by what passes cost here, and measured."""
    from outrider.core.speed import PassCost

    body = []
    for one in found:
        cost = PassCost(**one["settings"]["pass_cost"])
        asked = f"{one['settings']['dtype']}, temperature {one['settings']['temperature']:g}"
        for row in one["rows"]:
            if not row["acceptance_rate"] or row["equivalents_per_token"] is None:
                continue
            tokens = row["tokens_per_call"]
            drafting = max(tokens * row["equivalents_per_token"] - 1, 0.0)
            wide = cost.relative(1 + (tokens - 1) / row["acceptance_rate"])
            room = f"below {tokens - wide:.2f}" if tokens > wide else "never"
            figures = (tokens, wide, drafting, tokens / (wide + drafting), row["decode_speedup"] or row["speedup"])
            body.append([row["drafter"], asked, *(f"{figure:.2f}" for figure in figures), room])
    titles = ("tok/call", "its pass", "its drafting", "predicted", "measured, decoding", "drafting would pay")
    return [
        "Where each starts to pay. A pass with its guesses, and its drafting, are in plain passes of this target: the "
        "one by what wider passes take here, the other by the bytes that drafting reads. The speed predicted is the "
        "tokens of a call over both; drafting pays where it costs less than a call brings beyond its own pass. Against "
        "a target of twice the size the same drafter costs half; left-out layers cost the same share of any.\n",
        table(("", "", *titles), body),
    ]


def _average(values: Sequence[float | None]) -> float | None:
    known = [one for one in values if one is not None]
    return sum(known) / len(known) if known else None


def _pictures(found: Sequence[Found]) -> str:
    rows = [row for number, one in enumerate(found) for row in one["rows"][min(number, 1) :]]
    cells = {"": "{name}", "speedup (95 %)": "{speedup:.2f} ({speedup_low:.2f}-{speedup_high:.2f})"}
    cells |= {
        "codes a call": "{tokens_per_call:.2f}",
        "white": "{background_per_call:.2f}",
        "ink": "{ink_per_call:.2f}",
    }
    cells |= {"passes a code": "{equivalents_per_token:.2f}", "accepted": "{acceptance_rate:.0%}"}
    cells |= {"same picture": "{identical:.0%}", "price": "{price:.4f}", "nats a code": "{surprise:.3f}"}
    judged = dict.fromkeys(name for row in rows for name in row["quality"])
    cells |= {name: f"{{quality[{name}]:.3g}}" for name in judged}
    return _formatted(cells, rows)


def _speech(found: Sequence[Found]) -> str:
    from outrider.app.bench_speech import SHOWN
    from outrider.app.bench_views import COLUMNS

    titles = ("tok/s", "speedup (95 %)", "tok/call", "accepted", "passes/tok", "same output")
    rows = [row for number, one in enumerate(found) for row in one["rows"][min(number, 1) :]]
    heard = [one for one in SHOWN if any(one[1] in row["quality"] for row in rows)]
    body = []
    for row in rows:
        cells = [row["setting"], *(str(COLUMNS[title][0](row)) for title in titles), f"{row['price_per_token']:.4f}"]
        body.append([*cells, *(_heard(row["quality"].get(key), times, form) for _, key, times, form in heard)])
    for name, rung in ((name, rung) for one in found for name, rung in one["ladder"].items()):
        blank = ["-"] * (len(titles) + 1)
        body.append([name, *blank, *(_heard(rung.get(key), times, form) for _, key, times, form in heard)])
    return table(("", *titles, "price/tok", *(title for title, *_ in heard)), body)


def _heard(one: Mapping[str, float] | None, times: float, form: str) -> str:
    if one is None:
        return "-"
    value, low, high = (format(times * one[key], form) for key in ("value", "low", "high"))
    return f"{value} ({low}-{high})"


def _formatted(cells: Mapping[str, str], rows: Sequence[Row]) -> str:
    return table(tuple(cells), [[_filled(form, row) for form in cells.values()] for row in rows])


def _filled(form: str, row: Row) -> str:
    try:
        return form.format_map(row)
    except KeyError:
        return "-"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"


# ---- all of them


def write_all(base: Path) -> Path:
    """The page of all modalities, and its pictures."""
    from outrider.app.report_figures import draw

    folders = {name: base / "reports" / name for name in SECTIONS}
    everything = {name: {one.name: held(folders[name], one) for one in SECTIONS[name]} for name in SECTIONS}
    methods = {name: sections[METHODS] for name, sections in everything.items() if sections[METHODS]}
    drawn = draw(methods, base / "reports")
    path = base / "REPORT.md"
    path.write_text(_whole(base, everything, methods, drawn), encoding="utf-8")
    return path


def _whole(
    base: Path,
    everything: Mapping[str, Mapping[str, Sequence[Found]]],
    methods: Mapping[str, Sequence[Found]],
    drawn: Sequence[Path],
) -> str:
    from outrider.app.report_marks import short

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
        parts += _apart(some, _main)
        if gone := _left_out(name, SECTIONS[name][0], some):
            parts.append(f"Left out, for want of weights: {gone}.\n")
    for name, sections in everything.items():
        for section in SECTIONS[name]:
            if section.main and sections[section.name]:
                parts += [f"## {name.capitalize()}: {section.title.lower()}\n", section.about + "\n"]
                parts += [*map(said, sections[section.name]), tables(name, sections[section.name])[0]]
    parts += ["## Where it falls short\n", short(everything)]
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
    from outrider.app.bench_views import COLUMNS

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
                calls.setdefault(str(row["drafter"]), {})[key] = row["tokens_per_call"]
    body = []
    for drafter, values in calls.items():
        cells = [[f"{values[name, t]:.2f}" if (name, t) in values else "-" for t in (0.0, 1.0)] for name in methods]
        body.append([drafter, *("-" if set(one) == {"-"} else " / ".join(one) for one in cells)])
    return table(("", *methods), body)
