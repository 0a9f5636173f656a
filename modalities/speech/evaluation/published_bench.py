"""Benchmark of drafters and acceptance rules on a published model of speech or sound: tokens per target pass, speed by
the model's own clock, and the total variation of relaxed rules. Independent of how a class computes."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from outrider.core.bench.runner import PLAIN, SCHEMA, Bench, Contender, Item, Outcome, Same, pooled, row
from outrider.core.bench.settings import Setting
from outrider.core.trace import machine, versions
from outrider.speech.hub.model import Options, PublishedSpeech


def contenders(
    sp: PublishedSpeech,
    settings: Sequence[Setting],
    *,
    seed: int = 0,
    limit: int | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Contender]:
    """Plain decoding, then one contender for each setting; `limit` is in the class's unit: frames, tokens, columns."""
    made = []
    for setting in (Setting(), *settings):
        given = {
            **(options or {}),
            "drafter": setting.drafter,
            "rule": setting.rule,
            "drafter_options": setting.drafter_options,
            "rule_options": setting.rule_options,
        }
        Options.of(given)  # raises before anything runs

        def run(item: Item, given: Mapping[str, Any] = given) -> Outcome:
            start = time.perf_counter()
            result = sp.generate(item.content, max_new_tokens=limit, seed=seed + int(item.id), **given)
            seconds = time.perf_counter() - start
            tokens = tuple(token for stage in result.tokens for token in stage)
            return Outcome(tokens, seconds, result.trace.steps, result.trace.memory or 0)

        made.append(Contender(setting.name, run, rule=setting.rule, lossless=sp.lossless(given)))
    return made


def report(
    bench: Bench, sp: PublishedSpeech, settings: Sequence[Setting], *, about: Mapping[str, Any]
) -> dict[str, Any]:
    """The JSON of `outrider bench speech --model`."""
    plain = {item: run.outcome.tokens for item, run in bench.first(PLAIN).items()}
    rows = []
    for contender, setting in zip(bench.contenders, (Setting(), *settings), strict=True):
        same: dict[str, Same] = {
            item: "same" if run.outcome.tokens == plain[item] else "other"
            for item, run in bench.first(contender.name).items()
            if item in plain
        }
        total = pooled(bench.of(contender.name))
        apart = total.total_variation / max(total.tokens, 1)
        names = {"setting": contender.name, "drafter": setting.drafter or PLAIN}
        rows.append(row(bench, contender, same=same) | names | {"total_variation_per_token": apart})
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {"model": sp.name, "dtype": sp.dtype, **about},
        "rows": rows,
        "skipped": {},
        "peers": [],
    }
