"""`outrider ladder`: train drafters on equal terms and compare them. Heavy packages are imported when it runs."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from outrider.app.options import DEVICE, JsonFile, TextModelName, device_named


def ladder(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE...", help="Drafters to compare. Default: ten of them.")
    ] = None,
    model: TextModelName = "smollm2-135m",
    device: Annotated[str, typer.Option(help="torch device: cpu, cuda ...", callback=device_named)] = DEVICE,
    minutes: Annotated[float, typer.Option(help="Training time of each run, in minutes.")] = 30.0,
    parameters: Annotated[int, typer.Option(min=1, help="Most trained parameters of each drafter.")] = 1_400_000,
    seeds: Annotated[int, typer.Option(min=1, help="Number of runs of each drafter.")] = 3,
    patience: Annotated[
        int, typer.Option(min=0, help="End a run after so many validations without longer accepted drafts; 0: never.")
    ] = 4,
    validations: Annotated[int, typer.Option(min=1, help="Validations of each run.")] = 12,
    data: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Answers to train on. Default: those of `outrider train`, generated if there are few."
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help='JSON lines with "prompt" (and "category"), answered if there is no --data.'),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option("--output-dir", "-o", metavar="DIR", help="Folder of the runs and of the results.")
    ] = None,
    draft_vocab_size: Annotated[
        int, typer.Option(min=0, help="Number of tokens that can be proposed; 0: all.")
    ] = 12288,
    keep_states: Annotated[
        float | None,
        typer.Option(
            min=0,
            metavar="GB",
            help="Keep up to this much of the target's states in the output folder for all runs; 0: none. Default: 16 "
            "on a CPU, else 0.",
        ),
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Also draw the curves into this file.")] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bars.")] = False,
) -> None:
    """Train drafters with the same data, minutes and parameters, and compare them. An interrupted run resumes."""
    from outrider.core.assets.files import write_atomically
    from outrider.text.training import ladder as rungs

    shown = sys.stderr if str(json_file) == "-" else sys.stdout
    result = rungs.ladder(
        rungs.LadderRequest(
            recipes=tuple(recipes or rungs.RUNGS),
            model=model,
            device=device,
            minutes=minutes,
            parameters=parameters,
            seeds=seeds,
            data=tuple(data or ()),
            prompts=tuple(prompts or ()),
            out=output_dir,
            draft_vocab_size=draft_vocab_size,
            validations=validations,
            patience=patience,
            keep_states=keep_states,
            quiet=quiet,
        ),
        partial(print, file=shown),
    )
    if json_file is not None:
        written = json.dumps(result, indent=1) + "\n"
        print(written, end="") if str(json_file) == "-" else write_atomically(json_file, written)
    if plot is not None:
        rungs.figure(result["rows"]).savefig(plot, dpi=120)
