"""The Markdown tables of `outrider report` for every modality, from the JSON of its benchmarks.

Independent of the pages around the tables.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

Result = Mapping[str, Any]
Row = Mapping[str, Any]


def tables(modality: str, results: Sequence[Result], *, brief: bool = False) -> list[str]:
    """The Markdown tables of a section's results; `brief`: without those by task."""
    if modality == "image":
        return grouped(results, lambda group: [_pictures(group)])
    if modality == "speech":
        return grouped(results, lambda group: [_speech(group)])
    return _text(results, brief)


def grouped(results: Sequence[Result], drawn: Any) -> list[str]:
    """`drawn` applied to the results of each precision and temperature, under a line that names them."""
    for key, form in (("dtype", "In {}:\n"), ("temperature", "Temperature {:g}:\n")):
        values = list(dict.fromkeys(result["settings"].get(key) for result in results))
        if len(values) > 1:
            groups = [
                (value, [result for result in results if result["settings"].get(key) == value]) for value in values
            ]
            return [part for value, group in groups for part in (form.format(value), *grouped(group, drawn))]
    return list(drawn(results))


def _rows(results: Sequence[Result]) -> list[Row]:
    """The rows of several results, with plain decoding, which is the first row of each, only once."""
    return [row for index, result in enumerate(results) for row in result["rows"][min(index, 1) :]]


def _text(results: Sequence[Result], brief: bool) -> list[str]:
    from outrider.app.bench.engine import lines as engine_lines

    first = results[0]["rows"][0]
    if "ladder" in results[0]:
        from outrider.text.training.ladder import table as rungs

        return [part for result in results for part in (rungs(result["rows"]), _lessons(result["settings"]["data"]))]
    if "engine" in results[0]:
        return [table(*engine_lines(result["rows"])) for result in results]
    if "perplexity" in first:
        cells = {"": "{dtype}", "perplexity": "{perplexity:.2f}", "greedy agreement": "{agreement:.1%}"}
        cells |= {"tokens / s": "{tokens_per_second:.1f}", "slowest - fastest": "{slowest:.0f}-{fastest:.0f}"}
        return [_formatted(cells, results[0]["rows"])]
    if "together" in first:
        cells = {"": "{dtype}", "drafter": "{drafter}", "tokens / s, batch": "{together:.0f}"}
        cells |= {"tokens / s, one by one": "{alone:.0f}", "ratio": "{ratio:.2f}", "same output": "{same} of {rows}"}
        return [_formatted(cells, [{**row, "ratio": row["together"] / row["alone"]} for row in results[0]["rows"]])]
    return grouped(
        [result for result in results if result["rows"]], lambda group: _benched(group)[: 1 if brief else None]
    )


def _lessons(files: Sequence[Mapping[str, Any]]) -> str:
    """A sentence on the answers that were trained on."""
    kinds = ", ".join(f"{kind} {count}" for file in files for kind, count in file["kinds"].items())
    return f"Answers: {sum(file['tokens'] for file in files):,} tokens ({kinds}).\n"


def _benched(results: Sequence[Result]) -> list[str]:
    """The tables of `bench text`: all prompts, then without those that loop, then by task."""
    from outrider.app.bench.tables import COLUMNS, columns, name_of, remarks

    rows = [*_rows(results), *(row for result in results for row in result["peers"])]
    titles = [title for title in columns(rows) if title != "quartiles"]

    def of(rows: Iterable[Row]) -> str:
        cells = [[name_of(row), *(str(COLUMNS[title][0](row)) for title in titles)] for row in rows]
        return table(("", *titles), cells)

    parts = [of(rows)]
    looping = results[0]["settings"].get("looping", [])
    without = [{**row, **row["without_looping"]} for row in rows if row["without_looping"]]
    if looping and without:
        count = results[0]["settings"]["prompts"]
        parts += [f"Without the {len(looping)} of {count} prompts on which plain decoding repeats itself:\n"]
        parts.append(of(without))
    tasks = sorted({task for row in rows for task in row["tasks"]})
    if len(tasks) > 1:
        for key, words in (("speedup", ""), ("decode_speedup", ", without prefill")):
            speeds = [[(row["tasks"].get(task) or {}).get(key) for task in tasks] for row in rows]
            if any(speed for cells in speeds for speed in cells):
                body = [
                    [name_of(row), *("-" if not speed else f"{speed:.2f}" for speed in (_average(cells), *cells))]
                    for row, cells in zip(rows, speeds, strict=True)
                ]
                parts += [f"Speedup by task{words}:\n", table(("", "mean", *tasks), body)]
    lines = [f"- {line.plain}" for result in results for line in remarks(result)]
    return [*parts, *(["\n".join(lines) + "\n"] if lines else [])]


def paying(results: Sequence[Result]) -> list[str]:
    """A table of the drafting cost below which each drafter pays, with the predicted and the measured speedup."""
    from outrider.core.cost.theory import PassCost

    body = []
    for result in results:
        cost = PassCost(**result["settings"]["pass_cost"])
        settings = f"{result['settings']['dtype']}, temperature {result['settings']['temperature']:g}"
        for row in result["rows"]:
            if not row["acceptance_rate"] or row["equivalents_per_token"] is None:
                continue
            tokens = row["tokens_per_pass"]
            drafting = max(tokens * row["equivalents_per_token"] - 1, 0.0)
            verify = cost.relative(1 + (tokens - 1) / row["acceptance_rate"])
            bound = f"below {tokens - verify:.2f}" if tokens > verify else "never"
            figures = (tokens, verify, drafting, tokens / (verify + drafting), row["decode_speedup"] or row["speedup"])
            body.append([row["drafter"], settings, *(f"{figure:.2f}" for figure in figures), bound])
    titles = ("tokens / pass", "verify cost", "draft cost", "predicted", "measured, decoding", "pays if draft cost")
    return [
        "Break-even. Costs are in plain passes of this target: verification by the measured cost of wider passes, "
        "drafting by the bytes it reads. The predicted speedup is tokens per pass divided by the sum of both costs; "
        "drafting pays while its cost is below tokens per pass minus the verify cost. A draft model costs half as much "
        "relative to a target of twice the size; skipped layers cost the same share of any target.\n",
        table(("", "settings", *titles), body),
    ]


def _average(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _pictures(results: Sequence[Result]) -> str:
    rows = _rows(results)
    cells = {"": "{name}", "speedup (95 %)": "{speedup:.2f} ({speedup_low:.2f}-{speedup_high:.2f})"}
    cells |= {
        "codes / pass": "{tokens_per_pass:.2f}",
        "background / pass": "{background_per_pass:.2f}",
        "foreground / pass": "{foreground_per_pass:.2f}",
    }
    cells |= {"passes / code": "{equivalents_per_token:.2f}", "accepted": "{acceptance_rate:.0%}"}
    cells |= {
        "same image": "{identical:.0%}",
        "total variation / code": "{total_variation:.4f}",
        "NLL / code": "{nll:.3f}",
    }
    judged = dict.fromkeys(name for row in rows for name in row["quality"])
    cells |= {name: f"{{quality[{name}]:.3g}}" for name in judged}
    return _formatted(cells, rows)


def _speech(results: Sequence[Result]) -> str:
    """The table of speeds, if there are drafters, then the table of speech quality, if it was judged."""
    from outrider.app.bench.tables import COLUMNS

    titles = ("tokens / s", "speedup (95 %)", "tokens / pass", "accepted", "passes / token", "same output")
    rows = _rows(results)
    plain = {id(row): result["rows"][0] for result in results for row in result["rows"]}
    body = []
    for row in rows:
        cells = [
            row["setting"],
            *(str(COLUMNS[title][0](row)) for title in titles),
            f"{row['total_variation_per_token']:.4f}",
        ]
        body.append([*cells, f"{row['target_entropy']:.2f}", f"{real_time_factor(row):.3f}"])
        body[-1].append(f"{real_time_factor(plain[id(row)]) / real_time_factor(row):.2f}")
    shown = ["speedup of the model (95 %)" if title.startswith("speedup") else title for title in titles]
    headings = ("", *shown, "total variation / token", "entropy / token", "real-time factor", "speedup, text to sound")
    parts = [table(headings, body)] if body else []
    qualities = [(name, quality) for result in results for name, quality in result["ladder"].items()]
    qualities += [(row["setting"], row["quality"]) for row in rows if "word_error" in row["quality"]]
    parts += [_quality(qualities, results)] if qualities else []
    skipped = [f"- skipped {name}: {why}" for result in results for name, why in result["skipped"].items()]
    return "\n".join([*parts, *(["\n".join(dict.fromkeys(skipped)) + "\n"] if skipped else [])])


def real_time_factor(row: Row) -> float:
    """Seconds that model, codec and vocoder together take for one second of sound."""
    return sum(float(row["quality"][f"factor_{part}"]) for part in ("model", "codec", "vocoder"))


def _quality(qualities: Sequence[tuple[str, Mapping[str, Any]]], results: Sequence[Result]) -> str:
    """Speech quality of each reference and setting; the word error rate also as a difference from the first."""
    from outrider.app.bench.speech import SHOWN, difference

    base = "plain" if any(result["rows"] for result in results) else qualities[0][0]
    body = []
    for name, quality in qualities:
        cells = [_value(quality[key], factor, form) for _, key, factor, form in SHOWN]
        body.append([name, cells[0], "" if name == base else difference(quality["word_error"]), *cells[1:]])
    titles = [title for title, *_ in SHOWN]
    count = sum(result["judged"] for result in results)
    heading = f"Speech quality over {count} {'sentences' if base == 'plain' else 'clips'}:\n\n"
    return heading + table(("", titles[0], f"difference from {base}", *titles[1:]), body)


def _value(measure: Mapping[str, float], factor: float, form: str) -> str:
    value, low, high = (format(factor * measure[key], form) for key in ("value", "low", "high"))
    return f"{value} ({low}-{high})"


def sampled(results: Sequence[Result], folder: Path) -> list[str]:
    """A table of sentences with links to the recordings of each setting."""
    parts = []
    for result in results:
        samples = result.get("samples", ())
        names = list(dict.fromkeys(name for sample in samples for name in sample["files"]))
        body = [
            [sample["text"].replace("|", "/"), *(_link(sample["files"].get(name), folder) for name in names)]
            for sample in samples
        ]
        if names:
            parts += ["Recordings:\n", table(("sentence", *names), body)]
    return parts


def _link(file: str | None, folder: Path) -> str:
    return f"[listen]({file})" if file and (folder / file).is_file() else "-"


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
