"""`outrider train`: recipes and options in, weights out. Heavy packages are imported when it runs."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer


def train(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE...", help="What to train: one or several of --list.")
    ] = None,
    model: Annotated[str, typer.Option(help="The target: an asset, a hub id, a folder or a GGUF file.")] = (
        "smollm2-135m"
    ),
    device: Annotated[str, typer.Option(help="cpu, cuda ...; several GPUs through `accelerate launch`.")] = "cpu",
    minutes: Annotated[
        float, typer.Option(help="How long, the writing of answers included; for images, each recipe.")
    ] = 30.0,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Where weights, curve and checkpoint go.")] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Answers to learn from; may be repeated. For images, prepared pictures."),
    ] = None,
    prompts: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Prompts to be answered first; may be repeated.")
    ] = None,
    texts: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Ordinary text to read as well; may be repeated.")
    ] = None,
    text_share: Annotated[float, typer.Option(help="How much of that, in the first half of the time.")] = 0.3,
    answers_only: Annotated[bool, typer.Option("--answers-only", help="Don't learn from prompts.")] = False,
    temperature: Annotated[float, typer.Option(help="Of the answers that are written.")] = 0.0,
    tokens: Annotated[int | None, typer.Option(min=2, help="Tokens a batch; for images, pictures.")] = None,
    rate: Annotated[float | None, typer.Option(help="Learning rate, instead of the recipe's.")] = None,
    loss: Annotated[
        str | None, typer.Option(help="Instead of the recipe's; a sum such as 'kl + 0.1 cross-entropy'.")
    ] = None,
    learn: Annotated[
        str,
        typer.Option(
            help="From the target's answers; on-policy, from what a draft model writes; or from where drafts are "
            "rejected while serving: answers, on-policy, served."
        ),
    ] = "answers",
    vocabulary: Annotated[int, typer.Option(min=0, help="Tokens that can be guessed at least; 0 is all.")] = 12288,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    fresh: Annotated[bool, typer.Option("--fresh", help="Begin anew, where a run was broken off.")] = False,
    start: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Weights of a recipe to begin from, instead of from chance; may be repeated."
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress bars.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="Name the recipes and leave.")] = False,
) -> None:
    """Train drafters for a target, or the parts of the image model; a run that was broken off goes on."""
    from outrider.image.recipes import PREFIX
    from outrider.image.recipes import RECIPES as PICTURES
    from outrider.speech.recipes import PREFIX as SPOKEN
    from outrider.speech.recipes import RECIPES as SPEECH
    from outrider.text.recipes import RECIPES

    command = shlex.join(["outrider", *sys.argv[1:]])
    names = {one.name: one.summary for one in RECIPES.values()} | {one.name: one.summary for one in PICTURES.values()}
    names |= {one.name: one.summary for one in SPEECH.values()}
    if list_:
        width = max(map(len, names))
        for name, summary in names.items():
            print(f"{name:{width}}  {summary}")
        return
    if not recipes:
        raise typer.BadParameter(f"give at least one of {', '.join(names)}", param_hint="RECIPE")
    spoken, drawn = (any(one.startswith(prefix) for one in recipes) for prefix in (SPOKEN, PREFIX))
    if spoken or drawn:
        made: Any = import_module("outrider.image.training.run" if drawn else "outrider.speech.training.run")
        if len(data or ()) > 1:
            raise typer.BadParameter("pictures, or speech, are one prepared file or folder", param_hint="--data")
        if len(start or ()) > 1:
            raise typer.BadParameter("parts of these models are trained one by one", param_hint="--start")
        made.train(
            made.TrainingRequest(
                recipes=tuple(recipes),
                device=device,
                minutes=minutes,
                out=out,
                data=data[0] if data else None,
                batch=tokens,
                rate=rate,
                seed=seed,
                fresh=fresh,
                start=start[0] if start else None,
                quiet=quiet,
                command=command,
            )
        )
        return
    from outrider.text.training.run import TrainingRequest
    from outrider.text.training.run import train as run

    wanted = TrainingRequest(
        recipes=tuple(recipes),
        model=model,
        device=device,
        minutes=minutes,
        out=out,
        data=tuple(data or ()),
        prompts=tuple(prompts or ()),
        texts=tuple(texts or ()),
        text_share=text_share,
        whole=not answers_only,
        temperature=temperature,
        tokens=tokens,
        rate=rate,
        loss=loss,
        learn=learn,
        vocabulary=vocabulary,
        seed=seed,
        fresh=fresh,
        start=tuple(start or ()),
        quiet=quiet,
        command=command,
    )
    run(wanted)
