"""The `outrider` command: options in, words or JSON out. Heavy packages are imported by the commands that use them.

Exit codes: 0 done, 1 it could not be done and one line on stderr says why, 2 the command line itself is wrong.
"""

from __future__ import annotations

import io
import json
import math
import os
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.bench import bench
from outrider.app.bench_image import image as bench_image
from outrider.app.bench_speech import speech as bench_speech
from outrider.app.datastore import datastore
from outrider.app.image import image
from outrider.app.report import report
from outrider.app.sheet import sheet
from outrider.app.speech import speech
from outrider.app.text import assets, text
from outrider.app.train import train

if TYPE_CHECKING:
    from outrider.app.doctor import Report
    from outrider.core.methods import Method

cli = typer.Typer(
    help="Multimodal speculative decoding: draft ahead, verify at once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench.command("image")(bench_image)
bench.command("speech")(bench_speech)
cli.add_typer(bench, name="bench")
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]
cli.command()(text)
cli.command()(image)
cli.command()(sheet)
cli.command()(speech)
cli.command()(train)
cli.command()(report)
cli.add_typer(assets, name="assets")
cli.add_typer(datastore, name="datastore")


def main() -> None:
    """Run the command line; an error is one line, never a stack trace (OUTRIDER_DEBUG=1 shows it)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that can't write a sign gets a question mark
    try:
        cli()
    except Exception as error:
        from outrider.core.errors import OutriderError

        if os.environ.get("OUTRIDER_DEBUG"):
            raise
        kind = "" if isinstance(error, OutriderError | OSError) else f"unexpected {type(error).__name__}: "
        print("outrider: " + kind + " ".join(str(error).split()), file=sys.stderr)
        sys.exit(1)


def _version(wanted: bool) -> None:
    if wanted:
        from outrider.core import __version__

        print(f"outrider {__version__}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@cli.command()
def demo(
    drafter: Annotated[
        str | None,
        typer.Option(help="Who guesses: one of `outrider methods`. Default: draft-model, then sampled-tree."),
    ] = None,
    rule: Annotated[str, typer.Option(help="Who accepts: one of `outrider methods`.")] = "exact",
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1, help="Of the models and of the draws.")] = 0,
    tokens: Annotated[int, typer.Option(min=1, max=1000, help="How many to decode, each time.")] = 48,
    as_json: Annotated[bool, typer.Option("--json", help="The traces as a JSON list, and nothing else.")] = False,
) -> None:
    """Watch drafting and verifying in the terminal."""
    from outrider.app.demo import Options, run, traces

    options = Options(drafter=drafter, rule=rule, temperature=temperature, seed=seed, tokens=tokens)
    if as_json:
        print("[" + ",\n".join(trace.to_json() for trace in traces(options)) + "]")
    else:
        run(options)


@cli.command()
def methods(as_json: AsJson = False) -> None:
    """List every drafter and acceptance rule there is."""
    from outrider.core.methods import DRAFTERS, RULES

    if as_json:
        rows = [describe("drafter", method) for method in DRAFTERS.values()]
        rows += [describe("rule", method) for method in RULES.values()]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _draw_methods("Drafters", DRAFTERS)
        _draw_methods("Rules", RULES)


def describe(kind: str, method: Method) -> dict[str, Any]:
    """A method's row as data."""
    return {
        "name": method.name,
        "kind": kind,
        "systems": list(method.systems),
        "summary": method.summary,
        "modalities": list(method.modalities),
        "topology": list(method.topology),
        "needs": list(method.needs),
        "lossless": method.lossless,
        "options": {name: _plain(default) for name, default in method.options.items()},
        "module": method.module,
        "paper": method.paper,
    }


def _plain(value: Any) -> Any:
    """An option's default as JSON has it; what JSON has no word for becomes text."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return str(value)


def _draw_methods(title: str, table: dict[str, Method]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    drawn = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    drawn.add_column("name", style="cyan", no_wrap=True)
    drawn.add_column("what it does")
    drawn.add_column("drafts", no_wrap=True)
    drawn.add_column("needs" if title == "Drafters" else "keeps", no_wrap=True)
    for method in table.values():
        if method.lossless is None:
            last = ", ".join(method.needs)
        else:
            last = "[green]lossless[/]" if method.lossless else "[yellow]relaxed[/]"
        drawn.add_row(method.name, escape(method.summary), ", ".join(method.topology), last)
    Console().print(drawn)


@cli.command()
def doctor(
    as_json: AsJson = False,
    mend: Annotated[bool, typer.Option("--mend", help="First cure what has a known cure.")] = False,
    speed: Annotated[
        bool, typer.Option("--speed", help="Measure instead how fast this machine is, and what our own loop costs.")
    ] = False,
) -> None:
    """Say what this machine has, what works on it, and how to fix what doesn't."""
    from rich.console import Console

    if speed and mend:
        raise typer.BadParameter("--speed and --mend are two things: give one at a time")
    if speed:
        _measure_speed(as_json)
        return
    from outrider.app.doctor import examine

    with Console(stderr=True).status("Importing what is installed ..."):
        report = examine(mending=mend)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _draw_report(report)
    raise typer.Exit(0 if report.ok else 1)


def _measure_speed(as_json: bool) -> None:
    from rich.console import Console

    from outrider.app.speed import draw, measure

    with Console(stderr=True).status("Loading torch ...") as status:
        found = measure(status.update)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        draw(Console(highlight=False), found)


def _draw_report(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    from outrider.app.doctor import size

    console = Console(soft_wrap=True)
    here = report.machine
    memory = f", {size(here['memory'])} of memory" if here["memory"] else ""
    console.print(Text(f"Python {here['python']} on {here['system']}, {here['cores']} cores{memory}"))
    for device, facts in report.torch.get("devices", {}).items():
        console.print(Text(f"{device}: {facts['name']}, {', '.join(facts['dtypes'])}"))
    for done in report.mended:
        console.print(Text(f"Mended {done}", style="green"))
    colours = {"works": "green", "absent": "yellow", "broken": "red"}
    for finding in report.findings:
        line = Text.assemble((f"{finding.state:8}", colours[finding.state]), f"{finding.name:15}{finding.found}")
        console.print(line.append(f"  ({finding.purpose})", style="dim"))
        if finding.fix:
            console.print(Text(f"{'':8}fix: {finding.fix}"))
    console.print("Everything needed works." if report.ok else "Something needed doesn't work: see above.")


if __name__ == "__main__":
    main()
