"""How many calls of the target drafters and rules spare on pictures, and what relaxed ones change.

Every row of the table is one drafter under one rule, on the same prompts and seeds; the first is plain decoding. Calls
are split between background (the white code) and ink: a step's call is shared evenly by the codes it committed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from outrider.core.draft import Draft, Tree
from outrider.core.errors import InvalidOption
from outrider.core.laws import Sampling
from outrider.core.trace import machine, versions
from outrider.image.model import ImageModel
from outrider.image.stream import Result

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row: who drafts and who judges."""

    drafter: str | None
    rule: str = "exact"
    drafter_options: Mapping[str, Any] = field(default_factory=dict)
    rule_options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
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
    tokens_per_call: float
    background_per_call: float  # codes of white patches, and of all others, for each call spent on them
    ink_per_call: float
    equivalents_per_token: float
    acceptance_rate: float
    relaxed: float  # share of codes that were accepted only because the rule is relaxed
    price: float  # total variation a code, on average
    identical: float  # share of pictures that are plain decoding's of the same seed
    surprise: float  # nats a code: what the guided target thinks of the pictures
    ink_surprise: float
    seconds: float  # a picture, in batches


def measure(
    im: ImageModel,
    prompts: Sequence[str],
    settings: Sequence[Setting],
    *,
    style: str | None = None,
    guidance: float = 3.0,
    temperature: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    batch: int = 16,
    progress: Callable[[int], Any] = lambda count: None,
) -> list[Row]:
    """A row for plain decoding, and one for each setting."""
    if not prompts:
        raise InvalidOption("there are no prompts to measure with")
    plain: list[list[int]] | None = None
    rows = []
    for setting in (Setting(drafter=None), *settings):
        found: list[Result] = []
        for start in range(0, len(prompts), batch):
            part = list(prompts[start : start + batch])
            found += im.generate(
                part,
                style=style,
                drafter=setting.drafter,
                rule=setting.rule,
                drafter_options=setting.drafter_options,
                rule_options=setting.rule_options,
                guidance=guidance,
                temperature=temperature,
                top_k=top_k,
                seed=seed + start,
            )
            progress(len(part))
        plain = [one.tokens for one in found] if plain is None else plain
        rows.append(_row(im, setting, found, plain, style, guidance, batch))
    return rows


def _row(
    im: ImageModel,
    setting: Setting,
    found: Sequence[Result],
    plain: Sequence[Sequence[int]],
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
    return Row(
        name=setting.name,
        drafter=setting.drafter or "plain",
        rule=setting.rule,
        lossless=found[0].trace.lossless,
        pictures=len(found),
        tokens_per_call=len(codes) / len(steps),
        background_per_call=white / calls[True] if calls[True] else 0.0,
        ink_per_call=(len(codes) - white) / calls[False] if calls[False] else 0.0,
        equivalents_per_token=sum(step.cost for step in steps) / len(codes),
        acceptance_rate=sum(step.accepted for step in steps) / drafted if drafted else 0.0,
        relaxed=sum(step.sources.count("relaxed") for step in steps) / len(codes),
        price=sum(sum(step.price) for step in steps) / len(codes),
        identical=sum(one.tokens == list(other) for one, other in zip(found, plain, strict=True)) / len(found),
        surprise=float(each.mean()),
        ink_surprise=float(each[ink].mean()) if bool(ink.any()) else 0.0,
        seconds=sum(step.times.total / step.alive for step in steps) / len(found),
    )


@torch.no_grad()
def surprise(im: ImageModel, found: Sequence[Result], style: str | None, guidance: float) -> torch.Tensor:
    """-log of the guided target's law at each code of whole pictures, in one pass -> [B, N], at temperature 1."""
    asked = [im.names.encode(one.prompt, style) for one in found]
    target = im.target(asked, guidance)
    codes = torch.tensor([one.tokens for one in found], device=target.device)
    try:
        target.begin([[im.root]] * len(found), Sampling())
        draft = Draft.guess(codes, Tree.chain(codes.shape[1], target.device), torch.ones_like(codes, dtype=torch.bool))
        logits = target.score(draft).logits()[:, :-1]
        return -logits.float().log_softmax(-1).gather(2, codes[..., None])[..., 0].cpu()
    finally:
        target.end()


def to_json(rows: Sequence[Row], settings: Mapping[str, Any]) -> dict[str, Any]:
    facts = {"schema": SCHEMA, "machine": machine(), "versions": versions(), "settings": dict(settings)}
    return {**facts, "rows": [asdict(row) for row in rows]}


def plot(rows: Sequence[Row], path: Path) -> bool:
    """Codes a call against what the target thinks of the pictures, a colour for each rule; False without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    thought, paid = figure.subplots(1, 2)
    for rule in dict.fromkeys(row.rule for row in rows):
        own = [row for row in rows if row.rule == rule]
        calls = [row.tokens_per_call for row in own]
        thought.plot(calls, [row.surprise for row in own], "o", label=rule)
        paid.plot(calls, [row.price for row in own], "o", label=rule)
    thought.set(title="what the target thinks of the pictures", xlabel="codes a call", ylabel="nats a code")
    paid.set(title="what the rule costs", xlabel="codes a call", ylabel="total variation a code")
    for axes in (thought, paid):
        axes.grid(alpha=0.3)
    thought.legend()
    figure.savefig(path, dpi=110)
    return True
