"""`outrider serve` and `outrider export vllm`: our drafters on vLLM.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.app.bench.vllm import python_with_vllm

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
    found = python_with_vllm(python, install, wanted)
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
