"""The tables of `outrider report`, of every modality: what a section's JSON says, as Markdown.

Knows the JSON of benches; nothing of pages, nor of what was measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Found = Mapping[str, Any]
Row = Mapping[str, Any]


def tables(modality: str, found: Sequence[Found]) -> list[str]:
    """What a section's JSON says, as Markdown."""
    if modality == "image":
        return apart(found, lambda some: [_pictures(some)])
    if modality == "speech":
        return apart(found, lambda some: [_speech(some)])
    return _text(found)


def apart(found: Sequence[Found], drawn: Any) -> list[str]:
    """Tables of what was measured alike: reports of other precisions and temperatures stand under their own words."""
    for key, form in (("dtype", "In {}:\n"), ("temperature", "Temperature {:g}:\n")):
        values = list(dict.fromkeys(one["settings"].get(key) for one in found))
        if len(values) > 1:
            groups = [(value, [one for one in found if one["settings"].get(key) == value]) for value in values]
            return [part for value, some in groups for part in (form.format(value), *apart(some, drawn))]
    return list(drawn(found))


def _text(found: Sequence[Found]) -> list[str]:
    from outrider.app.bench.engine import lines as engine_lines

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
    return apart([one for one in found if one["rows"]], _benched)


def _benched(found: Sequence[Found]) -> list[str]:
    """What `bench text` says: everything, then without what loops, then by task."""
    from outrider.app.bench.tables import COLUMNS, name_of, remarks

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


def paying(found: Sequence[Found]) -> list[str]:
    """Where each drafter starts to pay: predicted by what passes cost here, and measured."""
    from outrider.core.cost.theory import PassCost

    body = []
    for one in found:
        cost = PassCost(**one["settings"]["pass_cost"])
        asked = f"{one['settings']['dtype']}, temperature {one['settings']['temperature']:g}"
        for row in one["rows"]:
            if not row["acceptance_rate"] or row["equivalents_per_token"] is None:
                continue
            tokens = row["tokens_per_pass"]
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
        "codes a call": "{tokens_per_pass:.2f}",
        "white": "{background_per_call:.2f}",
        "ink": "{ink_per_call:.2f}",
    }
    cells |= {"passes a code": "{equivalents_per_token:.2f}", "accepted": "{acceptance_rate:.0%}"}
    cells |= {
        "same picture": "{identical:.0%}",
        "total variation": "{total_variation:.4f}",
        "nats a code": "{surprise:.3f}",
    }
    judged = dict.fromkeys(name for row in rows for name in row["quality"])
    cells |= {name: f"{{quality[{name}]:.3g}}" for name in judged}
    return _formatted(cells, rows)


def _speech(found: Sequence[Found]) -> str:
    """What drafting spares, and under it what is heard: of nobody who drafts, that alone."""
    from outrider.app.bench.tables import COLUMNS

    titles = ("tok/s", "speedup (95 %)", "tok/call", "accepted", "passes/tok", "same output")
    rows = [row for number, one in enumerate(found) for row in one["rows"][min(number, 1) :]]
    body = []
    for row in rows:
        cells = [row["setting"], *(str(COLUMNS[title][0](row)) for title in titles), f"{row['price_per_token']:.4f}"]
        body.append([*cells, f"{row['target_entropy']:.2f}", f"{work(row):.3f}"])
    parts = [table(("", *titles, "price/tok", "nats/tok", "work"), body)] if body else []
    rungs = [(name, rung) for one in found for name, rung in one["ladder"].items()]
    rungs += [(row["setting"], row["quality"]) for row in rows if "word_error" in row["quality"]]
    parts += [_heard(rungs, found)] if rungs else []
    gone = [f"- skipped {name}: {why}" for one in found for name, why in one["skipped"].items()]
    return "\n".join([*parts, *(["\n".join(dict.fromkeys(gone)) + "\n"] if gone else [])])


def work(row: Row) -> float:
    """Seconds that model, codec and vocoder work for a second of sound: the real-time factor."""
    return sum(float(row["quality"][f"factor_{part}"]) for part in ("model", "codec", "vocoder"))


def _heard(rungs: Sequence[tuple[str, Mapping[str, Any]]], found: Sequence[Found]) -> str:
    from outrider.app.bench.speech import SHOWN, apart_from

    base = "plain" if any(one["rows"] for one in found) else rungs[0][0]
    body = []
    for name, rung in rungs:
        cells = [_value(rung[key], times, form) for _, key, times, form in SHOWN]
        body.append([name, cells[0], "" if name == base else apart_from(rung["word_error"]), *cells[1:]])
    titles = [title for title, *_ in SHOWN]
    count = sum(one["judged"] for one in found)
    what = f"What is heard of {count} {'sentences' if base == 'plain' else 'clips'}:\n\n"
    return what + table(("", titles[0], f"beside {base}", *titles[1:]), body)


def _value(one: Mapping[str, float], times: float, form: str) -> str:
    value, low, high = (format(times * one[key], form) for key in ("value", "low", "high"))
    return f"{value} ({low}-{high})"


def sampled(found: Sequence[Found], folder: Path) -> list[str]:
    """Sentences by who says them, with links to what can be listened to."""
    parts = []
    for one in found:
        samples = one.get("samples", ())
        names = list(dict.fromkeys(name for sample in samples for name in sample["files"]))
        body = [
            [sample["text"].replace("|", "/"), *(_link(sample["files"].get(name), folder) for name in names)]
            for sample in samples
        ]
        if names:
            parts += ["To be listened to:\n", table(("sentence", *names), body)]
    return parts


def _link(file: str | None, folder: Path) -> str:
    return f"[hear]({file})" if file and (folder / file).is_file() else "-"


def _formatted(cells: Mapping[str, str], rows: Sequence[Row]) -> str:
    return table(tuple(cells), [[_filled(form, row) for form in cells.values()] for row in rows])


def _filled(form: str, row: Row) -> str:
    try:
        return form.format_map(row)
    except KeyError:
        return "-"


def table(titles: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> str:
    """A Markdown table: the first `left` columns are aligned to the left, the others to the right."""
    lines = [f"| {' | '.join(titles)} |", "|" + "---|" * left + "---:|" * (len(titles) - left)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
