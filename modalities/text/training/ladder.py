"""The ladder: trained drafters compared on one target, one set of answers, one time and one number of parameters.

Each is trained by `outrider.text.training.run`, in a folder of its own for each seed, and stops early when accepted
drafts get no longer. On a CPU the time is that of the processor's work, on which other processes have less influence
than on the clock's, and the target reads the answers once for all runs, outside of their time.
Independent of what the drafters are.
"""

from __future__ import annotations

import gc
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import torch

from outrider.core.assets.files import read_json, write_atomically
from outrider.core.device import keep_memory, return_freed_memory
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import Incompatible, InvalidOption, OutriderError, install_command
from outrider.core.methods.trained import (
    DFLASH,
    DFLASH2,
    DFLY,
    DOMINO,
    DSPARK,
    EAGLE3,
    HYDRA,
    MEDUSA,
    MTP,
    P_EAGLE,
)
from outrider.core.trace import machine, versions
from outrider.core.training.dataset import TargetTeacher, batches
from outrider.core.training.kept_states import KeptStates
from outrider.text.loading import load
from outrider.text.recipes import home, recipe
from outrider.text.training import run
from outrider.text.training.data import read
from outrider.text.training.run import TrainingRequest

RUNGS = tuple(str(row) for row in (EAGLE3, MEDUSA, HYDRA, MTP, DFLASH, DSPARK, DOMINO, DFLY, DFLASH2, P_EAGLE))
_LOSS, _RATE = "kl + 0.5 cross-entropy", 2e-3  # of all, so that none is favoured


@dataclass(frozen=True, kw_only=True)
class LadderRequest:
    """The options of `outrider ladder`."""

    recipes: tuple[str, ...] = RUNGS
    model: str = "smollm2-135m"
    device: str = "cpu"
    minutes: float = 30.0  # of each run
    steps: int | None = None  # of each run, at most
    parameters: int = 1_400_000  # at most, of each drafter
    seeds: int = 3
    data: tuple[Path, ...] = ()
    prompts: tuple[Path, ...] = ()  # JSON lines with "prompt", which the target answers first if there is no data
    out: Path | None = None
    draft_vocab_size: int = 12288
    validations: int = 12
    patience: int = 4
    keep_states: float | None = None  # GB of the target's states on disk for all runs; None: 16 on a CPU, else 0
    quiet: bool = False

    def __post_init__(self) -> None:
        for name in self.recipes:
            recipe(name)
        if min(self.seeds, self.parameters, self.validations) < 1 or not self.minutes > 0:
            raise InvalidOption(
                f"seeds={self.seeds}, parameters={self.parameters}, validations={self.validations}, "
                f"minutes={self.minutes}: each must be above 0"
            )


def ladder(request: LadderRequest, say: Callable[[str], None] = print) -> dict[str, Any]:
    """Run what is not finished yet; write ladder.json, ladder.md and ladder.png, and return what the first contains."""
    lm = load(request.model, device=request.device, dtype="bfloat16")
    target = lm.target()
    if not isinstance(target, Decoder):
        raise Incompatible(f"{lm.name} does not run on our own decoder, whose hidden states the recipes need")
    out = request.out or home(lm.name) / "ladder"
    if missing := [file for file in request.data if not file.is_file()]:
        raise InvalidOption(f"there is no {missing[0]}")
    data = request.data or (home(lm.name) / "answers.jsonl",)
    if not request.data and not (out / _SETTINGS).is_file():
        given = TrainingRequest(recipes=request.recipes, prompts=request.prompts, quiet=request.quiet)
        run.write_answers(lm, given, data[0], say)
    _same(out, request, lm.name)
    sizes = {name: fitted(name, target, request.parameters, request.draft_vocab_size) for name in request.recipes}
    limit = request.keep_states if request.keep_states is not None else 16.0 if lm.device == "cpu" else 0.0
    teacher = None
    if limit:
        teacher = _kept(target, sizes, data, out / "states", limit, f"{lm.name} bfloat16", request.quiet)
    for seed in range(request.seeds):
        for name in request.recipes:
            folder = out / name / f"seed-{seed}"
            if (folder / "finished").is_file():
                continue
            say(f"{name}, seed {seed}: {sizes[name]}")
            run.train(
                TrainingRequest(
                    recipes=(name,),
                    model=request.model,
                    device=request.device,
                    minutes=request.minutes,
                    steps=request.steps,
                    out=folder,
                    data=data,
                    rate=_RATE,
                    loss=_LOSS,
                    draft_vocab_size=request.draft_vocab_size,
                    seed=seed,
                    options={name: sizes[name]},
                    validations=request.validations,
                    patience=request.patience,
                    work=lm.device == "cpu",
                    quiet=request.quiet,
                    command=f"outrider ladder {name}",
                ),
                say,
                teacher,
            )
            write_atomically(folder / "finished", "")
            gc.collect()
            return_freed_memory()
    rungs = gathered(out)
    settings = {"model": lm.name, "device": request.device, "threads": torch.get_num_threads(), "seeds": request.seeds}
    settings |= {name: getattr(request, name) for name in _FIXED} | {"data": [run.described(file) for file in data]}
    result: dict[str, Any] = {"machine": machine(), "versions": versions(), "settings": settings, "ladder": True}
    result["rows"] = rungs
    write_atomically(out / "ladder.json", json.dumps(result, indent=1) + "\n")
    write_atomically(out / "ladder.md", table(rungs))
    figure(rungs).savefig(out / "ladder.png", dpi=120)
    say(table(rungs))
    return result


def _kept(
    target: Decoder,
    sizes: Mapping[str, Mapping[str, int]],
    data: Sequence[Path],
    folder: Path,
    limit: float,
    name: str,
    quiet: bool,
) -> KeptStates:
    """A teacher that has read all answers, as far as their states fit into `limit` GB."""
    from tqdm import tqdm

    if target.device.type == "cpu":
        keep_memory()
    teacher = KeptStates(TargetTeacher(target), folder, round(limit * 1e9), name=name, taps=run.needs(target, sizes))
    texts = [
        replace(lesson, prompt=lesson.prompt[:1], answer=lesson.prompt[1:] + lesson.answer)
        for file in data
        for lesson in read(file)
    ]
    groups = batches(texts, run.BATCH, 0, max_length=run.BATCH)
    for group in tqdm(groups, desc="the target reads the answers", disable=quiet):
        teacher.keep([[*text.prompt, *text.answer] for text in group])
    return teacher


def _same(out: Path, request: LadderRequest, model: str) -> None:
    """A folder holds runs of equal settings; the recipes and the number of seeds may grow."""
    settings = {"model": model, "data": [str(file) for file in request.data]}
    settings |= {name: value for name, value in asdict(request).items() if name in _FIXED}
    path = out / _SETTINGS
    if not path.is_file():
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(path, json.dumps(settings, indent=1) + "\n")
    elif read_json(path) != settings:
        raise InvalidOption(f"{out} holds a ladder of other settings ({_SETTINGS}); choose another folder")


_SETTINGS = "settings.json"
_FIXED = ("minutes", "steps", "parameters", "draft_vocab_size", "validations", "patience", "keep_states")


def fitted(name: str, target: Decoder, parameters: int, vocabulary: int) -> dict[str, int]:
    """The value of a recipe's size option with the most parameters that the budget allows."""
    item = recipe(name)
    words = 0 if vocabulary >= target.vocabulary else vocabulary

    def count(size: int) -> int:
        made = item.kind(target, **{**item.options, item.size: size, "vocabulary": words})
        return sum(weight.numel() for weight in made.parameters() if weight.requires_grad)

    one, two = count(1), count(2)
    size = 1 + (parameters - one) // (two - one)
    if size < 1:
        raise InvalidOption(f"{name} has {one:,} parameters or more; the budget is {parameters:,}")
    while size > 1 and count(size) > parameters:  # sizes that grow faster than linearly
        size -= 1
    return {item.size: size}


def gathered(out: Path) -> list[dict[str, Any]]:
    """Each drafter's results over its finished seeds, the best first: the mean of the best validations and their
    spread, and every validation (minutes, tokens, tokens per target pass)."""
    rungs = []
    for folder in sorted(path for path in out.iterdir() if path.is_dir()):
        curves = [
            read_curve(file.parent / "curve.json", folder.name) for file in sorted(folder.glob("seed-*/finished"))
        ]
        curves = [curve for curve in curves if curve]
        if not curves:
            continue
        best = [max(curve, key=lambda row: row["tokens_per_pass"]) for curve in curves]
        reached = [row["tokens_per_pass"] for row in best]
        kinds = sorted(set[str]().union(*(row["kinds"] for row in best)))
        rungs.append(
            {
                "drafter": folder.name,
                "tokens_per_pass": fmean(reached),
                "spread": pstdev(reached),
                "seeds": len(curves),
                "minutes": fmean(row["minutes"] for row in best),
                "tokens": fmean(row["tokens"] for row in best),
                "conditional": [fmean(values) for values in zip(*(row["conditional"] for row in best), strict=False)],
                "kinds": {kind: fmean(row["kinds"][kind] for row in best if kind in row["kinds"]) for kind in kinds},
                "curves": curves,
            }
        )
    return sorted(rungs, key=lambda rung: -float(rung["tokens_per_pass"]))


def read_curve(file: Path, name: str) -> list[dict[str, Any]]:
    """The validations of a run."""
    rows = json.loads(file.read_text(encoding="utf-8"))
    kept = ("tokens_per_pass", "conditional", "kinds")
    return [
        {"minutes": row["minutes"], "tokens": row["tokens"], **{key: row["models"][name][key] for key in kept}}
        for row in rows
        if row["steps"] and name in row["models"]
    ]


def table(rungs: Sequence[Mapping[str, Any]]) -> str:
    """A Markdown table of the drafters, by tokens per target pass, task and position."""
    kinds = sorted(set[str]().union(*(rung["kinds"] for rung in rungs)))
    depth = max((len(rung["conditional"]) for rung in rungs), default=0)
    heads = [
        "drafter",
        "tokens per pass",
        "minutes",
        "tokens read",
        *kinds,
        *(f"position {k + 1}" for k in range(depth)),
    ]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for rung in rungs:
        cells = [rung["drafter"], f"{rung['tokens_per_pass']:.3f} ± {rung['spread']:.3f}"]
        cells += [f"{rung['minutes']:.1f}", f"{rung['tokens']:,.0f}"]
        cells += [f"{rung['kinds'][kind]:.2f}" if kind in rung["kinds"] else "" for kind in kinds]
        shares = [f"{share:.0%}" for share in rung["conditional"]]
        lines.append("| " + " | ".join([*cells, *shares, *[""] * (depth - len(shares))]) + " |")
    note = "Simulated greedy chains on held-out answers: mean and standard deviation over seeds of each run's best."
    return "\n".join([*lines, "", f"{note} By position: accepted, of the guesses reached."]) + "\n"


def figure(rungs: Sequence[Mapping[str, Any]]) -> Any:
    """A matplotlib figure: tokens per target pass against minutes and data, and acceptance by position."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OutriderError(f"the figure needs matplotlib: {install_command('train')}") from None
    plot = Figure(figsize=(15, 4.6), layout="constrained")
    panels = plot.subplots(1, 3)
    for number, rung in enumerate(rungs):
        style = {"color": f"C{number % 10}", "marker": ".", "linewidth": 1.2}
        for axes, measure in zip(panels, ("minutes", "tokens"), strict=False):
            for seed, curve in enumerate(rung["curves"]):
                label = {"label": rung["drafter"]} if not seed else {}
                axes.plot([row[measure] for row in curve], [row["tokens_per_pass"] for row in curve], **style, **label)
        panels[2].plot(range(1, len(rung["conditional"]) + 1), rung["conditional"], **style)
    panels[0].set(title="by training time", xlabel="minutes", ylabel="tokens per target pass")
    panels[1].set(title="by data", xlabel="tokens read")
    panels[2].set(title="accepted, of the guesses reached", xlabel="position in the draft", ylim=(0, 1))
    for axes in panels:
        axes.grid(alpha=0.3)
    if rungs:
        plot.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    return plot
