"""`outrider train`: train drafters and models by recipe. Heavy packages are imported when it runs."""

from __future__ import annotations

import shlex
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.app.interrupt import allow
from outrider.app.options import DEVICE, ModelOptions, by_owner, device_named, lines, pairs

_SAVING = 30.0  # seconds for a checkpoint after Ctrl-C


def train(
    recipes: Annotated[
        list[str] | None, typer.Argument(metavar="RECIPE...", help="One or more recipes, from `outrider train --list`.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Target: for text a catalogue name, a hub id, a folder or a GGUF file (default: smollm2-135m); for "
            "images and speech a published model's hub id or folder, with --prompts."
        ),
    ] = None,
    model_option: ModelOptions = None,
    device: Annotated[
        str,
        typer.Option(
            help="torch device: cpu, cuda ...; auto is cuda, else mps, else cpu. For several GPUs start with "
            "`accelerate launch`.",
            callback=device_named,
        ),
    ] = DEVICE,
    dtype: Annotated[
        str, typer.Option(help="Precision of a text target: bfloat16, float32, float16, int8 or int4.")
    ] = "bfloat16",
    minutes: Annotated[
        float, typer.Option(help="Training time in minutes, generating answers included; for images, of each recipe.")
    ] = 30.0,
    output_dir: Annotated[
        Path | None,
        typer.Option("--output-dir", "-o", metavar="DIR", help="Folder for weights, acceptance curve and checkpoint."),
    ] = None,
    data: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Training data: answers; for images, prepared images. Repeatable."),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Prompts that the target answers first. Repeatable for text."),
    ] = None,
    corpus: Annotated[
        list[Path] | None, typer.Option(metavar="DIR", help="Plain text to train on besides answers. Repeatable.")
    ] = None,
    corpus_fraction: Annotated[
        float, typer.Option(help="Fraction of the tokens taken from --corpus in the first half of the time.")
    ] = 0.3,
    answers_only: Annotated[
        bool, typer.Option("--answers-only", help="Compute the loss on answers only, not prompts.")
    ] = False,
    temperature: Annotated[float, typer.Option(help="Temperature at which answers are generated.")] = 0.0,
    batch_size: Annotated[
        int | None, typer.Option(min=2, help="Tokens (for images: images) per batch. Default: the recipe's.")
    ] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Peak learning rate. Default: the recipe's.")] = None,
    loss: Annotated[
        str | None, typer.Option(help="Loss, or a weighted sum: 'kl + 0.1 cross-entropy'. Default: the recipe's.")
    ] = None,
    train_on: Annotated[
        str,
        typer.Option(
            help="answers: texts the target wrote; on-policy: texts the draft model writes; served: positions where "
            "drafts were rejected during decoding."
        ),
    ] = "answers",
    draft_vocab_size: Annotated[
        int, typer.Option(min=0, help="Minimum number of tokens the drafter can propose; 0 is the whole vocabulary.")
    ] = 12288,
    head_option: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RECIPE.NAME=VALUE", help="Set an option of a draft head, such as eagle3.hidden=2048. Repeatable."
        ),
    ] = None,
    keep_states: Annotated[
        float,
        typer.Option(
            metavar="GB",
            min=0,
            help="Keep the target's states on disk, up to so many GB, so that epochs after the first don't run it.",
        ),
    ] = 0.0,
    seed: Annotated[int, typer.Option(min=0, help="Random seed of initial weights and data order.")] = 0,
    no_resume: Annotated[
        bool, typer.Option("--no-resume", help="Start over instead of resuming an interrupted run.")
    ] = False,
    init_from: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Initial weights of a recipe. Default: random. Repeatable."),
    ] = None,
    hold_out: Annotated[
        bool,
        typer.Option(
            "--hold-out", help="Images: leave the names kept for measuring out of the token model's training as well."
        ),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress bars.")] = False,
    list_: Annotated[bool, typer.Option("--list", help="List the recipes and exit.")] = False,
) -> None:
    """Train drafters for a target, or models that ship. An interrupted run resumes."""
    from outrider.image import recipes as image
    from outrider.speech import recipes as speech
    from outrider.text import recipes as text

    allow(_SAVING)
    command = shlex.join(["outrider", *sys.argv[1:]])
    known: tuple[Any, ...] = (*text.RECIPES.values(), *image.RECIPES.values(), *speech.RECIPES.values())
    names = {recipe.name: recipe.summary for recipe in known}
    if list_:
        width = max(map(len, names))
        for name, summary in names.items():
            print(f"{name:{width}}  {summary}")
        return
    if not recipes:
        raise typer.BadParameter(f"give at least one of {', '.join(names)}", param_hint="RECIPE")
    for name in recipes:
        if name not in names:
            from outrider.core.errors import unknown

            raise unknown("recipe", name, names)
    of_image, of_speech = (any(name.startswith(prefix) for name in recipes) for prefix in (image.PREFIX, speech.PREFIX))
    if of_image or of_speech:
        from outrider.core.training.request import TrainingRequest as Request

        trainer: Any = import_module(f"outrider.{'image' if of_image else 'speech'}.training.run")
        if len(prompts or ()) > 1 or (prompts and model is None):
            raise typer.BadParameter("takes one file for a published --model", param_hint="--prompts")
        if head_option or keep_states or dtype != "bfloat16":
            raise typer.BadParameter("is for heads of text models", param_hint="--head-option, --keep-states, --dtype")
        if len(data or ()) > 1:
            raise typer.BadParameter("takes one prepared file or folder for images and speech", param_hint="--data")
        if len(init_from or ()) > 1:
            raise typer.BadParameter(
                "takes one file for images and speech, which train one recipe at a time", param_hint="--init-from"
            )
        trainer.train(
            Request(
                recipes=tuple(recipes),
                device=device,
                minutes=minutes,
                out=output_dir,
                data=data[0] if data else None,
                model=model,
                class_options=pairs(model_option, "--model-option"),
                prompts=lines(prompts[0]) if prompts else (),
                batch=batch_size,
                rate=learning_rate,
                seed=seed,
                fresh=no_resume,
                start=init_from[0] if init_from else None,
                hold_out=hold_out,
                quiet=quiet,
                command=command,
            )
        )
        return
    from outrider.core.training.optim import check_accelerate
    from outrider.text.training.run import TrainingRequest
    from outrider.text.training.run import train as run

    if model_option:
        raise typer.BadParameter("is for published models of images and speech", param_hint="--model-option")
    check_accelerate()
    request = TrainingRequest(
        recipes=tuple(recipes),
        model=model or TrainingRequest.model,
        device=device,
        dtype=dtype,
        minutes=minutes,
        out=output_dir,
        data=tuple(data or ()),
        prompts=tuple(prompts or ()),
        corpus=tuple(corpus or ()),
        corpus_fraction=corpus_fraction,
        answers_only=answers_only,
        temperature=temperature,
        batch_size=batch_size,
        rate=learning_rate,
        loss=loss,
        train_on=train_on,
        draft_vocab_size=draft_vocab_size,
        seed=seed,
        fresh=no_resume,
        start=tuple(init_from or ()),
        options=by_owner(head_option, "--head-option"),
        keep_states=keep_states,
        quiet=quiet,
        command=command,
    )
    run(request)
