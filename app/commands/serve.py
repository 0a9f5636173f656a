"""`outrider serve` and `outrider export vllm`: drafters on vLLM.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.app.bench.vllm import python_with_vllm
from outrider.app.options import LOOKUP_DRAFTER, Dtype

export = typer.Typer(
    help="Export trained drafters to other engines.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
Python = Annotated[
    Path | None, typer.Option(help="Python interpreter with vLLM installed. Default: that of the venv --install makes.")
]
Model = Annotated[str, typer.Option(help="Target: a catalogue name, a hub id or a folder.")]
NumDraftTokens = Annotated[int, typer.Option(min=1, help="Tokens drafted per target pass.")]


@export.callback()
def _engine() -> None:
    pass


@export.command("vllm")
def export_vllm(
    drafter: Annotated[str, typer.Argument(help="Drafter: draft-model, eagle3 or medusa.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Folder to write.")],
    model: Model = "smollm2-135m",
    weights: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Weights of the drafter. Default: those that ship.")
    ] = None,
    num_draft_tokens: NumDraftTokens = 4,
) -> None:
    """Export a trained drafter to a folder that vLLM loads."""
    from outrider.text.vllm.export import export as write

    folder = write(model, drafter, output, weights=weights, length=num_draft_tokens)
    print(f"{folder}: serve it with `outrider serve --drafter {drafter} --weights {folder}`")


def serve(
    context: typer.Context,
    drafter: Annotated[
        str, typer.Option(help="Drafter: plain, prompt-lookup, suffix, draft-model, eagle3 or medusa.")
    ] = LOOKUP_DRAFTER,
    model: Model = "smollm2-135m",
    num_draft_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens drafted per target pass. Default: the drafter's.")
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(help="Weights of the drafter: an exported folder or a file. Default: those that ship."),
    ] = None,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 127.0.0.1 accepts connections from this machine only.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    dtype: Dtype = "bfloat16",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Context length: prompt plus output. Default: the model's."),
    ] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1, help="GPUs that each layer is split over.")] = 1,
    pipeline_parallel_size: Annotated[
        int, typer.Option(min=1, help="GPUs or machines that the layers are distributed over.")
    ] = 1,
    data_parallel_size: Annotated[int, typer.Option(min=1, help="Replicas of the model.")] = 1,
    python: Python = None,
    install: Annotated[
        bool, typer.Option("--install", help="First make a venv with vLLM's CPU build, if there is none.")
    ] = False,
    dry: Annotated[bool, typer.Option("--dry-run", help="Print vLLM's command without running it.")] = False,
) -> None:
    """Serve a model with vLLM and a drafter. Arguments after -- are passed to vLLM.

    Several GPUs: outrider serve --model NAME --tensor-parallel-size 2 --python VENV/bin/python
    Several machines: outrider serve ... --pipeline-parallel-size 2 -- --distributed-executor-backend ray
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
    parallel = {"tensor": tensor_parallel_size, "pipeline": pipeline_parallel_size, "data": data_parallel_size}
    setup = server.Setup(
        folder=folder,
        name=name,
        drafter=wanted,
        speculative=server.speculative(model, wanted, length=num_draft_tokens, weights=weights),
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
        raise typer.Exit(server.run(command, server.environment(found)))
