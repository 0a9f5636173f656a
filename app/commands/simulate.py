"""`outrider simulate`: simulated speedups on other devices, and the simulation's error on this machine.

Heavy packages are imported by the command when it runs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import NumPrompts, Repeat, TextPrompts

if TYPE_CHECKING:
    from outrider.core.cost.simulate import Device, Simulation, Workload

WITHIN = 0.15  # the accepted relative error
FITTED = 4  # draft length of the case that the model is fitted to
# (precision, drafter, its options): the cost model is fitted to plain decoding and the first case only
CASES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("bfloat16", "draft-model", {"length": FITTED}),
    ("bfloat16", "draft-model", {"length": 8}),
    ("int4", "draft-model", {"length": FITTED}),
    ("bfloat16", "prompt-lookup", {}),
    ("bfloat16", "token-recycling", {}),
)


def simulate(
    measure: Annotated[
        bool,
        typer.Option(
            "--measure", help="Measure on this machine, which should be idle, and report the simulation's error."
        ),
    ] = False,
    model: Annotated[str, typer.Option(help="Target that is measured.")] = "smollm2-135m",
    prompts: TextPrompts = None,
    num_prompts: NumPrompts = 14,
    max_new_tokens: Annotated[int, typer.Option(min=8, help="Maximum number of tokens to generate per prompt.")] = 96,
    repeat: Repeat = 3,
    parameters: Annotated[
        float | None,
        typer.Option(
            metavar="BILLIONS", help="Simulate a target of this size, with a proportionally larger draft model."
        ),
    ] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Number of layers of that target.")] = None,
    hidden_size: Annotated[int | None, typer.Option(min=1, help="Hidden size of that target.")] = None,
    measurements: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Measurements: written by --measure, otherwise read."),
    ] = None,
) -> None:
    """Simulate the speedup of drafters on a table of devices, from target passes measured on this machine."""
    from outrider.core.assets.files import read_json, write_atomically
    from outrider.core.errors import InvalidOption
    from outrider.core.paths import cache_folder

    path = measurements or cache_folder() / "simulation" / f"{Path(model).name}.json"
    if measure:
        data = _measure(model, prompts, num_prompts, max_new_tokens, repeat)
        write_atomically(path, json.dumps(data) + "\n")
    elif not path.is_file():
        raise InvalidOption(f"there are no measurements in {path}; make them with `outrider simulate --measure`")
    else:
        data = read_json(path)
    show(data, _larger(parameters, layers, hidden_size))


def _larger(parameters: float | None, layers: int | None, hidden_size: int | None) -> dict[str, float] | None:
    from outrider.core.errors import InvalidOption

    given = (parameters, layers, hidden_size)
    if not any(given):
        return None
    if parameters is None or layers is None or hidden_size is None or parameters <= 0:
        raise InvalidOption("a larger target needs all three: --parameters (billions), --layers and --hidden-size")
    return {"parameters": 1e9 * parameters, "layers": layers, "width": hidden_size}


def _measure(model: str, prompts: Path | None, num_prompts: int, tokens: int, repeat: int) -> dict[str, Any]:
    """Measure plain decoding and every case in turns, by precision; returns JSON data."""
    from rich.console import Console

    from outrider import text
    from outrider.app.bench.progress import go
    from outrider.core.bench.runner import Bench, pooled
    from outrider.core.engine.matmul_timing import time_products
    from outrider.core.engine.transformer import Decoder
    from outrider.core.errors import Incompatible
    from outrider.core.trace import machine, versions
    from outrider.text.bench.run import Settings, contenders, load_prompts
    from outrider.text.model import TextModel

    console, items, rows = (
        Console(stderr=True, highlight=False),
        load_prompts(prompts, num_prompts),
        list[dict[str, Any]](),
    )
    facts, models = dict[str, Any](), dict[str, TextModel]()
    for dtype in dict.fromkeys(case[0] for case in CASES):
        with console.status(f"Loading {model} in {dtype} ..."):
            lm = models[dtype] = text.load(model, device="cpu", dtype=dtype)
        target = lm.target()
        if not isinstance(target, Decoder):
            raise Incompatible(f"simulation needs a model that runs on our own decoder; {model} does not")
        form = target.config
        facts[dtype] = {"weight_bytes": target.weight_bytes, "layers": form.layers, "width": form.hidden_size}
        facts[dtype]["parameters"] = _parameters(lm)
    with console.status("Timing matrix products ..."):
        taken = time_products({dtype: lm.target().network for dtype, lm in models.items()})  # type: ignore[attr-defined]
    for dtype, lm in models.items():
        facts[dtype]["products"] = taken[dtype]
        for _, drafter, options in (case for case in CASES if case[0] == dtype):
            settings = Settings(drafters=(drafter,), max_new_tokens=tokens, repeat=repeat, drafter_options=options)
            bench = Bench(contenders(lm, settings), items, repeat)
            if not go(bench, console):
                raise KeyboardInterrupt
            for name, contender in zip(("plain", drafter), bench.contenders, strict=True):
                summary = pooled(bench.of(contender.name))
                rows.append(
                    {
                        "dtype": dtype,
                        "drafter": name,
                        "case": f"{drafter} {options.get('length', '')}".strip(),
                        "tokens_per_second": summary.tokens_per_second,
                        "steps": [_step_data(step) for run in bench.of(contender.name) for step in run.outcome.steps],
                    }
                )
    about = {"model": model, "prompts": len(items), "max_new_tokens": tokens, "repeat": repeat, "models": facts}
    return {"schema": 1, "machine": machine(), "versions": versions(), "settings": about, "rows": rows}


def _parameters(lm: Any) -> int:
    """The parameters that each token is multiplied with; an embedding tied to the output layer counts once."""
    from outrider.core.assets.store import Checkpoint, read_json

    folder = lm.plain_folder()
    tensors = Checkpoint(folder)
    tied = read_json(folder / "config.json").get("tie_word_embeddings", False)
    skipped = () if tied else ("model.embed_tokens.weight",)
    return sum(tensors[name].numel() for name in tensors if name not in skipped)


def _step_data(step: Any) -> dict[str, Any]:
    """The data of a step that simulation needs."""
    return {
        "nodes": len(step.drafted),
        "chain": step.parents == tuple(range(-1, len(step.drafted) - 1)),
        "emitted": len(step.emitted),
        "cost": step.cost,
        "times": asdict(step.times),
    }


def steps_of(row: Mapping[str, Any]) -> list[Any]:
    """The recorded steps of a row."""
    from outrider.core.trace import Step, Times

    return [
        Step(
            row=0,
            index=number,
            drafted=(0,) * step["nodes"],
            parents=tuple(range(-1, step["nodes"] - 1)) if step["chain"] else (-1,) * step["nodes"],
            emitted=(0,) * step["emitted"],
            cost=step["cost"],
            times=Times(**step["times"]),
        )
        for number, step in enumerate(row["steps"])
    ]


def predict(data: Mapping[str, Any]) -> tuple[Device, list[tuple[Simulation, float, bool]], list[Workload]]:
    """The fitted machine; for each case its simulation, the measured speedup, and whether it was fitted to; and the
    workloads, for other devices."""
    from outrider.core.cost.simulate import Model, Workload, fit, simulate, unpacking

    facts, rows = data["settings"]["models"], data["rows"]
    reference = facts[rows[0]["dtype"]]  # weights that need no unpacking
    models = {}
    for dtype, model in facts.items():
        products, full = (
            {int(count): seconds for count, seconds in each["products"].items()} for each in (model, reference)
        )
        slower = (1.0, 0.0)
        if model is not reference:
            slower = unpacking(products, full, reference["weight_bytes"] / model["weight_bytes"])
        models[dtype] = Model(model["weight_bytes"], 2.0 * model["parameters"], model["layers"], slower)
    plain, first = rows[0], rows[1]
    device = fit("this machine", models[first["dtype"]], steps_of(plain), steps_of(first), tokens=FITTED)
    results, workloads = [], []
    for before, row in zip(rows[::2], rows[1::2], strict=True):
        name = row["case"] if row["dtype"] == "bfloat16" else f"{row['case']}, {row['dtype']}"
        workload = Workload.of(name, steps_of(row), layers=3 if row["drafter"] == "draft-model" else 0)
        speedup = row["tokens_per_second"] / before["tokens_per_second"]
        results.append((simulate(device, models[row["dtype"]], workload), speedup, row is first))
        if row["dtype"] == "bfloat16":
            workloads.append(workload)
    return device, results, workloads


def show(data: Mapping[str, Any], larger: Mapping[str, float] | None) -> None:
    """Print the tables."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from outrider.app.viz.fitted import Fitted
    from outrider.core.cost.simulate import ASSUMED, DEVICES, WORD, Model, simulate

    console = Console(highlight=False)
    device, results, workloads = predict(data)
    table = Table(
        "", "measured", WORD, "error", "", title="Speedups on this machine", title_justify="left", box=SIMPLE_HEAD
    )
    for simulation, measured, fitted in results:
        error = simulation.speedup / measured - 1
        verdict = "fitted to" if fitted else "within 15 %" if abs(error) <= WITHIN else "NOT within 15 %"
        table.add_row(simulation.drafter, f"{measured:.2f}x", f"{simulation.speedup:.2f}x", f"{error:+.0%}", verdict)
    console.print(Fitted(table))
    console.print(
        f"The {WORD} is {device.source} in bfloat16; the cost of unpacking fewer bits is that of matrix products timed "
        "without decoding.",
        soft_wrap=True,
    )
    facts = dict(larger or data["settings"]["models"]["bfloat16"])
    model = Model(2.0 * facts["parameters"], 2.0 * facts["parameters"], int(facts["layers"]))
    name = data["settings"]["model"] if larger is None else f"a target of {facts['parameters'] / 1e9:g} billion"
    title = f"Simulation: {name} in 16 bits, one row"
    titles = (f"{workload.name} ({WORD})" for workload in workloads)
    table = Table("", *titles, title=title, title_justify="left", box=SIMPLE_HEAD)
    for simulated in (device, *DEVICES.values()):
        runs = [simulate(simulated, model, workload, width=int(facts["width"])) for workload in workloads]
        cells = (f"{run.speedup:.2f}x, {run.tokens_per_second:.0f} tokens / s" for run in runs)
        table.add_row(simulated.name, *cells)
    console.print(Fitted(table))
    for simulated in DEVICES.values():
        console.print(f"{simulated.name}: {simulated.source}", soft_wrap=True)
    console.print(f"Every figure of the table is a {WORD}; {ASSUMED}.", soft_wrap=True)
