"""The lab: several methods on a few prompts, measured in turns, beside what theory predicts.

Measuring is outrider.core.bench.runner's, predicting outrider.core.cost.theory's; this puts them on the page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gradio as gr

from outrider.app.page import validate
from outrider.app.page.backends.interface import Asked, Backend, checked, together
from outrider.app.page.controls import UNMARKED, Update, quiet, visitor
from outrider.app.page.run_queue import LANE, RunQueue, stepped
from outrider.app.page.runner import fault, remark, running, waiting
from outrider.app.viz.charts import against, compared
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Outcome, Run, Same, pooled, row
from outrider.core.bench.timing import pass_cost
from outrider.core.cost.theory import PassCost, best_length, break_even
from outrider.core.errors import InvalidOption
from outrider.core.methods import DRAFTERS, RULES
from outrider.core.methods.rules import EXACT
from outrider.core.protocol import Capability

_TOKENS = 64
_PROMPTS = {
    "text": "Why is the sky blue?\nList the numbers from one to ten in words.",
    "image": "red heart\npizza",
    "speech": "Good morning.",
}


@dataclass
class Measured:
    """One measurement under way: a bench, and who wants it to go on."""

    subject: Backend
    bench: Bench
    cost: PassCost | None

    def rows(self) -> list[dict[str, Any]]:
        plain = self.bench.first(PLAIN)
        found = []
        for one in self.bench.contenders:
            if not self.bench.of(one.name):
                continue
            mine = self.bench.first(one.name)
            same: dict[str, Same] = {
                name: "same" if name in plain and run.outcome.tokens == plain[name].outcome.tokens else "other"
                for name, run in mine.items()
            }
            found.append(row(self.bench, one, same=same, cost=self.cost))
        return found


def contenders(
    subject: Backend, names: Sequence[str], given: Mapping[str, Any], going: Callable[[], bool]
) -> list[Contender]:
    """Plain decoding first, then each method under the rule."""
    found = []
    for name in [PLAIN, *(one for one in names if one != PLAIN)]:
        rule = str(given["rule"])
        if name != PLAIN and not together(name, rule):
            raise InvalidOption(f"the rule '{rule}' can't judge what '{name}' drafts; leave one of them out")
        asked = replace(checked(subject, {**given, "prompt": "x", "drafter": name}), judged=not RULES[rule].lossless)

        def run(item: Item, asked: Asked = asked) -> Outcome:
            return _outcome(subject, asked, str(item.content), going)

        found.append(Contender(name, run, rule=rule, lossless=bool(RULES[rule].lossless), optional=name != PLAIN))
    return found


class Stopped(Exception):
    """The visitor has had enough."""


def _outcome(subject: Backend, asked: Asked, prompt: str, going: Callable[[], bool]) -> Outcome:
    begun = time.perf_counter()
    live = subject.begin(replace(asked, prompt=prompt))
    try:
        for _ in live:
            if not going():
                raise Stopped
        seconds = time.perf_counter() - begun
        trace = live.recording().trace
    finally:
        live.close()
    rows = sorted({step.row for step in trace.steps})
    return Outcome(tuple(token for one in rows for token in trace.tokens(one)), seconds, trace.steps, trace.memory)


def passes(subject: Backend, prompt: str) -> PassCost | None:
    """What passes of the target cost here; of text alone, whose target stands by itself."""
    if subject.name != "text":
        return None
    lm = subject.load()
    return pass_cost(lm.target(), lm.encode(prompt), rounds=3)


def told(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run], cost: PassCost | None) -> Drawing:
    """Table and plots of what was measured so far."""
    heads = (
        "method",
        "tokens a second",
        "speedup",
        "tokens per call",
        "accepted",
        "same output",
        "price a token",
        "nats a token",
        "predicted",
        "best length",
        "breaks even at",
    )
    body = []
    for one in rows:
        mine = [run for run in runs if run.contender == one["drafter"]]
        body.append([str(one["drafter"]), *_cells(one, mine, cost)])
    table = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in line) + "</tr>" for line in body)
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    plots = [
        (
            "Tokens a second",
            compared(rows, "tokens_per_second", "tokens a second", "", rows[0]["tokens_per_second"]),
        ),
        ("Tokens per call", compared(rows, "tokens_per_pass", "tokens per call", "", 1.0)),
    ]
    points = [
        (str(one["drafter"]), float(one["predicted_tokens_per_second"]), float(one["decode_tokens_per_second"]))
        for one in rows
        if one.get("predicted_tokens_per_second")
    ]
    if points:
        plots.append(("Predicted and measured", against(points)))
    cards = [f'<div class="or-card"><h4>{safe(title)}</h4>{one}</div>' for title, one in plots]
    notes = "".join(
        f"<li>{safe(str(one['drafter']))}: {safe(str(one['note'])[:300])}</li>" for one in rows if one.get("note")
    )
    return Drawing(
        f'<div class="or-wide"><table class="or-table"><thead><tr>{head}</tr></thead><tbody>{table}</tbody>'
        f'</table></div><ul style="margin:8px 0 12px 18px;opacity:.8">{notes}</ul>{side_by_side(cards, 330)}'
    )


def _cells(one: Mapping[str, Any], runs: Sequence[Run], cost: PassCost | None) -> list[str]:
    """One method's figures in words."""
    total = pooled(runs)
    length, point = "", ""
    if cost is not None and total.drafted and total.target_passes:
        each = total.times.draft / total.drafted / cost(1)
        best, gain = best_length(total.conditional, each, cost)
        length = f"{best} ({gain:.2f} x)"
        depth = max(round(total.drafted / total.target_passes), 1)
        bound = break_even(depth, each, cost.relative(depth + 1))
        point = "never" if bound > 1 else f"{bound:.0%}"
    speed, ahead = one["tokens_per_second"], one.get("predicted_tokens_per_second")
    return [
        f"{speed:.1f}",
        "" if one["speedup"] is None else f"{one['speedup']:.2f} x",
        "" if one["tokens_per_pass"] is None else f"{one['tokens_per_pass']:.2f}",
        f"{one['acceptance_rate']:.0%}" if total.drafted else "-",
        "" if one["identical"] is None else f"{one['identical']:.0%}",
        f"{total.total_variation / max(total.tokens, 1):.4f}" if not one["lossless"] else "0",
        surprise(runs),
        "" if not ahead else f"{ahead:.1f}",
        length,
        point,
    ]


def surprise(runs: Sequence[Run]) -> str:
    """How unlikely what came is to the target itself, where that was asked: quality that needs no judge."""
    found = [one for run in runs for step in run.outcome.steps for one in step.logprobs]
    return f"{-sum(found) / len(found):.3f}" if found else ""


class CompareTab:
    """The tab."""

    def __init__(self, subjects: Mapping[str, Backend], tickets: RunQueue) -> None:
        self.subjects, self.tickets = subjects, tickets

    def build(self) -> None:
        first = self.subjects["text"]
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.modality = gr.Radio(list(self.subjects), value="text", label="Modality")
                self.prompts = gr.Textbox(
                    _PROMPTS["text"],
                    label=f"Prompts, one a line, up to {validate.PROMPTS}",
                    lines=4,
                    max_lines=8,
                    max_length=validate.PROMPT,
                    elem_id="lab-prompts",
                )
                self.methods = gr.CheckboxGroup(
                    first.drafters(),
                    value=_usual(first),
                    elem_id="lab-methods",
                    label=f"Methods, up to {validate.METHODS}; plain decoding is always among them",
                )
                self.rule = gr.Dropdown(first.rules(), value=EXACT.name, label="Rule")
                self.heat = gr.Slider(0, validate.HEAT, 0, step=0.05, label="temperature")
                self.seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=validate.SEED)
                with gr.Row():
                    self.run = gr.Button("Measure", variant="primary", elem_id="lab-run")
                    self.stop = gr.Button("Stop", variant="stop", elem_id="lab-stop")
            with gr.Column(scale=7, min_width=320):
                self.status = gr.HTML("", elem_id="lab-status", min_height=44)
                self.out = gr.HTML(
                    remark("Methods take turns on every prompt; speedups are paired with plain decoding."),
                    elem_id="lab-out",
                    min_height=320,
                )
        self.ticket = gr.State(0)
        self.modality.input(
            self._turned, [self.modality], [self.prompts, self.methods, self.rule, self.heat], **quiet()
        )
        self.run.click(self._begin, None, [self.ticket, self.status], **quiet()).then(
            self._run,
            [self.ticket, self.modality, self.prompts, self.methods, self.rule, self.heat, self.seed],
            [self.status, self.out],
            concurrency_limit=1,
            concurrency_id=LANE,
            api_visibility="private",
            **UNMARKED,
        )
        self.stop.click(self._stop, None, [self.status], **quiet())

    def _turned(self, modality: str) -> list[Update]:
        one = self.subjects[validate.one_of(modality, "modality", self.subjects)]
        return [
            _PROMPTS[modality],
            gr.update(choices=one.drafters(), value=_usual(one)),
            gr.update(choices=one.rules(), value=EXACT.name),
            one.heat,
        ]

    def _begin(self, request: gr.Request) -> list[Update]:
        return [self.tickets.take(visitor(request)), waiting("Waiting for the model's lane …")]

    def _stop(self, request: gr.Request) -> Update:
        return waiting("Stopping …") if self.tickets.give_back(visitor(request)) else gr.skip()

    def _run(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from stepped(self._measure(ticket, request, *values))

    def _measure(
        self,
        ticket: int,
        request: gr.Request,
        modality: str,
        prompts: str,
        methods: list[str],
        rule: str,
        heat: float,
        seed: float,
    ) -> Generator[list[Update]]:
        going = partial(self.tickets.valid, visitor(request), ticket)
        try:
            subject = self.subjects[validate.one_of(modality, "modality", self.subjects)]
            lines = [one.strip() for one in validate.words(prompts, "prompts").splitlines() if one.strip()]
            if len(lines) > validate.PROMPTS:
                raise InvalidOption(f"there are {len(lines)} prompts; at most {validate.PROMPTS} are measured at once")
            if not subject.loaded:
                yield [waiting(f"Loading {subject.about} …"), gr.skip()]
                subject.load()
            names = validate.some_of(methods, "methods", subject.drafters(), validate.METHODS)
            given: dict[str, Any] = {"rule": rule, "temperature": heat, "seed": seed}
            if subject.name == "text":
                given["max_new_tokens"] = _TOKENS
            made = contenders(subject, names, given, going)
            yield [waiting("Measuring what passes cost …"), gr.skip()]
            bench = Bench(made, [Item(str(place), "all", line) for place, line in enumerate(lines)])
            work = Measured(subject, bench, passes(subject, lines[0]))
            yield from self._follow(work)
        except Stopped:
            yield [running("Stopped."), gr.skip()]
        except Exception as error:
            yield [fault(error), gr.skip()]
        finally:
            if going():
                self.tickets.give_back(visitor(request))

    def _follow(self, work: Measured) -> Iterator[list[Update]]:
        bench = work.bench
        for done, name in enumerate(bench.go(), 1):
            said = running(f"{done} of {bench.turns} turns, last {name}" + (" (warming up)" if not bench.runs else ""))
            whole = bench.runs and done % len(bench.contenders) == 0
            yield [said, told(work.rows(), bench.runs, work.cost) if whole else gr.skip()]
        failed = "; ".join(f"{name}: {why}" for name, why in bench.failed.items())
        yield [
            running("Done." + (f" Left out: {failed}"[:400] if failed else "")),
            told(work.rows(), bench.runs, work.cost),
        ]


def _usual(subject: Backend) -> list[str]:
    """Drafters that cost little and run anywhere."""
    known = [name for name in subject.drafters() if name in DRAFTERS]
    return [name for name in known if Capability.CATCHES_UP in DRAFTERS[name].capabilities][:3]
