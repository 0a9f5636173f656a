"""The `outrider` command. Heavy packages are imported by the commands that use them.

Exit codes: 0 success, 1 failure (one line on stderr says why), 2 invalid command line, 130 and 143 ended by Ctrl-C and
SIGTERM.
"""

from __future__ import annotations

import gc
import io
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.app.bench import engine
from outrider.app.bench.codec import codec as bench_codec
from outrider.app.bench.image import image as bench_image
from outrider.app.bench.schemas import schemas
from outrider.app.bench.speech import speech as bench_speech
from outrider.app.bench.text import bench
from outrider.app.commands.advise import advise
from outrider.app.commands.contact_sheet import contact_sheet
from outrider.app.commands.datastore import datastore
from outrider.app.commands.image import image
from outrider.app.commands.ladder import ladder
from outrider.app.commands.plot_acceptance import plot_acceptance
from outrider.app.commands.port import check_port
from outrider.app.commands.rag import bench_rag, rag
from outrider.app.commands.serve import export, serve
from outrider.app.commands.simulate import simulate
from outrider.app.commands.speech import speech
from outrider.app.commands.text import assets, text
from outrider.app.commands.trace import trace
from outrider.app.commands.train import train
from outrider.app.interrupt import end_now, ended_by_signals
from outrider.app.options import (
    DEVICE,
    DTYPE,
    AsJson,
    Device,
    DraftModelName,
    Head,
    ModelOptions,
    PageAllowedHosts,
    PageHost,
    PagePassword,
    PublishedName,
    TextDraftModel,
    TextDtype,
    shown_model,
)
from outrider.app.report.command import report
from outrider.app.report.method_list import methods

cli = typer.Typer(
    help="Speculative decoding of text, images and speech.",
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
for command in (engine.throughput, engine.long_context, engine.offload, engine.soak, engine.device, schemas):
    bench.command()(command)
cli.add_typer(bench, name="bench")
cli.command()(text)
cli.command()(image)
cli.command()(contact_sheet)
cli.command()(speech)
cli.command()(rag)
cli.command()(advise)
cli.command()(simulate)
cli.command()(train)
cli.command()(ladder)
cli.command()(plot_acceptance)
cli.command()(report)
cli.command()(methods)
cli.command(context_settings={"allow_extra_args": True})(serve)
cli.add_typer(export, name="export")
cli.add_typer(assets, name="assets")
cli.add_typer(datastore, name="datastore")
cli.add_typer(trace, name="trace")


def main() -> None:
    """Run the command line. An error prints one line; OUTRIDER_DEBUG=1 prints the traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # print ? for characters the terminal cannot encode
    with ended_by_signals() as received:
        try:
            cli()
        except SystemExit as stop:
            if received:
                end_now(128 + received[0] if stop.code else 0)  # a command that ended in order is no failure
            raise
        except Exception as error:
            from outrider.core.errors import OutriderError, unreadable

            if os.environ.get("OUTRIDER_DEBUG"):
                raise
            if isinstance(error, IsADirectoryError | FileNotFoundError | NotADirectoryError) and error.filename:
                error = OutriderError(unreadable(error.filename, error))
            kind = "" if isinstance(error, OutriderError | OSError) else f"unexpected {type(error).__name__}: "
            if _out_of_memory(error):
                kind = "out of memory; use a smaller model or --dtype int8 or int4, fewer tokens or a smaller batch: "
            print("outrider: " + kind + " ".join(str(error).split()), file=sys.stderr)
            sys.exit(1)


def _out_of_memory(error: Exception) -> bool:
    """Whether an allocation failed, on the host or on a GPU."""
    return (
        isinstance(error, MemoryError)
        or type(error).__name__ == "OutOfMemoryError"
        or "can't allocate memory" in str(error)
    )


def _version(requested: bool) -> None:
    if requested:
        from outrider.core import __version__

        print(f"outrider {__version__}")
        raise typer.Exit


@cli.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@cli.command()
def demo(
    port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Port of the page. Default: the first free one.")
    ] = None,
    no_browser: Annotated[bool, typer.Option("--no-browser", help="Serve the page without opening a browser.")] = False,
    host: PageHost = "127.0.0.1",
    allowed_host: PageAllowedHosts = None,
    password: PagePassword = None,
    device: Device = DEVICE,
    dtype: TextDtype = DTYPE,
    weights: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Weights you trained, in subfolders image and speech.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Language model: a catalogue name, a hub id, a folder or a GGUF file. Default: smollm2-135m.",
        ),
    ] = None,
    draft_model: TextDraftModel = None,
    head: Head = None,
    vllm: Annotated[
        str | None,
        typer.Option(metavar="URL", help="vLLM server for the text tab, such as http://127.0.0.1:8000."),
    ] = None,
    image_model: PublishedName = None,
    image_draft_model: DraftModelName = None,
    image_model_option: ModelOptions = None,
    speech_model: PublishedName = None,
    speech_draft_model: DraftModelName = None,
    speech_model_option: ModelOptions = None,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Run in the terminal instead, on tiny models that need no download.")
    ] = False,
    drafter: Annotated[
        str | None,
        typer.Option(
            help="Drafter, from `outrider methods`. Default: draft-model, then sampled-tree.",
            rich_help_panel="In the terminal",
        ),
    ] = None,
    rule: Annotated[
        str | None,
        typer.Option(
            help="Acceptance rule, from `outrider methods`. Default: exact.", rich_help_panel="In the terminal"
        ),
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 is greedy decoding. Default: 1.", rich_help_panel="In the terminal"),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=2**31 - 1,
            help="Random seed of the models and of sampling. Default: 0.",
            rich_help_panel="In the terminal",
        ),
    ] = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=1000,
            help="Number of tokens to generate per run. Default: 48.",
            rich_help_panel="In the terminal",
        ),
    ] = None,
    as_json: Annotated[
        bool,
        typer.Option(
            "--json", help="Print the traces as a JSON list and nothing else.", rich_help_panel="In the terminal"
        ),
    ] = False,
) -> None:
    """Open the demo page in a browser, or run the demo in the terminal."""
    from importlib.util import find_spec

    options = {"drafter": drafter, "rule": rule, "temperature": temperature, "seed": seed, "tokens": max_new_tokens}
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    models: dict[str, dict[str, Any] | None] = {
        "image": shown_model("image", image_model, image_draft_model, image_model_option),
        "speech": shown_model("speech", speech_model, speech_draft_model, speech_model_option),
    }
    if any(name is not None for name in (model, draft_model, head)):
        if vllm is not None:
            raise typer.BadParameter("a server has its own model", param_hint="--model, --draft-model, --head")
        models["text"] = {"model": model or "smollm2-135m", "draft_model": draft_model, "options": {"head": head}}
    shown = {panel: model for panel, model in models.items() if model is not None}
    if not (terminal or as_json or given):
        if find_spec("gradio") is not None:
            from outrider.app.page.guard.access import Access

            access = Access(host, tuple(allowed_host or ()), password)
            place = {"port": port, "browser": not no_browser, "device": device, "dtype": dtype, "weights": weights}
            _open_page(shown, vllm=vllm, access=access, **place)
            return
        from outrider.core.errors import install_command

        print(f"the page needs gradio ({install_command('app')}); running in the terminal instead", file=sys.stderr)
    from outrider.app.commands.terminal_demo import Options, run, traces

    demo_options = Options(**given)
    if as_json:
        print("[" + ",\n".join(trace.to_json() for trace in traces(demo_options)) + "]")
    else:
        run(demo_options)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Suspend the garbage collector: imports produce no garbage, and scanning for it takes over a second."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # exclude the modules from later collections
        gc.enable()


def _open_page(shown: dict[str, dict[str, Any]], **given: Any) -> None:
    from rich.console import Console

    check_port(given["access"].host, given["port"])
    with Console(stderr=True).status("Opening the page ..."), _uncollected():
        from outrider.app.page.app import serve
        from outrider.app.page.backends.interface import ModelSpec

        published: dict[Any, ModelSpec] = {panel: ModelSpec(**named) for panel, named in shown.items()}
        page, address = serve(published=published, **given)
    print(f"Outrider is open at {address} (Ctrl-C ends it)", flush=True)
    page.block_thread()


@cli.command()
def doctor(
    as_json: AsJson = False,
    fix: Annotated[bool, typer.Option("--fix", help="First repair what can be repaired automatically.")] = False,
    speed: Annotated[
        bool,
        typer.Option("--speed", help="Measure this machine's speed and the overhead of the decoding loop instead."),
    ] = False,
) -> None:
    """Check the installation: what works on this machine, and how to fix what does not."""
    from rich.console import Console

    if speed and fix:
        raise typer.BadParameter("--speed and --fix cannot be combined")
    if speed:
        _measure_speed(as_json)
        return
    from outrider.app.commands.doctor import draw, examine

    with Console(stderr=True).status("Importing what is installed ..."):
        report = examine(fix=fix)
    if as_json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        draw(report)
    raise typer.Exit(0 if report.ok else 1)


def _measure_speed(as_json: bool) -> None:
    from rich.console import Console

    from outrider.app.commands.doctor_speed import draw, measure

    with Console(stderr=True).status("Loading torch ...") as status:
        speed = measure(status.update)
    if as_json:
        print(json.dumps(speed.to_dict(), indent=2))
    else:
        draw(Console(highlight=False), speed)


if __name__ == "__main__":
    main()
