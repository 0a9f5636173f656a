"""What benchmarking text adds to outrider.core.bench.runner: prompts, who takes part, how outputs are compared, what
loops.

In 16 bits a draft scored in one pass and tokens scored one by one round differently, so outputs may part where two
tokens are about equally likely. Such an output is right if each of its tokens, teacher-forced, is the likeliest or
nearly so; anything else is wrong, and said.
"""

from __future__ import annotations

import argparse
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import resources
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch

from outrider.core.bench.runner import PLAIN, SCHEMA, Bench, Contender, Item, Outcome, Run, Same, row
from outrider.core.bench.timing import PeakMemory, pass_cost, timed
from outrider.core.cost.theory import PassCost
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.errors import InvalidOption, OutriderError, unknown
from outrider.core.methods import AUTO, RULES, Input
from outrider.core.methods import DRAFTERS as METHODS
from outrider.core.methods.lookup import PROMPT_LOOKUP
from outrider.core.methods.rules import EXACT
from outrider.core.protocol import Target
from outrider.core.trace import machine, versions
from outrider.core.tree import Tree
from outrider.text.model import TextModel

DRAFTERS = (AUTO.name, PROMPT_LOOKUP.name)
NEAR = {
    "float64": 1e-9,
    "float32": 1e-3,
}  # how far below the likeliest a token's logit may be; 16 bits and fewer: _NEAR
_NEAR = 0.5
_GRAM, _DISTINCT = 4, 0.7  # an output with a smaller share of different 4-grams goes round in circles
_LOGITS = 1 << 23  # at once, while teacher-forcing
_LARGEST = 50_000_000  # bytes of prompts


class PromptsError(OutriderError):
    """A file of prompts that can't be read."""


def load_prompts(path: Path | None = None, limit: int | None = None, tasks: Sequence[str] = ()) -> list[Item]:
    """Our own prompts, or those of a file of JSON lines with "prompt" or "turns" (of which the first is taken), and
    perhaps "id" or "question_id", "task" or "category"; of some tasks alone, if named. A limit takes from each task in
    turn: a few stand for all."""
    if path is None:
        text, source = resources.files("outrider.text").joinpath("prompts.jsonl").read_text("utf-8"), "prompts.jsonl"
    else:
        source = str(path)
        if path.is_file() and path.stat().st_size > _LARGEST:
            raise PromptsError(f"{source} is larger than the {_LARGEST:,} bytes that are read")
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
            raise PromptsError(f"{source} can't be read: {why}") from None
    items = [_item(line, f"{source}, line {n}", n) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not items:
        raise PromptsError(f"{source} holds no prompts; it should have JSON lines with a prompt or turns each")
    if len({item.id for item in items}) < len(items):
        items = [Item(f"{n}-{item.id}", item.task, item.content) for n, item in enumerate(items, 1)]
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


def _item(line: str, where: str, number: int) -> Item:
    wanted = 'a JSON object with "prompt": "..." or "turns": ["...", ...]'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        raise PromptsError(f"{where} is not JSON; expected {wanted}") from None
    if not isinstance(found, dict):
        raise PromptsError(f"{where} is a {type(found).__name__}; expected {wanted}")
    turns = found.get("turns")
    prompt = found.get("prompt") if "prompt" in found else turns[0] if isinstance(turns, list) and turns else None
    if not isinstance(prompt, str) or not prompt.strip():
        raise PromptsError(f"{where} has no text in prompt or turns; expected {wanted}")
    name = found.get("id", found.get("question_id", number))
    return Item(str(name), str(found.get("task", found.get("category", "all"))), prompt)


def _spread(items: Sequence[Item]) -> list[Item]:
    """The first of every task, then the second of every task, and so on."""
    seen: dict[str, int] = {}
    places = []
    for item in items:
        seen[item.task] = seen.get(item.task, -1) + 1
        places.append(seen[item.task])
    return [item for _, item in sorted(zip(places, items, strict=True), key=lambda pair: pair[0])]


def lengthened(lm: TextModel, items: Sequence[Item], tokens: int) -> list[Item]:
    """Each prompt behind so many tokens of a long text, which every Python brings along: the source of argparse."""
    ids = lm.tokens.encode(inspect.getsource(argparse), special=False)
    most = min(len(ids), lm.context)
    if not 1 <= tokens <= most:
        raise InvalidOption(f"the context is {tokens} tokens; it must be from 1 to {most:,} for {lm.name}")
    before = lm.tokens.decode(ids[:tokens])
    return [Item(item.id, item.task, f"{before}\n\n{item.content}") for item in items]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How everything is decoded."""

    drafters: tuple[str, ...] = DRAFTERS
    rule: str = EXACT.name
    temperature: float = 0.0
    max_new_tokens: int = 128
    seed: int = 0
    repeat: int = 1
    draft_model: str | None = None  # for drafters that take any smaller model
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of drafters, by their names


def contenders(lm: TextModel, settings: Settings) -> list[Contender]:
    """Plain decoding first, then each drafter."""
    if not settings.drafters:
        raise InvalidOption(f"there are no drafters to measure; give some of {', '.join(lm.drafters)}")
    for name in settings.drafters:
        if name not in lm.drafters and name != PLAIN:
            raise unknown("drafter", name, lm.drafters)
    for name in settings.options:
        if name not in settings.drafters:
            raise unknown("drafter with options", name, settings.drafters)
    if settings.rule not in lm.rules:
        raise unknown("rule", settings.rule, lm.rules)
    gauge = PeakMemory(lm.target().device)

    def one(name: str) -> Contender:
        drafter = None if name == PLAIN else name
        inputs = METHODS[name].inputs if name in METHODS else {}
        smaller = [option for option, kind in inputs.items() if kind in (Input.DRAFT_MODEL, Input.FOREIGN_MODEL)]
        fixed = Input.ACCEPTANCE_HEAD in inputs.values()  # its head was trained with one draft model
        options = dict.fromkeys(smaller, settings.draft_model) if settings.draft_model and not fixed else {}
        options |= settings.options.get(name, {})

        def call(item: Item) -> tuple[Any, Any]:
            out = lm.generate(
                item.content,
                drafter=drafter,
                rule=settings.rule,
                temperature=settings.temperature,
                max_new_tokens=settings.max_new_tokens,
                seed=settings.seed,
                drafter_options=options,
            )
            return out.tokens, out.trace.steps

        def run(item: Item) -> Outcome:
            return Outcome(*timed(lambda: call(item), gauge))

        return Contender(name, run, rule=settings.rule, lossless=bool(RULES[settings.rule].lossless))

    return [one(name) for name in dict.fromkeys((PLAIN, *settings.drafters))]


def distinct(tokens: Sequence[int]) -> float:
    """The share of different ones among an output's 4-grams; 1 where there are none."""
    grams = list(zip(*(tokens[start:] for start in range(_GRAM)), strict=False))
    return len(set(grams)) / len(grams) if grams else 1.0


def loops(tokens: Sequence[int]) -> bool:
    return distinct(tokens) < _DISTINCT


@torch.no_grad()
def gaps(target: Target, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """How far each token's logit is below the likeliest one's, all tokens scored in one pass behind the prompt."""
    if not tokens:
        return []
    size = len(tokens) - 1
    guess = torch.tensor([tokens[:-1]], dtype=torch.long, device=target.device)
    target.begin([prompt], Sampling(temperature=0), frozenset())
    try:
        draft = Draft.guess(guess, Tree.chain(size, target.device), torch.ones_like(guess, dtype=torch.bool))
        scores = target.score(draft)
        found: list[float] = []
        few = max(_LOGITS // target.vocabulary, 1)
        for start in range(0, size + 1, few):
            rows = torch.arange(start, min(start + few, size + 1), device=target.device)[None]
            logits = scores.logits(rows)[0].double()
            said = torch.tensor(tokens[start : start + few], device=target.device)
            found += (logits.amax(-1) - logits.gather(-1, said[:, None])[:, 0]).tolist()
        return found
    finally:
        target.end()


def compare(
    plain: Sequence[int], tokens: Sequence[int], *, worst: Callable[[Sequence[int]], float], near: float, end: set[int]
) -> Same:
    """A greedy lossless output beside plain's. An output that breaks off, or goes on behind its end, is no near-tie."""
    if list(plain) == list(tokens):
        return "same"
    short = min(len(plain), len(tokens))
    if list(plain[:short]) == list(tokens[:short]) or end & set(tokens[:-1]):
        return "wrong"
    return "near" if worst(tokens) <= near else "wrong"


class Judge:
    """Looks at outputs when all are there, by the target that made them."""

    def __init__(self, lm: TextModel, settings: Settings) -> None:
        self.lm, self.settings = lm, settings
        self.near = NEAR.get(lm.dtype, _NEAR)
        self._worst: dict[tuple[str, tuple[int, ...]], float] = {}
        self._target: Target | None = None

    def worst(self, item: Item, tokens: Sequence[int]) -> float:
        """The largest gap of an output, remembered."""
        key = item.id, tuple(tokens)
        if key not in self._worst:
            self._target = self._target or self.lm.target()
            self._worst[key] = max(gaps(self._target, self.lm.encode(item.content), tokens), default=0.0)
        return self._worst[key]

    def same(self, bench: Bench, one: Contender) -> dict[str, Same] | None:
        """How a contender's outputs compare with plain's, by item; None where they needn't be alike."""
        greedy = self.settings.temperature == 0
        if not greedy and not RULES[self.settings.rule].same_tokens:
            return None
        plain, end = bench.first(PLAIN), set(self.lm.end)
        found: dict[str, Same] = {}
        for name, run in bench.first(one.name).items():
            if name not in plain:
                continue
            base, tokens = plain[name].outcome.tokens, run.outcome.tokens
            if greedy and one.lossless and one.engine == bench.contenders[0].engine:
                worst = partial(self.worst, run.item)
                found[name] = compare(base, tokens, worst=worst, near=self.near, end=end)
            else:
                found[name] = "same" if base == tokens else "other"
        return found

    def quality(self, runs: Sequence[Run]) -> dict[str, Any]:
        """What a row's outputs are like; `worst_gap` is None where tokens are drawn, not chosen."""
        outputs = {run.item.id: run for run in reversed(runs)}.values()
        if not outputs:
            return {}
        found: dict[str, Any] = {
            "distinct_4": mean(distinct(run.outcome.tokens) for run in outputs),
            "looping": mean(loops(run.outcome.tokens) for run in outputs),
        }
        if self.settings.temperature == 0 and all(run.outcome.steps for run in runs):
            found["worst_gap"] = max(self.worst(run.item, run.outcome.tokens) for run in outputs)
        return found


def costs(lm: TextModel, items: Sequence[Item]) -> PassCost:
    """What passes cost behind a prompt of the usual length."""
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
    """All that was measured, as the JSON that is written; of whatever is done so far."""
    judge = Judge(lm, settings)
    looping = bench.looping(loops)
    rows = []
    for one in bench.contenders:
        if bench.of(one.name):
            same = judge.same(bench, one)
            found = row(bench, one, same=same, looping=looping, cost=cost, quality=judge.quality)
            rows.append(found)
    done = bench.first(PLAIN)
    lengths = [len(run.outcome.tokens) for run in done.values()]
    facts = {"model": lm.name, "dtype": lm.dtype, "device": str(lm.target().device), **asdict(settings)}
    facts |= {"drafters": list(settings.drafters), "prompts": len(done), "prompts_wanted": len(bench.items)}
    facts |= {"tokens_median": median(lengths) if lengths else 0, "near_gap": judge.near}
    facts |= {"pass_cost": asdict(cost) if cost else None, "looping": sorted(looping), **(about or {})}
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": facts,
        "rows": [one for one in rows if one["engine"] == bench.contenders[0].engine],
        "peers": [one for one in rows if one["engine"] != bench.contenders[0].engine],
        "skipped": {**(skipped or {}), **bench.failed},
    }


def write(found: Mapping[str, Any], path: Path) -> None:
    """As JSON, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(json.dumps(found, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise InvalidOption(f"{path} can't be written: {error.strerror}") from None


def tasks(found: Mapping[str, Any]) -> Iterator[str]:
    """The tasks of a report, in order."""
    yield from sorted({task for one in found["rows"] for task in one["tasks"]})
