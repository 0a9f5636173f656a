"""How many calls of the target drafters and rules spare on pictures, and what relaxed ones change.

Every row of the table is one drafter under one rule, on the same prompts and seeds; the first is plain decoding. Rows
take turns, batch by batch. Calls are split between background (the white code) and ink: a step's call is shared evenly
by the codes it committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch

from outrider.core.bench.runner import bootstrap, sweep
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, RULES
from outrider.core.trace import machine, versions
from outrider.core.tree import Tree
from outrider.image.hub.model import PublishedModel
from outrider.image.model import ImageModel
from outrider.image.stream import Result

Drawing = ImageModel | PublishedModel

SCHEMA = 3
_ANOTHER = 1_000_003  # added to the seed of plain decoding that stands beside plain decoding
Judge = Callable[[Sequence[Result], Sequence[Result]], Mapping[str, float]]  # pictures, and plain decoding's


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row: who drafts and who judges."""

    drafter: str | None
    rule: str = "exact"
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)
    shift: int = 0  # of the seed

    @property
    def name(self) -> str:
        if self.shift:
            return "plain, other seeds"
        told = [f"{name}={value}" for name, value in (*self.drafter_options.items(), *self.rule_options.items())]
        parts = [self.drafter or "plain", *([] if self.rule == "exact" else [self.rule])]
        return " ".join((" ".join(parts), f"({', '.join(told)})" if told else "")).strip()


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one setting did."""

    name: str
    drafter: str
    rule: str
    lossless: bool
    pictures: int
    tokens_per_pass: float
    background_per_call: float  # codes of white patches, and of all others, for each call spent on them
    ink_per_call: float
    equivalents_per_token: float
    acceptance_rate: float
    relaxed: float  # share of codes that were accepted only because the rule is relaxed
    total_variation: float  # total variation a code, on average
    identical: float  # share of pictures that are plain decoding's of the same seed
    surprise: float  # nats a code: what the guided target thinks of the pictures
    ink_surprise: float
    seconds: float  # a picture, in batches
    speedup: float  # over plain decoding: the median picture's, and a 95 % interval of that
    speedup_low: float
    speedup_high: float
    options: Mapping[str, Any]  # of the drafter and of the rule
    quality: Mapping[str, float]  # what judges say; empty: nobody was asked


def settings(
    drafters: Sequence[str], rules: Sequence[str], of_drafters: Mapping[str, Any], of_rules: Mapping[str, Any]
) -> list[Setting]:
    """Every drafter under every rule. An option goes to all that have it, or with a name and a dot before it
    (`lantern.delta`) to one; a list of values makes a setting of each."""
    return [
        Setting(drafter=drafter, rule=rule, drafter_options=theirs, rule_options=its)
        for drafter, rule in product(drafters, rules)
        for theirs in sweep(drafter, drafters, DRAFTERS, of_drafters)
        for its in sweep(rule, rules, RULES, of_rules)
    ]


def measure(
    im: Drawing,
    prompts: Sequence[str],
    settings: Sequence[Setting],
    *,
    style: str | None = None,
    guidance: float | None = None,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch: int = 16,
    judge: Judge | None = None,
    progress: Callable[[int], Any] = lambda count: None,
) -> list[Row]:
    """A row for plain decoding, and one for each setting. Where pictures are judged, plain decoding with other seeds
    stands between: what differs less than that is no difference."""
    if not prompts:
        raise InvalidOption("there are no prompts to measure with")
    guidance = im.guidance if guidance is None else guidance
    spread = [] if judge is None else [Setting(drafter=None, shift=_ANOTHER)]
    everyone = [Setting(drafter=None), *spread, *settings]
    found: list[list[Result]] = [[] for _ in everyone]
    options = {"style": style, "guidance": guidance, "temperature": temperature, "top_k": top_k}
    for turn, start in enumerate(range(0, len(prompts), batch)):
        part = prompts[start : start + batch]
        for place in range(len(everyone)):
            who = (place + turn) % len(everyone)  # nobody always runs on a warm or a tired machine
            one = drawn(im, part, everyone[who], seed=seed + start, batch=batch, progress=progress, **options)
            found[who] += map(_lean, one)
    rows = []
    for setting, results in zip(everyone, found, strict=True):
        row = _row(im, setting, results, found[0], style, guidance, batch)
        rows.append(row if judge is None else replace(row, quality=dict(judge(results, found[0]))))
    return rows


def _lean(one: Result) -> Result:
    """Without what nobody counts of its steps: thousands of pictures are kept until all are there."""
    steps = tuple(
        replace(step, parents=(), fixed=(), tried=(), chance=(), p=(), q=(), path=()) for step in one.trace.steps
    )
    return replace(one, trace=replace(one.trace, steps=steps))


def drawn(
    im: Drawing,
    prompts: Sequence[str],
    setting: Setting,
    *,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[int], Any] = lambda count: None,
    **options: Any,
) -> list[Result]:
    """Pictures of all prompts by one setting, in batches; the same prompts and seeds stand together in every one."""
    found: list[Result] = []
    for start in range(0, len(prompts), batch):
        part = list(prompts[start : start + batch])
        found += im.generate(
            part,
            drafter=setting.drafter,
            rule=setting.rule,
            drafter_options=setting.drafter_options,
            rule_options=setting.rule_options,
            seed=seed + setting.shift + start,
            **options,
        )
        progress(len(part))
    return found


def _row(
    im: Drawing,
    setting: Setting,
    found: Sequence[Result],
    plain: Sequence[Result],
    style: str | None,
    guidance: float,
    batch: int,
) -> Row:
    steps = [step for one in found for step in one.trace.steps]
    codes = [code for one in found for code in one.tokens]
    calls = {True: 0.0, False: 0.0}  # on background, on ink
    for step in steps:
        for code in step.emitted:
            calls[code == im.white] += 1 / len(step.emitted)
    white = sum(code == im.white for code in codes)
    each = torch.cat([surprise(im, found[at : at + batch], style, guidance) for at in range(0, len(found), batch)])
    ink = torch.tensor([one.tokens for one in found]) != im.white
    drafted = sum(len(step.drafted) for step in steps)
    taken = [_seconds(one) for one in found]
    ratios = [_seconds(base) / max(own, 1e-9) for base, own in zip(plain, taken, strict=True)]
    low, high = bootstrap([[one] for one in ratios])
    return Row(
        name=setting.name,
        drafter=setting.drafter or "plain",
        rule=setting.rule,
        lossless=found[0].trace.lossless,
        pictures=len(found),
        tokens_per_pass=len(codes) / len(steps),
        background_per_call=white / calls[True] if calls[True] else 0.0,
        ink_per_call=(len(codes) - white) / calls[False] if calls[False] else 0.0,
        equivalents_per_token=sum(step.cost for step in steps) / len(codes),
        acceptance_rate=sum(step.accepted for step in steps) / drafted if drafted else 0.0,
        relaxed=sum(step.sources.count("relaxed") for step in steps) / len(codes),
        total_variation=sum(sum(step.total_variation) for step in steps) / len(codes),
        identical=sum(one.tokens == other.tokens for one, other in zip(found, plain, strict=True)) / len(found),
        surprise=float(each.mean()),
        ink_surprise=float(each[ink].mean()) if bool(ink.any()) else 0.0,
        seconds=sum(taken) / len(found),
        speedup=median(ratios),
        speedup_low=low,
        speedup_high=high,
        options={**setting.drafter_options, **setting.rule_options},
        quality={},
    )


def _seconds(one: Result) -> float:
    """A picture's share of the steps it took part in."""
    return sum(step.times.total / step.alive for step in one.trace.steps)


@torch.no_grad()
def surprise(im: Drawing, found: Sequence[Result], style: str | None, guidance: float) -> torch.Tensor:
    """-log of the guided target's distribution at each code of whole pictures, in one pass -> [B, N], at temperature
    1."""
    asked = [im.read(one.prompt, style) for one in found]
    target = im.target(asked, guidance)
    codes = torch.tensor([one.tokens for one in found], device=target.device)
    try:
        target.begin([[im.root]] * len(found), Sampling(), frozenset())
        draft = Draft.guess(codes, Tree.chain(codes.shape[1], target.device), torch.ones_like(codes, dtype=torch.bool))
        logits = target.score(draft).logits()[:, :-1]
        return -logits.float().log_softmax(-1).gather(2, codes[..., None])[..., 0].cpu()
    finally:
        target.end()


def to_json(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    facts = {"schema": SCHEMA, "machine": machine(), "versions": versions(), "settings": dict(settings)}
    return {**facts, "rows": [asdict(row) for row in rows]}


_SHOWN = (  # measures of rows, their titles, and whether less is better
    ("surprise", "nats a code, for the target", True),
    ("total_variation", "total variation a code", True),
    ("KID", "KID to real pictures", True),
    ("LPIPS", "LPIPS to plain decoding", True),
    ("top-5", "its name among the classifier's five", False),
)


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Speed against every measure of quality: a line for each drafter and rule through its settings, and behind them
    the front, beyond which no setting is both faster and better. False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    shown = [one for one in _SHOWN if any(_measure(row, one[0]) is not None for row in rows)]
    figure = Figure(figsize=(4.6 * len(shown), 4.4), layout="constrained")
    for axes, (measure, title, less) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        points = [(row, value) for row in rows if (value := _measure(row, measure)) is not None]
        edge = front([(row.tokens_per_pass, -value if less else value) for row, value in points])
        axes.plot(
            *zip(*((points[n][0].tokens_per_pass, points[n][1]) for n in edge), strict=True), color="0.85", linewidth=6
        )
        for label in dict.fromkeys(_line(row) for row, _ in points):
            own = sorted((row.tokens_per_pass, value) for row, value in points if _line(row) == label)
            axes.plot(*zip(*own, strict=True), "o-", markersize=4, linewidth=1, label=label)
        axes.set(title=title, xlabel="codes a call of the target")
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize="small")
    figure.savefig(path, dpi=110)
    return True


def _line(row: Row) -> str:
    return "plain" if row.drafter == "plain" else f"{row.drafter}, {row.rule}"


def _measure(row: Row, name: str) -> float | None:
    found = row.quality.get(name, getattr(row, name, None))
    return None if found is None else float(found)


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The places of points that none is better than in both, where more is better, by the first."""
    order = sorted(range(len(points)), key=lambda one: points[one], reverse=True)
    found: list[int] = []
    for one in order:
        if not found or points[one][1] > points[found[-1]][1]:
            found.append(one)
    return found[::-1]
