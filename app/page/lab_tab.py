"""The Lab tab: several drafters on a few prompts, measured in turns and ranked, beside what theory predicts.

Uses outrider.core.bench.runner to measure and outrider.core.cost.theory to predict.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import gradio as gr

from outrider.app.page import theme, validate
from outrider.app.page.backends.interface import Backend, RunSettings, checked, compatible
from outrider.app.page.controls import NO_PROGRESS, Update, redraw, visitor
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.run_queue import MODEL, REFUSED, RunQueue, steps_on_model_thread
from outrider.app.page.runner import enter, error_box, hint, running, waiting
from outrider.app.viz.charts import benchmark_bars, predicted_and_measured
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.bench.other_load import Others, warning
from outrider.core.bench.runner import PLAIN, Bench, Contender, Item, Outcome, Run, Same, pooled, row
from outrider.core.bench.timing import pass_cost
from outrider.core.cost.theory import PassCost, best_length, break_even
from outrider.core.errors import InvalidOption
from outrider.core.methods import RULES
from outrider.core.methods.rules import EXACT

_TOKENS = 64
_TIMINGS = 3  # of each drafter on each prompt
PRESETS = {  # drafters to compare, of which those that are available are measured
    "No training": ("auto", "prompt-lookup", "suffix", "token-recycling", "jacobi"),
    "Trained heads": ("eagle3", "medusa", "hydra", "kangaroo", "dspark"),
    "A second model": ("draft-model", "dynamic-tree", "specinfer"),
    "The target itself": ("swift", "draft-verify", "sparse-cache"),
    "One of each kind": ("prompt-lookup", "jacobi", "eagle3", "draft-model", "ensemble"),
}
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


def compare(backend: Backend, chosen: Sequence[Contender], prompts: Sequence[str]) -> Comparison:
    """A benchmark of these contenders that has not begun."""
    bench = Bench(chosen, [Item(str(index), "all", line) for index, line in enumerate(prompts)], _TIMINGS)
    return Comparison(bench, target_cost(backend, prompts[0]))


def target_cost(backend: Backend, prompt: str) -> PassCost | None:
    """The measured cost of target passes; None except for text, whose target can be run by itself."""
    if backend.name != "text":
        return None
    lm = backend.load()
    return pass_cost(lm.target(), lm.encode(prompt), rounds=3)


_DRAWN = (  # the columns of a benchmark's row that are drawn
    *("drafter", "speedup", "speedup_low", "speedup_high", "tokens_per_pass", "tokens_per_pass_low"),
    *("tokens_per_pass_high", "predicted_tokens_per_second", "decode_tokens_per_second", "note"),
)
TITLES = (
    "method",
    "tokens / s",
    "speedup",
    "tokens per target pass",
    "accepted",
    "same output",
    "total variation / token",
    "NLL / token",
    "predicted tokens / s",
    "best draft length",
    "break-even acceptance",
)


def result(comparison: Comparison, others: float = 0.0) -> dict[str, Any]:
    """The results so far as JSON. `others`: cores busy with other work."""
    rows = []
    for one in comparison.rows():
        name = str(one["drafter"])
        cells = [name, *_cells(one, comparison.bench.of(name), comparison.cost)]
        rows.append({key: one.get(key) for key in _DRAWN} | {"cells": cells})
    return {"rows": rows, "others": round(others, 2)}


def opening_comparison(backend: Backend) -> Comparison:
    """The measurement with the settings that the tab opens with."""
    given = {"rule": EXACT.name, "temperature": 0.0, "seed": 0, "max_new_tokens": _TOKENS}
    chosen = contenders(backend, _available(backend, _presets(backend)[0]), given, lambda: True)
    return compare(backend, chosen, _PROMPTS["text"].splitlines())


@cache
def _opening() -> Drawing | None:
    """The recorded result with the machine that measured it."""
    path = theme.file("lab.json")
    if not path.is_file():
        return None
    kept = json.loads(path.read_text("utf-8"))
    note = f"Recorded with {kept['place']}. Press Measure for this machine."
    return Drawing(f'<p class="or-story">{safe(note)}</p>{drawn(kept)}')


def drawn(found: Mapping[str, Any]) -> Drawing:
    """The ranking of a result, what to doubt in it, and the details."""
    rows = found["rows"]
    body = [row["cells"] for row in rows]
    table = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in line) + "</tr>" for line in body)
    head = "".join(f'<th scope="col">{title}</th>' for title in TITLES)
    ranked = sorted(rows, key=lambda row: -float(row["speedup"] or 0))
    ranking = benchmark_bars(ranked, "speedup", "speedup over plain decoding", "x", base=1.0)
    plots = [("Tokens per target pass", benchmark_bars(ranked, "tokens_per_pass", "tokens per target pass", base=1.0))]
    points = [
        (str(row["drafter"]), float(row["predicted_tokens_per_second"]), float(row["decode_tokens_per_second"]))
        for row in rows
        if row.get("predicted_tokens_per_second")
    ]
    if points:
        plots.append(("Predicted and measured speed", predicted_and_measured(points)))
    cards = [f'<div class="or-card"><h2>{safe(title)}</h2>{plot}</div>' for title, plot in plots]
    notes = "".join(f"<li>{safe(text)}</li>" for text in [*_doubts(rows, found["others"]), *_remarks(rows)])
    return Drawing(
        f'<div class="or-card"><h2>Speedup over plain decoding, with 95 % intervals</h2>{ranking}</div>'
        f'<ul class="or-notes">{notes}</ul><details class="or-details"><summary>Details</summary>'
        '<div class="or-wide" tabindex="0" role="group" aria-label="all figures"><table class="or-table">'
        f"<thead><tr>{head}</tr></thead><tbody>{table}</tbody></table></div>{side_by_side(cards, 280)}</details>"
    )


def _doubts(rows: Sequence[Mapping[str, Any]], others: float) -> list[str]:
    """Why figures cannot be relied on: the machine was busy, or a speedup is higher than the target passes saved."""
    busy = warning(others)
    doubts = [f"{busy[0].upper()}{busy[1:]}."] if busy else []
    for found in rows:
        gain, limit = found["speedup"], found["tokens_per_pass"]
        if gain and limit and gain > 1.05 * limit:
            doubts.append(
                f"{found['drafter']}: {gain:.2f}x is more than its {limit:.2f} tokens per target pass allow, so "
                "something slowed plain decoding down; measure again on a quiet machine."
            )
    return doubts


def _remarks(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [f"{row['drafter']}: {str(row['note'])[:300]}" for row in rows if row.get("note")]


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


class LabTab:
    """The components and the events of the tab."""

    def __init__(self, backends: Mapping[str, Backend], queue: RunQueue, kept: KeptRecordings) -> None:
        self.backends, self.queue, self.kept = backends, queue, kept

    def build(self) -> None:
        first = self.backends["text"]
        with gr.Row():
            with gr.Column(scale=3, min_width=240):
                self.modality = gr.Radio(list(self.backends), value="text", label="Modality")
                self.preset = gr.Dropdown(_presets(first), label="Preset", elem_id="lab-preset")
                with gr.Row():
                    self.run = gr.Button("Measure", variant="primary", min_width=90, elem_id="lab-run")
                    self.stop = gr.Button("Stop", variant="stop", min_width=70, elem_id="lab-stop")
                with gr.Accordion("⚙ Drafters, prompts and rule", open=False, elem_id="lab-settings"):
                    self.methods = gr.Dropdown(
                        first.drafters(),
                        value=_available(first, _presets(first)[0]),
                        multiselect=True,
                        max_choices=validate.METHODS,
                        elem_id="lab-methods",
                        label=f"Drafters, up to {validate.METHODS}; plain decoding is always included",
                    )
                    self.prompts = gr.Textbox(
                        _PROMPTS["text"],
                        label=f"Prompts, one per line, up to {validate.PROMPTS}",
                        lines=3,
                        max_lines=8,
                        elem_id="lab-prompts",
                    )
                    self.rule = gr.Dropdown(first.rules(), value=EXACT.name, label="Acceptance rule")
                    self.temperature = gr.Slider(
                        0, validate.TEMPERATURE, 0, step=0.05, label="Temperature (0 is greedy)"
                    )
                    self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=validate.SEED)
            with gr.Column(scale=7, min_width=240):
                self.status = gr.HTML("", elem_id="lab-status", min_height=30)
                self.output = gr.HTML(
                    hint(
                        f"Press Measure. The drafters take turns on every prompt, {_TIMINGS} times, and each speedup "
                        "compares runs of the same prompt in the same turn."
                    ),
                    elem_id="lab-out",
                    min_height=200,
                )
        self.ticket = gr.State(0)
        self.modality.input(
            self._change_modality,
            [self.modality],
            [self.prompts, self.preset, self.methods, self.rule, self.temperature],
            **redraw(),
        )
        self.preset.input(self._change_preset, [self.modality, self.preset], [self.methods], **redraw())
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
            gr.update(choices=_presets(backend), value=_presets(backend)[0]),
            gr.update(choices=backend.drafters(), value=_available(backend, _presets(backend)[0])),
            gr.update(choices=backend.rules(), value=EXACT.name),
            backend.default_temperature,
        ]

    def _change_preset(self, modality: str, preset: str) -> Update:
        backend = self.backends[validate.one_of(modality, "modality", self.backends)]
        return _available(backend, validate.one_of(preset, "preset", PRESETS))

    def open_example(self, request: gr.Request) -> Update:
        """Show the recorded result to a visitor who has measured nothing here."""
        shown = _opening()
        return gr.skip() if shown is None or self.kept.has_begun(visitor(request), "lab") else shown

    def _begin(self, request: gr.Request) -> list[Update]:
        ticket, status = enter(self.queue, visitor(request))
        if ticket != REFUSED:
            self.kept.begin(visitor(request), "lab")
        return [ticket, status]

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
            yield from self._follow(compare(backend, chosen, lines))
        except Stopped:
            yield [running("Stopped."), gr.skip()]
        except Exception as error:
            yield [error_box(error), gr.skip()]
        finally:
            if active():
                self.queue.cancel(visitor(request))

    def _follow(self, comparison: Comparison) -> Iterator[list[Update]]:
        bench, others = comparison.bench, Others()
        for done, name in enumerate(bench.go(), 1):
            status = running(f"{done} of {bench.turns} runs, last: {name}{'' if bench.runs else ' (warm-up)'}")
            complete = bench.runs and done % len(bench.contenders) == 0
            yield [status, drawn(result(comparison, others.cores())) if complete else gr.skip()]
        failed = "; ".join(f"{name}: {why}" for name, why in bench.failed.items())
        yield [
            running("Done." + (f" Failed: {failed}"[:400] if failed else "")),
            drawn(result(comparison, others.cores())),
        ]


def _available(backend: Backend, preset: str) -> list[str]:
    """The drafters of a preset that the backend has."""
    known = backend.drafters()
    return [name for name in PRESETS[preset] if name in known][: validate.METHODS]


def _presets(backend: Backend) -> list[str]:
    return [name for name in PRESETS if _available(backend, name)]
