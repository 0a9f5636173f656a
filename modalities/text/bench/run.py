"""The text benchmark for outrider.core.bench.runner: prompts, contenders, the report."""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib import resources
from pathlib import Path
from statistics import median
from typing import Any

from outrider.core.assets.files import write_atomically
from outrider.core.bench.runner import PLAIN, SCHEMA, Bench, Contender, Item, Outcome, row
from outrider.core.bench.settings import Setting, combine
from outrider.core.bench.timing import PeakMemory, pass_cost, timed
from outrider.core.cost.theory import PassCost
from outrider.core.errors import InvalidOption, OutriderError, unknown, unreadable
from outrider.core.methods import AUTO, RULES, Input
from outrider.core.methods import DRAFTERS as METHODS
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.methods.rules import EXACT
from outrider.core.trace import machine, versions
from outrider.text.bench.comparison import Judge, loops
from outrider.text.model import TextModel

DRAFTERS = (AUTO.name, PROMPT_LOOKUP.name)
_MAX_PROMPT_BYTES = 50_000_000
_PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # how SPEED-Bench's unfilled prompts begin


BUNDLED = {"records": "records.jsonl"}  # besides prompts.jsonl


class PromptsError(OutriderError):
    """A file of prompts that cannot be read."""


def load_prompts(path: Path | None = None, limit: int | None = None, tasks: Sequence[str] = ()) -> list[Item]:
    """Load bundled prompts (`BUNDLED` by name), or those of a JSON lines file with "prompt", "turns" (Spec-Bench: the
    first is used) or "messages" (SPEED-Bench: the first of the user) and optional "id" or "question_id", "task" or
    "category", "json_schema". `tasks` selects some tasks; `limit` takes prompts from each in turn."""
    if path is None or (str(path) in BUNDLED and not path.exists()):
        source = BUNDLED[str(path)] if path else "prompts.jsonl"
        text = resources.files("outrider.text").joinpath(source).read_text("utf-8")
    else:
        source = str(path)
        if path.is_file() and path.stat().st_size > _MAX_PROMPT_BYTES:
            raise PromptsError(f"{source} is larger than the limit of {_MAX_PROMPT_BYTES:,} bytes")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PromptsError(unreadable(source, error)) from None
    items = [_item(line, f"{source}, line {n}", n) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not items:
        raise PromptsError(f"{source} contains no prompts; expected JSON lines with a prompt or turns each")
    if len({item.id for item in items}) < len(items):
        items = [replace(item, id=f"{n}-{item.id}") for n, item in enumerate(items, 1)]
    known = sorted({item.task for item in items})
    for task in tasks:
        if task not in known:
            raise unknown("task", task, known)
    items = [item for item in items if not tasks or item.task in tasks]
    if limit is None:
        return items
    if limit < 1:
        raise InvalidOption(f"limit is {limit}; it must be 1 or more prompts")
    return _spread(items)[:limit]


def calibration_prompts(scored: Sequence[Item]) -> list[Item]:
    """The bundled prompts that drafters are calibrated on, without those that are scored."""
    text = resources.files("outrider.text").joinpath("calibration.jsonl").read_text("utf-8")
    items = [_item(line, f"calibration.jsonl, line {n}", n) for n, line in enumerate(text.splitlines(), 1)]
    contents = {item.content.strip() for item in scored}
    return [item for item in items if item.content.strip() not in contents]


def _item(line: str, where: str, number: int) -> Item:
    expected = 'a JSON object with "prompt": "...", "turns": ["...", ...] or "messages": [...]'
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptsError(f"{where} is not JSON; expected {expected}") from None
    if not isinstance(record, dict):
        raise PromptsError(f"{where} is a {type(record).__name__}; expected {expected}")
    prompt = _prompt(record)
    if isinstance(prompt, str) and prompt.startswith(_PLACEHOLDER):
        raise PromptsError(f"{where} is a placeholder; fill in SPEED-Bench's prompts with its prepare_data.py first")
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptsError(f"{where} has no text in prompt, turns or messages; expected {expected}")
    name = record.get("id", record.get("question_id", number))
    schema = record.get("json_schema")
    options = {} if schema is None else {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    return Item(str(name), str(record.get("task", record.get("category", "all"))), prompt, options)


def _prompt(record: Mapping[str, Any]) -> Any:
    """The first thing that the user says."""
    if "prompt" in record:
        return record["prompt"]
    for name in ("turns", "messages"):
        said = record.get(name)
        for turn in said if isinstance(said, list) else ():
            if not isinstance(turn, Mapping):
                return turn
            if turn.get("role", "user") == "user":
                return turn.get("content")
    return None


def _spread(items: Sequence[Item]) -> list[Item]:
    """Reorder: the first item of every task, then the second of every task, and so on."""
    counts: dict[str, int] = {}
    ranks = []
    for item in items:
        counts[item.task] = counts.get(item.task, -1) + 1
        ranks.append(counts[item.task])
    return [item for _, item in sorted(zip(ranks, items, strict=True), key=lambda pair: pair[0])]


def lengthened(lm: TextModel, items: Sequence[Item], tokens: int) -> list[Item]:
    """Put `tokens` tokens of a long text before each prompt: the source of argparse, which every Python includes."""
    ids = lm.tokens.encode(inspect.getsource(argparse), special=False)
    max_tokens = min(len(ids), lm.context)
    if not 1 <= tokens <= max_tokens:
        raise InvalidOption(f"the context is {tokens} tokens; it must be from 1 to {max_tokens:,} for {lm.name}")
    filler = lm.tokens.decode(ids[:tokens])
    return [replace(item, content=f"{filler}\n\n{item.content}") for item in items]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The decoding options of all contenders."""

    drafters: tuple[str, ...] = DRAFTERS
    rules: tuple[str, ...] = (EXACT.name,)
    drafter_options: Mapping[str, Any] = field(default_factory=dict)  # NAME or DRAFTER.NAME; a list: a row each
    rule_options: Mapping[str, Any] = field(default_factory=dict)  # likewise
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    repeat: int = 1
    draft_model: str | None = None  # for drafters that take a smaller model
    head: str | None = None  # for drafters that take a draft head
    formats: bool = False  # whether outputs obey the JSON schemas of their prompts

    def format_of(self, item: Item) -> Mapping[str, Any]:
        return item.options if self.formats else {}


def contenders(lm: TextModel, settings: Settings) -> list[Contender]:
    """Return the contenders: plain decoding, then each drafter under each rule."""
    if not settings.drafters:
        raise InvalidOption(f"there are no drafters to measure; choose from {', '.join(lm.drafters)}")
    for name in settings.drafters:
        if name not in lm.drafters and name != PLAIN:
            raise unknown("drafter", name, lm.drafters)
    for name in settings.rules:
        if name not in lm.rules:
            raise unknown("rule", name, lm.rules)
    if settings.head is not None and not any(
        name in METHODS and Input.DRAFT_HEAD in METHODS[name].inputs.values() for name in settings.drafters
    ):
        raise InvalidOption(
            f"head is {settings.head}, and none of the drafters {', '.join(settings.drafters)} takes a draft head; add "
            "the drafter it was trained for, such as eagle3"
        )
    gauge = PeakMemory(lm.target().device)

    def contender(setting: Setting) -> Contender:
        name, rule = setting.drafter or PLAIN, setting.rule
        inputs = METHODS[name].inputs if name in METHODS else {}
        model_options = [option for option, kind in inputs.items() if kind in (Input.DRAFT_MODEL, Input.FOREIGN_MODEL)]
        has_fixed_model = (
            Input.ACCEPTANCE_HEAD in inputs.values()
        )  # its acceptance head was trained for one draft model
        options = (
            dict.fromkeys(model_options, settings.draft_model) if settings.draft_model and not has_fixed_model else {}
        )
        if settings.head is not None and Input.DRAFT_HEAD in inputs.values():
            options |= METHODS[name].with_head({}, settings.head)
        options |= setting.drafter_options

        def call(item: Item) -> tuple[Any, Any]:
            out = lm.generate(
                item.content,
                drafter=setting.drafter,
                rule=rule,
                rule_options=setting.rule_options,
                temperature=settings.temperature,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                drafter_options=options,
                **settings.format_of(item),
            )
            return out.tokens, out.trace.steps

        def run(item: Item) -> Outcome:
            return Outcome(*timed(lambda: call(item), gauge))

        lossless = bool(RULES[rule].lossless)
        return Contender(setting.name, run, drafter=name, rule=rule, options=setting.options, lossless=lossless)

    drafters = [name for name in dict.fromkeys(settings.drafters) if name != PLAIN]
    given = settings.drafter_options, settings.rule_options
    plain = next((name for name in settings.rules if RULES[name].same_tokens), EXACT.name)  # so that outputs compare
    return [
        replace(contender(Setting(rule=plain)), name=PLAIN),
        *map(contender, combine(drafters, settings.rules, *given)),
    ]


def costs(lm: TextModel, items: Sequence[Item]) -> PassCost:
    """Measure the cost of passes after a prompt of median length."""
    prompts = sorted((lm.encode(item.content) for item in items), key=len)
    return pass_cost(lm.target(), prompts[len(prompts) // 2])


def report(
    bench: Bench,
    lm: TextModel,
    settings: Settings,
    *,
    cost: PassCost | None,
    about: Mapping[str, Any] | None = None,
    skipped: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Return all measurements so far as JSON data."""
    judge = Judge(lm, settings)
    looping = bench.looping(loops)
    rows = []
    for contender in bench.contenders:
        if bench.of(contender.name):
            same = judge.same(bench, contender)
            measured = row(bench, contender, same=same, looping=looping, cost=cost, quality=judge.quality)
            rows.append(measured)
    plain_runs = bench.first(PLAIN)
    lengths = [len(run.outcome.tokens) for run in plain_runs.values()]
    facts = {"model": lm.name, "dtype": lm.dtype, "device": str(lm.target().device), **asdict(settings)}
    facts |= {
        "drafters": list(settings.drafters),
        "rules": list(settings.rules),
        "prompts": len(plain_runs),
        "prompts_wanted": len(bench.items),
    }
    facts |= {"tokens_median": median(lengths) if lengths else 0, "near_gap": judge.near}
    facts |= {"pass_cost": asdict(cost) if cost else None, "looping": sorted(looping), **(about or {})}
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": facts,
        "rows": [result for result in rows if result["engine"] == bench.contenders[0].engine],
        "peers": [result for result in rows if result["engine"] != bench.contenders[0].engine],
        "skipped": {**(skipped or {}), **bench.failed},
    }


def write(data: Mapping[str, Any], path: Path) -> None:
    """Write JSON atomically."""
    try:
        write_atomically(path, json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n")
    except OSError as error:
        raise InvalidOption(f"{path} can't be written: {error.strerror}") from None


def tasks(report: Mapping[str, Any]) -> Iterator[str]:
    """Yield the tasks of a report in alphabetical order."""
    yield from sorted({task for row in report["rows"] for task in row["tasks"]})
