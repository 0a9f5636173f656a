"""`outrider trace`: shows traces in a static page, and converts what other engines write.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.core.errors import InvalidOption

if TYPE_CHECKING:
    from outrider.app.formats.files import Opened

FORMATS = ("recording", "trace", "summary", "aiperf")
trace = typer.Typer(
    help="Show traces in a page without a server, and convert those of other engines.", no_args_is_help=True
)
File = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="A trace or recording, a response of vLLM, SGLang or llama.cpp's server, or AIPerf's record.",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        "--tokenizer",
        metavar="MODEL",
        help="Model whose tokenizer names the tokens of a bare trace. Default: the trace's model, if it is installed.",
    ),
]


@trace.command()
def view(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="What the page opens first. Default: the first chapter.")
    ] = None,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="HTML", help="File to write; - is stdout.")] = Path(
        "trace.html"
    ),
    tokenizer: Tokenizer = None,
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in the browser.")] = False,
) -> None:
    """Write one HTML page that replays a trace, with the bundled recordings and ten chapters. It needs no server."""
    from outrider.app.viewer.html import LARGEST, page
    from outrider.core.assets.files import write_atomically

    content, name = (None, "") if file is None else (json.dumps(_recording(file, tokenizer)), file.name)
    html = page(content, name)
    if len(html.encode()) > LARGEST:
        raise InvalidOption(f"the page would have {len(html.encode()):,} bytes; the limit is {LARGEST:,}")
    if str(output) == "-":
        sys.stdout.write(html)
        return
    write_atomically(output, html)
    print(f"{output}: {len(html.encode()) / 1e6:.1f} MB; open it in a browser")
    if open_browser:
        import webbrowser

        webbrowser.open(output.resolve().as_uri())


@trace.command()
def convert(
    file: File,
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="File to write; - is stdout.")] = Path(
        "-"
    ),
    to: Annotated[
        str,
        typer.Option(
            help="recording: with the texts of tokens; trace: without; summary: totals and histogram; aiperf: AIPerf's "
            "SpecDecodeAcceptanceRecord. Default: recording, or summary where the engine reported no ordered steps."
        ),
    ] = "",
    tokenizer: Tokenizer = None,
) -> None:
    """Convert a trace, or what another engine wrote, to another format."""
    from outrider.app.formats.files import read
    from outrider.core.assets.files import write_atomically

    if to and to not in FORMATS:
        raise typer.BadParameter(f"'{to}' is unknown; choose from {', '.join(FORMATS)}", param_hint="--to")
    opened = read(file)
    found: dict[str, Any] = _converted(
        opened, to or ("recording" if opened.trace is not None else "summary"), tokenizer
    )
    text = json.dumps(found) + "\n"
    if str(output) == "-":
        sys.stdout.write(text)
    else:
        write_atomically(output, text)
        print(f"{output}: {len(text) / 1000:.1f} kB")


@trace.command()
def live(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder to write, or to serve if it was written.")],
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Catalogue name, hub id, folder or GGUF file of a model like Llama.")
    ] = "smollm2-135m",
    serve: Annotated[
        bool, typer.Option("--serve", help="Serve the folder on this machine, with the headers that allow threads.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to serve on; 0 is a free one.")] = 0,
) -> None:
    """Write a folder in which the viewer decodes a model in the browser, with guesses and without."""
    from outrider.app.viewer.live import server, write

    if not (serve and (folder / "live.json").is_file()):
        from rich.console import Console

        with Console(stderr=True).status("Writing the model ..."):
            size = write(folder, model)
        print(f"{folder}: {size / 1e6:.1f} MB")
    if serve:
        with server(folder, port) as serving:
            print(f"http://127.0.0.1:{serving.server_port}/ (Ctrl-C ends it)", flush=True)
            serving.serve_forever()


def _converted(opened: Opened, to: str, tokenizer: str | None) -> dict[str, Any]:
    from outrider.app.formats.engines import to_aiperf

    if to == "aiperf":
        return to_aiperf(opened.as_acceptance())
    if to == "summary":
        return opened.as_acceptance().summary()
    if opened.trace is None:
        raise InvalidOption(f"the file has totals only, so it can't become a {to}; --to summary or --to aiperf can")
    return asdict(opened.trace) if to == "trace" else _named(opened, tokenizer)


def _recording(file: Path, tokenizer: str | None) -> dict[str, Any]:
    """What the viewer opens."""
    from outrider.app.formats.files import read

    return _named(read(file), tokenizer)


def _named(opened: Opened, tokenizer: str | None) -> dict[str, Any]:
    """The contents for the viewer; a bare trace of text with the texts of its tokens, if its tokenizer is at hand."""
    trace = opened.trace
    if trace is None or not opened.is_bare_trace or {"guidance_scale", "speed"} & trace.options.keys():
        return opened.content
    ids = {token for step in trace.steps for token in (*step.drafted, *step.emitted)}
    ids |= {token for step in trace.steps for likely in step.alternatives for token, _ in likely}
    names = _names(sorted(ids - {-1}), tokenizer, trace.options.get("model"))
    return {"recording": 1, "modality": "text", "trace": opened.content, "prompt": "", "names": names}


def _names(ids: list[int], wanted: str | None, model: object) -> dict[str, str]:
    """The texts of tokens, by the wanted tokenizer or by that of the trace's model, which is not fetched."""
    from outrider.core.assets.catalogue import ASSETS

    if wanted is None and not (isinstance(model, str) and model in ASSETS and ASSETS[model].here):
        print("the tokens are shown by their ids; --tokenizer MODEL names them", file=sys.stderr)
        return {}
    from outrider.text.loading import find
    from outrider.text.tokenizer import Tokens

    tokens = Tokens.load(find(wanted or str(model), dtype=None)[0])
    return {str(token): tokens.piece(token)[:200] for token in ids}
