"""`outrider advise`: which drafter pays for a target, this machine and one's own prompts, how many tokens to draft, and
up to which batch size.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import (
    DEVICE,
    DTYPE,
    PLOT_ENDINGS,
    Device,
    JsonFile,
    TextDraftModel,
    TextDtype,
    TextModelName,
    TextPrompts,
    writable,
)
from outrider.app.options import names as parse_names

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.core.advice.advise import Advice
    from outrider.core.advice.predict import Prediction
    from outrider.text.bench.advice import Checked, Study
    from outrider.text.bench.engine_advice import EngineAdvice

_ROWS = 8  # lines of the table


def advise(
    model: TextModelName = "smollm2-135m",
    prompts: TextPrompts = None,
    num_prompts: Annotated[int, typer.Option(min=1, help="Use at most this many prompts, of the tasks in turn.")] = 200,
    drafters: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Comma-separated drafters to try. Default: all that run for the target."),
    ] = "",
    draft_model: TextDraftModel = None,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Tokens to generate per prompt and drafter.")] = 64,
    max_draft_tokens: Annotated[int, typer.Option(min=1, max=32, help="Longest draft to consider.")] = 12,
    batch_sizes: Annotated[str, typer.Option(metavar="SIZES", help="Comma-separated batch sizes.")] = "1,2,4,8",
    check: Annotated[
        bool, typer.Option("--check", help="Then measure the advice and others in turns, beside what was predicted.")
    ] = False,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Measure these engines too, installed on first use: vllm, llama.cpp (always if built).",
        ),
    ] = "",
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Draw the speedup by draft length and batch size, as .png, .svg or .pdf.",
            callback=lambda path: writable(path, PLOT_ENDINGS),
        ),
    ] = None,
    dtype: TextDtype = DTYPE,
    device: Device = DEVICE,
    json_file: JsonFile = None,
) -> None:
    """Advise on a drafter, a draft length and batch sizes, from measurements on this machine and on your prompts."""
    from rich.console import Console

    from outrider import text
    from outrider.app.bench.plots import check as can_plot
    from outrider.core.advice.predict import Machine
    from outrider.core.assets.files import write_atomically
    from outrider.core.errors import InvalidOption
    from outrider.core.trace import machine, versions
    from outrider.text.bench.advice import Study, methods_of, progress_of
    from outrider.text.bench.engine_advice import engines
    from outrider.text.bench.run import load_prompts

    if plot is not None:
        can_plot()
    sizes = _sizes(batch_sizes)
    engine_names = _engines(peers)
    items = load_prompts(prompts, num_prompts)
    console = Console(stderr=True, highlight=False)
    with console.status(f"Loading {model} ..."):
        lm = text.load(model, device=device, dtype=dtype, draft_model=draft_model)
    methods = methods_of(lm, parse_names(drafters))
    if not methods:
        raise InvalidOption(f"no drafter runs for {model}; give --draft-model")
    from outrider.app.bench.progress import bar

    total = progress_of(methods, items, sizes, max_draft_tokens)
    with bar(console, total, "Measuring") as step:
        study = Study(lm, items, max_new_tokens, max_draft_tokens, sizes, step)
        given = study.advice(Machine(study.rounds()), methods)
    with console.status("Other engines ...") as status:
        others = engines(study, given, model, draft_model, engine_names, check=check, say=status.update)
    checked = _checked(study, given, console) if check else []
    checked += [each.checked for each in others if each.checked is not None]
    about = {
        "model": model,
        "dtype": lm.dtype,
        "device": lm.device,
        "prompts": len(study.items),
        "tokens": max_new_tokens,
    }
    report = {"machine": machine(), "versions": versions(), "settings": about, **given.to_dict()}
    report |= {"engines": [each.to_dict() for each in others], "skipped": study.skipped}
    report |= {"checked": [vars(each) | {"error": each.error} for each in checked]}
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        show(Console(highlight=False), given, about, others, checked, study.skipped)
        if json_file is not None:
            write_atomically(json_file, json.dumps(report, indent=2, ensure_ascii=False) + "\n")
    if plot is not None:
        from outrider.app.bench.advice_plot import draw

        draw(given, sizes, plot)


def _sizes(text: str) -> tuple[int, ...]:
    from outrider.core.errors import InvalidOption

    try:
        sizes = sorted({int(part) for part in text.split(",")} | {1})
    except ValueError:
        sizes = [0]
    if sizes[0] < 1:
        raise InvalidOption(f"batch-sizes is {text!r}; give whole numbers of 1 or more, such as 1,4,16")
    return tuple(sizes)


def _engines(names: str) -> tuple[str, ...]:
    from outrider.core.errors import InvalidOption
    from outrider.text.bench.peers import peers_named

    found = peers_named(parse_names(names))
    if others := sorted(set(found) - {"vllm", "llama.cpp"}):
        raise InvalidOption(f"peers is {names!r}; there is advice for vllm and llama.cpp, and none for {others[0]}")
    return found


def _checked(study: Study, given: Advice, console: Console) -> list[Checked]:
    from outrider.app.bench.progress import go
    from outrider.text.bench.advice import check, to_check

    predictions = to_check(study, given)
    if not predictions:
        return []
    bench, found = check(study, predictions)
    return found() if go(bench, console) else []


def show(
    console: Console,
    given: Advice,
    about: dict[str, Any],
    others: Sequence[EngineAdvice] = (),
    checked: Sequence[Checked] = (),
    skipped: Mapping[str, str] | None = None,
) -> None:
    """Print the advice on one screen."""
    from rich.text import Text

    head = f"{about['model']}, {about['dtype']}, {about['device']}; {about['prompts']} prompts of up to "
    console.print(Text(head + f"{about['tokens']} tokens", style="bold"), soft_wrap=True)
    for line in lines(given):
        console.print(line, soft_wrap=True)
    if given.best:
        console.print(_table(given.best[:_ROWS]))
    for line in _skipped_lines(skipped or {}):
        console.print(Text(line, "yellow"), soft_wrap=True)
    for each in others:
        for line in each.lines():
            console.print(Text(line), soft_wrap=True)
    if checked:
        console.print(Text("Predictions held against measurement", style="bold"))
        console.print(_check_table(checked))


def _skipped_lines(skipped: Mapping[str, str]) -> list[str]:
    """What could not be measured, by the reason."""
    by_reason: dict[str, list[str]] = {}
    for name, why in skipped.items():
        by_reason.setdefault(why, []).append(name)
    return [f"skipped {'; '.join(names)}: {why}" for why, names in by_reason.items()]


def lines(given: Advice) -> list[str]:
    """The advice in words."""
    chosen = given.chosen
    if chosen is None:
        return [f"Don't draft: {given.reason}."]
    size = f" with drafts of {chosen.length} tokens" if chosen.length else ""
    shape = f" ({chosen.candidate.shape})" if chosen.candidate.shape else ""
    found = [
        f"Use {chosen.candidate.name.partition(',')[0]}{shape}{size}: {chosen.speedup:.2f}x plain decoding "
        f"({chosen.low:.2f}-{chosen.high:.2f}).",
        f"Why: {given.reason}.",
    ]
    if len(given.batches) > 1:
        each = ", ".join(
            f"{one.rows}: {one.speedup:.2f}x" + (f" with {one.length}" if one.length else "") for one in given.batches
        )
        stops = given.pays_below
        until = f"it stops paying at {stops} rows" if stops else f"it pays up to {given.batches[-1].rows} rows"
        found.append(f"Batches: {until} ({each}).")
    return found


def _table(best: Sequence[Prediction]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from outrider.app.viz.fitted import Fitted

    table = Table("", "drafts", "tokens / pass", "accepted", "round costs", "predicted (95 %)", box=SIMPLE_HEAD)
    for column in table.columns[1:]:
        column.justify = "right"
    for each in best:
        style = "green" if each.low > 1 else "red" if each.high < 1 else ""
        table.add_row(
            each.candidate.name,
            str(each.length or "its own"),
            f"{each.tokens_per_pass:.2f}",
            f"{each.acceptance:.0%}",
            f"{each.pass_cost + each.draft_cost:.2f}",
            f"{each.speedup:.2f} ({each.low:.2f}-{each.high:.2f})",
            style=style,
        )
    return Fitted(table)


def _check_table(checked: Sequence[Checked]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from outrider.app.viz.fitted import Fitted

    table = Table("", "drafts", "predicted (95 %)", "measured (runs)", "error", box=SIMPLE_HEAD)
    for each in checked:
        table.add_row(
            each.name,
            str(each.length or "its own"),
            f"{each.predicted:.2f} ({each.low:.2f}-{each.high:.2f})",
            f"{each.measured:.2f} ({each.measured_low:.2f}-{each.measured_high:.2f})",
            f"{each.error:+.0%}",
        )
    return Fitted(table)
