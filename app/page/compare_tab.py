"""The Compare tab: several methods on a few prompts, measured in turns, beside the speed that theory predicts.

Uses outrider.core.bench.runner to measure and outrider.core.cost.theory to predict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gradio as gr

from outrider.app.page import validate
from outrider.app.page.backends.interface import Backend, RunSettings, checked, compatible
from outrider.app.page.controls import NO_PROGRESS, Update, redraw, visitor
from outrider.app.page.run_queue import MODEL, REFUSED, RunQueue, steps_on_model_thread
from outrider.app.page.runner import enter, error_box, hint, running, waiting
from outrider.app.viz.charts import benchmark_bars, predicted_and_measured
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
class Comparison:
    """A benchmark in progress, and the cost of target passes if it is known."""

    bench: Bench
    cost: PassCost | None

    def rows(self) -> list[dict[str, Any]]:
        """A row for each contender that has results."""
        plain = self.bench.first(PLAIN)
        rows = []
        for contender in self.bench.contenders:
            if not self.bench.of(contender.name):
                continue
            same: dict[str, Same] = {
                name: "same" if name in plain and run.outcome.tokens == plain[name].outcome.tokens else "other"
                for name, run in self.bench.first(contender.name).items()
            }
            rows.append(row(self.bench, contender, same=same, cost=self.cost))
        return rows


def contenders(
    backend: Backend, names: Sequence[str], given: Mapping[str, Any], active: Callable[[], bool]
) -> list[Contender]:
    """Plain decoding first, then each drafter with the rule."""
    result = []
    for name in [PLAIN, *(name for name in names if name != PLAIN)]:
        rule = str(given["rule"])
        if name != PLAIN and not compatible(name, rule):
            raise InvalidOption(f"the rule '{rule}' cannot verify the drafts of '{name}'; deselect one of them")
        settings = replace(
            checked(backend, {**given, "prompt": "x", "drafter": name}), logprobs=not RULES[rule].lossless
        )

        def run(item: Item, settings: RunSettings = settings) -> Outcome:
            return _outcome(backend, settings, str(item.content), active)

        result.append(Contender(name, run, rule=rule, lossless=bool(RULES[rule].lossless), optional=name != PLAIN))
    return result


class Stopped(Exception):
    """The visitor pressed Stop or left the page."""


def _outcome(backend: Backend, settings: RunSettings, prompt: str, active: Callable[[], bool]) -> Outcome:
    begun = time.perf_counter()
    live = backend.begin(replace(settings, prompt=prompt))
    try:
        for _ in live:
            if not active():
                raise Stopped
        seconds = time.perf_counter() - begun
        trace = live.recording().trace
    finally:
        live.close()
    rows = sorted({step.row for step in trace.steps})
    return Outcome(tuple(token for row in rows for token in trace.tokens(row)), seconds, trace.steps, trace.memory)


def target_cost(backend: Backend, prompt: str) -> PassCost | None:
    """The measured cost of target passes; None except for text, whose target can be run by itself."""
    if backend.name != "text":
        return None
    lm = backend.load()
    return pass_cost(lm.target(), lm.encode(prompt), rounds=3)


TITLES = (
    "method",
    "tokens / s",
    "speedup",
    "tokens / pass",
    "accepted",
    "same output",
    "total variation / token",
    "NLL / token",
    "predicted tokens / s",
    "best draft length",
    "break-even acceptance",
)


def drawn(rows: Sequence[Mapping[str, Any]], runs: Sequence[Run], cost: PassCost | None) -> Drawing:
    """The table and the plots of the results so far."""
    body = [
        [str(row["drafter"]), *_cells(row, [run for run in runs if run.contender == row["drafter"]], cost)]
        for row in rows
    ]
    table = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in line) + "</tr>" for line in body)
    head = "".join(f'<th scope="col">{title}</th>' for title in TITLES)
    plain_speed = rows[0]["tokens_per_second"]
    plots = [
        ("Tokens per second", benchmark_bars(rows, "tokens_per_second", "tokens per second", base=plain_speed)),
        ("Tokens per target pass", benchmark_bars(rows, "tokens_per_pass", "tokens per target pass", base=1.0)),
    ]
    points = [
        (str(row["drafter"]), float(row["predicted_tokens_per_second"]), float(row["decode_tokens_per_second"]))
        for row in rows
        if row.get("predicted_tokens_per_second")
    ]
    if points:
        plots.append(("Predicted and measured speed", predicted_and_measured(points)))
    cards = [f'<div class="or-card"><h4>{safe(title)}</h4>{plot}</div>' for title, plot in plots]
    notes = "".join(
        f"<li>{safe(str(row['drafter']))}: {safe(str(row['note'])[:300])}</li>" for row in rows if row.get("note")
    )
    return Drawing(
        f'<div class="or-wide"><table class="or-table"><thead><tr>{head}</tr></thead><tbody>{table}</tbody>'
        f'</table></div><ul style="margin:8px 0 12px 18px;opacity:.8">{notes}</ul>{side_by_side(cards, 330)}'
    )


def _cells(row: Mapping[str, Any], runs: Sequence[Run], cost: PassCost | None) -> list[str]:
    """The cells of one method, without its name."""
    total = pooled(runs)
    length, break_even_rate = "", ""
    if cost is not None and total.drafted and total.target_passes:
        per_token = total.times.draft / total.drafted / cost(1)
        best, gain = best_length(total.conditional, per_token, cost)
        length = f"{best} ({gain:.2f} x)"
        depth = max(round(total.drafted / total.target_passes), 1)
        rate = break_even(depth, per_token, cost.relative(depth + 1))
        break_even_rate = "never" if rate > 1 else f"{rate:.0%}"
    predicted = row.get("predicted_tokens_per_second")
    return [
        f"{row['tokens_per_second']:.1f}",
        "" if row["speedup"] is None else f"{row['speedup']:.2f} x",
        "" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}",
        f"{row['acceptance_rate']:.0%}" if total.drafted else "-",
        "" if row["identical"] is None else f"{row['identical']:.0%}",
        f"{total.total_variation / max(total.tokens, 1):.4f}" if not row["lossless"] else "0",
        negative_log_likelihood(runs),
        f"{predicted:.1f}" if predicted else "",
        length,
        break_even_rate,
    ]


def negative_log_likelihood(runs: Sequence[Run]) -> str:
    """The target's mean negative log-likelihood of the output tokens, in nats; empty if the steps do not record it."""
    logprobs = [logprob for run in runs for step in run.outcome.steps for logprob in step.logprobs]
    return f"{-sum(logprobs) / len(logprobs):.3f}" if logprobs else ""


class CompareTab:
    """The components and the events of the tab."""

    def __init__(self, backends: Mapping[str, Backend], queue: RunQueue) -> None:
        self.backends, self.queue = backends, queue

    def build(self) -> None:
        first = self.backends["text"]
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.modality = gr.Radio(list(self.backends), value="text", label="Modality")
                self.prompts = gr.Textbox(
                    _PROMPTS["text"],
                    label=f"Prompts, one per line, up to {validate.PROMPTS}",
                    lines=4,
                    max_lines=8,
                    max_length=validate.PROMPT,
                    elem_id="compare-prompts",
                )
                self.methods = gr.CheckboxGroup(
                    first.drafters(),
                    value=_default_methods(first),
                    elem_id="compare-methods",
                    label=f"Drafters, up to {validate.METHODS}; plain decoding is always included",
                )
                self.rule = gr.Dropdown(first.rules(), value=EXACT.name, label="Acceptance rule")
                self.temperature = gr.Slider(0, validate.TEMPERATURE, 0, step=0.05, label="Temperature (0 is greedy)")
                self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=validate.SEED)
                with gr.Row():
                    self.run = gr.Button("Measure", variant="primary", elem_id="compare-run")
                    self.stop = gr.Button("Stop", variant="stop", elem_id="compare-stop")
            with gr.Column(scale=7, min_width=320):
                self.status = gr.HTML("", elem_id="compare-status", min_height=44)
                self.output = gr.HTML(
                    hint(
                        "Press Measure. The drafters take turns on every prompt, and each speedup compares runs of the "
                        "same prompt."
                    ),
                    elem_id="compare-out",
                    min_height=320,
                )
        self.ticket = gr.State(0)
        self.modality.input(
            self._change_modality,
            [self.modality],
            [self.prompts, self.methods, self.rule, self.temperature],
            **redraw(),
        )
        self.run.click(self._begin, None, [self.ticket, self.status], **redraw()).then(
            self._run,
            [self.ticket, self.modality, self.prompts, self.methods, self.rule, self.temperature, self.seed],
            [self.status, self.output],
            concurrency_limit=1,
            concurrency_id=MODEL,
            api_visibility="private",
            **NO_PROGRESS,
        )
        self.stop.click(self._stop, None, [self.status], **redraw())

    def _change_modality(self, modality: str) -> list[Update]:
        backend = self.backends[validate.one_of(modality, "modality", self.backends)]
        return [
            _PROMPTS[modality],
            gr.update(choices=backend.drafters(), value=_default_methods(backend)),
            gr.update(choices=backend.rules(), value=EXACT.name),
            backend.default_temperature,
        ]

    def _begin(self, request: gr.Request) -> list[Update]:
        return list(enter(self.queue, visitor(request)))

    def _stop(self, request: gr.Request) -> Update:
        return waiting("Stopping …") if self.queue.cancel(visitor(request)) else gr.skip()

    def _run(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from steps_on_model_thread(self._measure(ticket, request, *values))

    def _measure(
        self,
        ticket: int,
        request: gr.Request,
        modality: str,
        prompts: str,
        methods: list[str],
        rule: str,
        temperature: float,
        seed: float,
    ) -> Generator[list[Update]]:
        active = partial(self.queue.is_current, visitor(request), ticket)
        if ticket == REFUSED:
            return
        try:
            backend = self.backends[validate.one_of(modality, "modality", self.backends)]
            lines = [line.strip() for line in validate.text(prompts, "prompts").splitlines() if line.strip()]
            if len(lines) > validate.PROMPTS:
                raise InvalidOption(f"there are {len(lines)} prompts; give at most {validate.PROMPTS}")
            if not backend.loaded:
                yield [waiting(f"Loading {backend.description} …"), gr.skip()]
                backend.load()
            names = validate.some_of(methods, "drafters", backend.drafters(), validate.METHODS)
            given: dict[str, Any] = {"rule": rule, "temperature": temperature, "seed": seed}
            if backend.name == "text":
                given["max_new_tokens"] = _TOKENS
            chosen = contenders(backend, names, given, active)
            yield [waiting("Measuring the cost of target passes …"), gr.skip()]
            bench = Bench(chosen, [Item(str(index), "all", line) for index, line in enumerate(lines)])
            yield from self._follow(Comparison(bench, target_cost(backend, lines[0])))
        except Stopped:
            yield [running("Stopped."), gr.skip()]
        except Exception as error:
            yield [error_box(error), gr.skip()]
        finally:
            if active():
                self.queue.cancel(visitor(request))

    def _follow(self, comparison: Comparison) -> Iterator[list[Update]]:
        bench = comparison.bench
        for done, name in enumerate(bench.go(), 1):
            status = running(f"{done} of {bench.turns} runs, last: {name}{'' if bench.runs else ' (warm-up)'}")
            complete = bench.runs and done % len(bench.contenders) == 0
            yield [status, drawn(comparison.rows(), bench.runs, comparison.cost) if complete else gr.skip()]
        failed = "; ".join(f"{name}: {why}" for name, why in bench.failed.items())
        yield [
            running("Done." + (f" Failed: {failed}"[:400] if failed else "")),
            drawn(comparison.rows(), bench.runs, comparison.cost),
        ]


def _default_methods(backend: Backend) -> list[str]:
    """Three drafters that cost little and run anywhere."""
    known = [name for name in backend.drafters() if name in DRAFTERS]
    return [name for name in known if Capability.CATCHES_UP in DRAFTERS[name].capabilities][:3]
