"""The `outrider bench` command group and `outrider bench text`, which writes a table, JSON and plots.

Heavy packages are imported when it runs; Ctrl-C shows the table so far.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.bench.batch import batch
from outrider.app.bench.precision import precision
from outrider.app.bench.progress import bar, go
from outrider.app.options import (
    DEVICE,
    RULE,
    Device,
    DrafterGrid,
    DrafterNames,
    FirstPrompts,
    Head,
    JsonFile,
    KVCacheDtype,
    MaxNewTokens,
    Repeat,
    RuleGrid,
    RuleNames,
    Seed,
    Temperature,
    TextDtype,
    TextModelName,
    TextPrompts,
    listed,
)
from outrider.app.options import names as parse_names

if TYPE_CHECKING:
    from rich.console import Console

ENGINES = ("outrider", "vllm")
bench = typer.Typer(
    help="Compare drafters with plain decoding and with other engines, in turns within one run.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@bench.callback()
def _modality() -> None:
    pass


bench.command()(precision)
bench.command()(batch)


@bench.command()
def text(
    prompts: TextPrompts = None,
    drafters: DrafterNames = "auto,prompt-lookup",
    rules: RuleNames = RULE,
    rule_option: RuleGrid = None,
    temperature: Temperature = 0.0,
    max_new_tokens: MaxNewTokens = 128,
    num_prompts: FirstPrompts = None,
    tasks: Annotated[str, typer.Option(metavar="NAMES", help="Use only prompts of these comma-separated tasks.")] = "",
    obey_schemas: Annotated[
        bool, typer.Option("--obey-schemas", help="Constrain each output to the `json_schema` of its prompt.")
    ] = False,
    context_length: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Prepend this many tokens of filler text to every prompt."),
    ] = None,
    repeat: Repeat = 1,
    seed: Seed = 0,
    model: TextModelName = "smollm2-135m",
    draft_model: Annotated[
        str | None,
        typer.Option(metavar="NAME[:DTYPE]", help="Draft model. Default: the one that ships for the target."),
    ] = None,
    head: Head = None,
    drafter_option: DrafterGrid = None,
    calibrate: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="First calibrate these drafters (sequoia, draft-verify) on prompts of their own; saved for later.",
        ),
    ] = "",
    device: Device = DEVICE,
    dtype: TextDtype = "bfloat16",
    kv_cache_dtype: KVCacheDtype = None,
    compare_engines: Annotated[
        bool,
        typer.Option(
            "--compare-engines",
            help="Measure every other engine on the same prompts too: --peers all.",
        ),
    ] = False,
    peers: Annotated[
        str,
        typer.Option(
            metavar="NAMES",
            help="Other engines to measure on the same prompts, comma-separated: transformers, openvino-genai, vllm, "
            "sglang, llama.cpp; all. Those that are missing are installed in venvs, llama.cpp is built.",
        ),
    ] = "",
    engine: Annotated[
        str, typer.Option(help="Engine: outrider, or vllm to measure the drafters on vLLM.")
    ] = "outrider",
    server: Annotated[
        str | None, typer.Option(metavar="URL", help="Running vLLM server, such as http://127.0.0.1:8000.")
    ] = None,
    python: Annotated[
        Path | None, typer.Option(help="Python interpreter with vLLM. Default: that of `outrider serve --install`.")
    ] = None,
    engine_option: Annotated[
        list[str] | None,
        typer.Option(metavar="OPTION", help="Option passed to vLLM, such as --enforce-eager. Repeatable."),
    ] = None,
    json_file: JsonFile = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write plots to DIR.")] = None,
) -> None:
    """Measure speed, tokens per target pass and acceptance on text, and compare outputs with plain decoding."""
    from rich.console import Console

    from outrider.app.bench.tables import draw
    from outrider.core.errors import InvalidOption, unknown
    from outrider.text.bench.peers import peers_named
    from outrider.text.bench.run import Settings, load_prompts, write

    if plots is not None:
        from outrider.app.bench.plots import check

        check()
    _check_folder(json_file)
    items = load_prompts(prompts, num_prompts, parse_names(tasks))
    if obey_schemas and not all(item.options for item in items):
        raise InvalidOption("--obey-schemas: not every prompt has a json_schema; try --prompts records")
    names = parse_names(drafters)
    settings = Settings(
        drafters=names,
        rules=parse_names(rules),
        rule_options=listed(rule_option, "--rule-option"),
        temperature=temperature,
        max_new_tokens=max_new_tokens,
        seed=seed,
        repeat=repeat,
        draft_model=draft_model,
        head=head,
        formats=obey_schemas,
        drafter_options=listed(drafter_option, "--drafter-option"),
    )
    source = Path(prompts).name if prompts else "built in"  # a report is not of one machine
    if engine not in ENGINES:
        raise unknown("engine", engine, ENGINES)
    others = peers_named(("all",) if compare_engines else parse_names(peers))
    if engine == "vllm" or server is not None:
        from outrider.app.bench.vllm import measure

        about = {"prompts_from": source}
        extra = tuple(engine_option or ())
        report, complete = measure(
            items, settings, model, dtype, server=server, python=python, extra=extra, about=about
        )
    else:
        report, complete = _measure_text(
            items,
            settings,
            model,
            device,
            dtype,
            others,
            source,
            parse_names(calibrate),
            context_length,
            kv_cache_dtype,
        )
    if json_file is not None and str(json_file) == "-":
        print(json.dumps(report, indent=2, ensure_ascii=False, allow_nan=False))
    else:
        draw(Console(highlight=False), report)
        if json_file is not None:
            write(report, json_file)
    if plots is not None:
        from outrider.app.bench.plots import draw_all

        for path in draw_all(report, plots):
            print(path, file=sys.stderr)
    if not complete:
        raise typer.Exit(130)


def _check_folder(file: Path | None) -> None:
    """Raise InvalidOption now, rather than after minutes of measuring, if a file cannot be written."""
    from outrider.core.errors import InvalidOption

    if file is not None and str(file) != "-" and not os.access(file.absolute().parent, os.W_OK):
        raise InvalidOption(f"{file} can't be written: {file.absolute().parent} is not a writable folder")


def _measure_text(
    items: list[Any],
    settings: Any,
    model: str,
    device: str,
    dtype: str,
    peers: tuple[str, ...],
    source: str,
    calibrated: tuple[str, ...] = (),
    context_length: int | None = None,
    kv_cache_dtype: str | None = None,
) -> tuple[dict[str, Any], bool]:
    """The report, and whether everything was measured."""
    import torch
    from rich.console import Console

    from outrider import text
    from outrider.core.assets.hub_models import DTYPES
    from outrider.core.bench.runner import Bench
    from outrider.core.errors import InvalidOption
    from outrider.text.bench import run as texts
    from outrider.text.bench.peers import find_model, read_folders, started
    from outrider.text.measurements import draft_model_of as recommended_draft_model

    console = Console(stderr=True, highlight=False)
    skipped: dict[str, str] = {}
    about: dict[str, Any] = {"prompts_from": source}
    cost = None
    with ExitStack() as stack:
        with console.status(f"Loading {model} ...") as status:
            lm = text.load(model, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)
        if kv_cache_dtype is not None:
            about["kv_cache_dtype"] = kv_cache_dtype
        if context_length is not None:
            items, about["context"] = texts.lengthened(lm, items, context_length), context_length
        for name in calibrated:
            _calibrate(lm, name, texts.calibration_prompts(items), settings, console)
            about["calibrated_on"] = "calibration.jsonl"
        draft_model = settings.draft_model or recommended_draft_model(model)
        with console.status("Preparing ...") as status:
            ours = texts.contenders(lm, settings)
            room = max(len(lm.encode(item.content)) for item in items) + settings.max_new_tokens + 64
            others = []
            if peers and settings.temperature == 0:
                folder = lm.plain_folder() if read_folders(peers) else None
                engines = stack.enter_context(
                    started(
                        find_model(model, folder, lm.end, min(lm.context, room), draft_model),
                        lambda item: lm.encode(item.content),
                        limit=settings.max_new_tokens,
                        threads=torch.get_num_threads(),
                        dtype=dtype if dtype in DTYPES else "bfloat16",
                        device=str(lm.device),
                        names=peers,
                        say=lambda line: status.update(f"{line[:1].upper()}{line[1:]} ..."),
                    )
                )
                others, skipped = engines.contenders, engines.skipped
                about["peers"] = engines.settings
            elif peers:
                skipped["peers"] = "they decode greedily; leave out --temperature"
            status.update("Measuring the cost of passes ...")
            cost = texts.costs(lm, items)
        bench = Bench([*ours, *others], items, settings.repeat)
        complete = go(bench, console)
    if not bench.runs:
        raise InvalidOption("stopped before anything was measured")
    with console.status("Comparing outputs ..."):
        return texts.report(bench, lm, settings, cost=cost, about=about, skipped=skipped), complete


def _calibrate(lm: Any, name: str, items: list[Any], settings: Any, console: Console) -> None:
    """Calibrate a drafter under a progress bar; print and save the result."""
    from outrider.text.calibrate import calibrate
    from outrider.text.measurements import measured

    result = ""
    with bar(console, 1, "Calibrating") as step:
        for done, count, result in calibrate(
            lm,
            name,
            [item.content for item in items],
            draft_model=settings.draft_model,
            temperature=settings.temperature,
            tokens=settings.max_new_tokens,
        ):
            step(f"{name}: {result}", done, count)
    console.print(f"{name}: {result}; saved to {measured(lm, name)}")
