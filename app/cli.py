"""The `outrider` command: options in, words or JSON out. Heavy packages are imported by the commands that use them.

Exit codes: 0 done, 1 it could not be done and one line on stderr says why, 2 the command line itself is wrong.
"""

from __future__ import annotations

import gc
import io
import json
import math
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.bench import engine
from outrider.app.bench.codec import codec as bench_codec
from outrider.app.bench.image import image as bench_image
from outrider.app.bench.speech import speech as bench_speech
from outrider.app.bench.text import bench
from outrider.app.commands.curves import curves
from outrider.app.commands.datastore import datastore
from outrider.app.commands.image import image
from outrider.app.commands.rag import bench_rag, rag
from outrider.app.commands.serve import export, serve
from outrider.app.commands.sheet import sheet
from outrider.app.commands.simulate import simulate
from outrider.app.commands.speech import speech
from outrider.app.commands.text import assets, text
from outrider.app.commands.train import train
from outrider.app.options import Draft, Model, ModelOptions, shown_model
from outrider.app.report.command import report

if TYPE_CHECKING:
    from outrider.app.commands.doctor import Report
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
bench.command("codec")(bench_codec)
bench.command("rag")(bench_rag)
for one in (engine.crowd, engine.long, engine.offload, engine.soak, engine.device):
    bench.command()(one)
cli.add_typer(bench, name="bench")
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")]
cli.command()(text)
cli.command()(image)
cli.command()(sheet)
cli.command()(speech)
cli.command()(rag)
cli.command()(simulate)
cli.command()(train)
cli.command()(curves)
cli.command()(report)
cli.command(context_settings={"allow_extra_args": True})(serve)
cli.add_typer(export, name="export")
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
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Of the page; default: the first free one.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Open the page, but no browser.")] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda, mps ...")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the language model: float32, bfloat16, int8, int4 ...")] = "bfloat16",
    weights: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights of your own training, in folders image and speech.")
    ] = None,
    vllm: Annotated[
        str | None,
        typer.Option(metavar="URL", help="A vLLM server that the text panel asks, as http://127.0.0.1:8000."),
    ] = None,
    image_model: Model = None,
    image_draft: Draft = None,
    image_option: ModelOptions = None,
    speech_model: Model = None,
    speech_draft: Draft = None,
    speech_option: ModelOptions = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Watch it here instead, on models made on the spot.")
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Who guesses: one of `outrider methods`. Default: draft-model, then sampled-tree.",
            rich_help_panel="In the terminal",
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(help="Who accepts: one of `outrider methods`. Default: exact.", rich_help_panel="In the terminal"),
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; default: 1.", rich_help_panel="In the terminal")
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**31 - 1, help="Of the models and of the draws.", rich_help_panel="In the terminal"),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, max=1000, help="How many to decode, each time.", rich_help_panel="In the terminal"),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option("--json", help="The traces as a JSON list, and nothing else.", rich_help_panel="In the terminal"),
    ] = False,
) -> None:
    """Open the page where drafting and verifying can be watched; or watch them in the terminal."""
    from importlib.util import find_spec

    asked = {
        "drafter": drafter,
        "rule": rule,
        "temperature": temperature,
        "seed": seed,
        "tokens": tokens,
    }
    given: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    asked_for = {
        "image": shown_model("image", image_model, image_draft, image_option),
        "speech": shown_model("speech", speech_model, speech_draft, speech_option),
    }
    shown = {name: one for name, one in asked_for.items() if one is not None}
    if not (terminal or as_json or given):
        if find_spec("gradio") is not None:
            _open_page(port, not no_browser, device, dtype, weights, vllm, shown)
            return
        print("the page needs gradio: pip install 'outrider[app]'; here is the demo in the terminal", file=sys.stderr)
    from outrider.app.commands.terminal_demo import Options, run, traces

    options = Options(**given)
    if as_json:
        print("[" + ",\n".join(trace.to_json() for trace in traces(options)) + "]")
    else:
        run(options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend the garbage collector: imports leave nothing to collect, and looking for it takes over a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # modules are not searched again later
        gc.enable()


def _open_page(
    port: int | None,
    browser: bool,
    device: str,
    dtype: str,
    weights: Path | None,
    vllm: str | None,
    shown: dict[str, dict[str, Any]],
) -> None:
    from rich.console import Console

    with Console(stderr=True).status("Opening the page ..."), _uncollected():
        from outrider.app.page.app import serve
        from outrider.app.page.backends.interface import Named

        published: dict[Any, Named] = {panel: Named(**given) for panel, given in shown.items()}
        page, address = serve(
            port=port, browser=browser, device=device, dtype=dtype, weights=weights, vllm=vllm, published=published
        )
    print(f"Outrider is open at {address} (Ctrl-C ends it)", flush=True)
    page.block_thread()


@cli.command()
def methods(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="As the table that the README has.")] = False,
) -> None:
    """List every drafter, acceptance rule and way of answering from documents there is."""
    if markdown:
        from outrider.app.report.method_table import markdown as written

        print(written(), end="")
        return
    from outrider.core.methods import DRAFTERS, RULES
    from outrider.text.rag.methods import METHODS

    if as_json:
        rows = [describe("drafter", method) for method in DRAFTERS.values()]
        rows += [describe("rule", method) for method in RULES.values()]
        rows += [describe("answering", method) for method in METHODS.values()]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _draw_methods("Drafters", DRAFTERS)
        _draw_methods("Rules", RULES)
        _draw_methods("Answering from documents", METHODS)


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
    from outrider.app.commands.doctor import examine

    with Console(stderr=True).status("Importing what is installed ..."):
        report = examine(mending=mend)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        _draw_report(report)
    raise typer.Exit(0 if report.ok else 1)


def _measure_speed(as_json: bool) -> None:
    from rich.console import Console

    from outrider.app.commands.doctor_speed import draw, measure

    with Console(stderr=True).status("Loading torch ...") as status:
        found = measure(status.update)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        draw(Console(highlight=False), found)


def _draw_report(report: Report) -> None:
    from rich.console import Console
    from rich.text import Text

    from outrider.app.options import file_size

    console = Console(soft_wrap=True)
    here = report.machine
    memory = f", {file_size(here['memory'])} of memory" if here["memory"] else ""
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
