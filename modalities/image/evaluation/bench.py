"""Benchmark of drafters and acceptance rules on images: tokens per target pass, speedup, and the quality of relaxed
rules.

Each row of the table is one drafter under one rule, on the same prompts and seeds; the first row is plain decoding.
Rows take turns, batch by batch. Target passes are split between background (the white code) and foreground (all other
codes): a pass is shared evenly by the codes it committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.core.bench.runner import PLAIN, bootstrap
from outrider.core.bench.settings import Setting
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.errors import InvalidOption
from outrider.core.trace import machine, versions
from outrider.core.tree import Tree
from outrider.image.hub.model import PublishedModel
from outrider.image.model import ImageModel
from outrider.image.stream import Result

AnyImageModel = ImageModel | PublishedModel

SCHEMA = 3
_SEED_SHIFT = 1_000_003  # added to the seeds of the second plain decoding, the reference for quality
QualityMeasure = Callable[[Sequence[Result], Sequence[Result]], Mapping[str, float]]  # of images and plain decoding's


@dataclass(frozen=True, kw_only=True)
class Row:
    """The measurements of one setting."""

    name: str
    drafter: str
    rule: str
    lossless: bool
    pictures: int
    tokens_per_pass: float
    background_per_pass: float  # white codes per target pass spent on them; foreground: all other codes
    foreground_per_pass: float
    equivalents_per_token: float
    acceptance_rate: float
    relaxed: float  # share of codes that were accepted only because the rule is relaxed
    total_variation: float  # mean per code
    identical: float  # share of images equal to plain decoding's with the same seed
    nll: float  # negative log-likelihood under the guided target, nats per code
    foreground_nll: float
    seconds: float  # per image, in batches
    speedup: float  # over plain decoding: median over images, with its 95 % interval
    speedup_low: float
    speedup_high: float
    options: Mapping[str, Any]  # of the drafter and of the rule
    quality: Mapping[str, float]  # further measures by name; empty if none was requested


def measure(
    im: AnyImageModel,
    prompts: Sequence[str],
    settings: Sequence[Setting],
    *,
    style: str | None = None,
    guidance_scale: float | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch: int = 16,
    quality: QualityMeasure | None = None,
    progress: Callable[[int], Any] = lambda count: None,
) -> list[Row]:
    """One row for plain decoding, then one for each setting. With `quality`, the second row is plain decoding with
    other seeds: smaller differences than its are not significant."""
    if not prompts:
        raise InvalidOption("there are no prompts to measure with; give at least one")
    guidance_scale = im.guidance if guidance_scale is None else guidance_scale
    reseeded = [] if quality is None else [Setting(seed_shift=_SEED_SHIFT)]
    all_settings = [Setting(), *reseeded, *settings]
    results: list[list[Result]] = [[] for _ in all_settings]
    options = {"style": style, "guidance_scale": guidance_scale, "temperature": temperature, "top_k": top_k}
    for turn, start in enumerate(range(0, len(prompts), batch)):
        part = prompts[start : start + batch]
        for offset in range(len(all_settings)):
            index = (offset + turn) % len(all_settings)  # the order rotates, so that none always runs first
            setting = all_settings[index]
            generated = generate_batches(
                im, part, setting, seed=seed + start, batch=batch, progress=progress, **options
            )
            results[index] += map(_compact, generated)
    rows = []
    for setting, own in zip(all_settings, results, strict=True):
        row = _row(im, setting, own, results[0], style, guidance_scale, batch)
        rows.append(row if quality is None else replace(row, quality=dict(quality(own, results[0]))))
    return rows


def _compact(result: Result) -> Result:
    """The result without the per-node fields of its steps, which no measure uses; thousands are held in memory."""
    steps = tuple(
        replace(step, parents=(), fixed=(), tried=(), chance=(), p=(), q=(), path=()) for step in result.trace.steps
    )
    return replace(result, trace=replace(result.trace, steps=steps))


def generate_batches(
    im: AnyImageModel,
    prompts: Sequence[str],
    setting: Setting,
    *,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[int], Any] = lambda count: None,
    **options: Any,
) -> list[Result]:
    """Generate one image for each prompt in batches, which have the same prompts and seeds for every setting."""
    results: list[Result] = []
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        results += im.generate(
            part,
            drafter=setting.drafter,
            rule=setting.rule,
            drafter_options=setting.drafter_options,
            rule_options=setting.rule_options,
            seed=seed + setting.seed_shift + start,
            **options,
        )
        progress(len(part))
    return results


def _row(
    im: AnyImageModel,
    setting: Setting,
    results: Sequence[Result],
    plain: Sequence[Result],
    style: str | None,
    guidance: float,
    batch: int,
) -> Row:
    steps = [step for result in results for step in result.trace.steps]
    codes = [code for result in results for code in result.tokens]
    passes = {True: 0.0, False: 0.0}  # background, foreground
    for step in steps:
        for code in step.emitted:
            passes[code == im.white] += 1 / len(step.emitted)
    white = sum(code == im.white for code in codes)
    starts = range(0, len(results), batch)
    nll = torch.cat([code_nll(im, results[start : start + batch], style, guidance) for start in starts])
    foreground = torch.tensor([result.tokens for result in results]) != im.white
    drafted = sum(len(step.drafted) for step in steps)
    seconds = [_seconds(result) for result in results]
    ratios = [_seconds(base) / max(own, 1e-9) for base, own in zip(plain, seconds, strict=True)]
    low, high = bootstrap([[ratio] for ratio in ratios])
    return Row(
        name=setting.name,
        drafter=setting.drafter or PLAIN,
        rule=setting.rule,
        lossless=results[0].trace.lossless,
        pictures=len(results),
        tokens_per_pass=len(codes) / len(steps),
        background_per_pass=white / passes[True] if passes[True] else 0.0,
        foreground_per_pass=(len(codes) - white) / passes[False] if passes[False] else 0.0,
        equivalents_per_token=sum(step.cost for step in steps) / len(codes),
        acceptance_rate=sum(step.accepted for step in steps) / drafted if drafted else 0.0,
        relaxed=sum(step.sources.count("relaxed") for step in steps) / len(codes),
        total_variation=sum(sum(step.total_variation) for step in steps) / len(codes),
        identical=sum(own.tokens == base.tokens for own, base in zip(results, plain, strict=True)) / len(results),
        nll=float(nll.mean()),
        foreground_nll=float(nll[foreground].mean()) if bool(foreground.any()) else 0.0,
        seconds=sum(seconds) / len(results),
        speedup=median(ratios),
        speedup_low=low,
        speedup_high=high,
        options={**setting.drafter_options, **setting.rule_options},
        quality={},
    )


def _seconds(result: Result) -> float:
    """The image's share of the time of its steps, each divided equally among the batch rows still active."""
    return sum(step.times.total / step.alive for step in result.trace.steps)


@torch.no_grad()
def code_nll(im: AnyImageModel, results: Sequence[Result], style: str | None, guidance: float) -> torch.Tensor:
    """Negative log-likelihood [B, N] in nats of each code of complete images, under the guided target at temperature
    1. One target pass scores all codes."""
    target = im.target([im.read(result.prompt, style) for result in results], guidance)
    codes = torch.tensor([result.tokens for result in results], device=target.device)
    try:
        target.begin([[im.root]] * len(results), Sampling(), frozenset())
        draft = Draft.guess(codes, Tree.chain(codes.shape[1], target.device), torch.ones_like(codes, dtype=torch.bool))
        logits = target.score(draft).logits()[:, :-1]
        return -logits.float().log_softmax(-1).gather(2, codes[..., None])[..., 0].cpu()
    finally:
        target.end()


def to_json(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    facts = {"schema": SCHEMA, "machine": machine(), "versions": versions(), "settings": dict(settings)}
    return {**facts, "rows": [asdict(row) for row in rows]}


_PLOTTED = (  # measures of rows, their titles, and whether lower is better
    ("nll", "nats per code under the target", True),
    ("total_variation", "total variation per code", True),
    ("KID", "KID to real images", True),
    ("LPIPS", "LPIPS to plain decoding", True),
    ("top-5", "prompt in the classifier's top 5", False),
)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Plot each measure of quality against tokens per target pass: one line for each drafter and rule through its
    settings, over the Pareto front. Returns False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    plots = [plot for plot in _PLOTTED if any(_measure(row, plot[0]) is not None for row in rows)]
    figure = Figure(figsize=(4.6 * len(plots), 4.4), layout="constrained")
    for axes, (measure, title, lower) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots, strict=True):
        points = [(row, value) for row in rows if (value := _measure(row, measure)) is not None]
        front = pareto_front([(row.tokens_per_pass, -value if lower else value) for row, value in points])
        axes.plot(
            *zip(*((points[n][0].tokens_per_pass, points[n][1]) for n in front), strict=True), color="0.85", linewidth=6
        )
        for label in dict.fromkeys(_line(row) for row, _ in points):
            own = sorted((row.tokens_per_pass, value) for row, value in points if _line(row) == label)
            axes.plot(*zip(*own, strict=True), "o-", markersize=4, linewidth=1, label=label)
        axes.set(title=title, xlabel="tokens per target pass")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    return True


def _line(row: Row) -> str:
    return PLAIN if row.drafter == PLAIN else f"{row.drafter}, {row.rule}"


def _measure(row: Row, name: str) -> float | None:
    value = row.quality.get(name, getattr(row, name, None))
    return None if value is None else float(value)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of the points that no other point exceeds in both coordinates, sorted by the first coordinate."""
    order = sorted(range(len(points)), key=lambda index: points[index], reverse=True)
    front: list[int] = []
    for index in order:
        if not front or points[index][1] > points[front[-1]][1]:
            front.append(index)
    return front[::-1]
