"""A panel of the page, of one shape for every modality: what to ask, Run, Stop and Race, and a stage for what came.

Puts subjects onto Gradio's components. Text of visitors and models enters the page through showing and views alone,
which escape it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from urllib.parse import urlencode

import gradio as gr

from outrider.app.page import controls, validate
from outrider.app.page.backends.interface import (
    METHODS,
    Asked,
    Backend,
    Knob,
    checked,
    drafting,
    judging,
    offered,
    rules_for,
    summary,
    wording,
)
from outrider.app.page.controls import Update, quiet, visitor
from outrider.app.page.recordings import Recording
from outrider.app.page.run_queue import LANE, RunQueue, laned, stepped
from outrider.app.page.runner import fault, follow, remark, waiting
from outrider.app.page.trace_view import TraceView
from outrider.app.viz import trace_html
from outrider.app.viz.svg import Drawing, safe
from outrider.core.bench.runner import PLAIN
from outrider.core.errors import OutriderError
from outrider.core.methods import RULES
from outrider.core.methods.rules import EXACT

_KNOBS, _WORDS, _RULES = 4, 2, 3


class Panel:
    """One modality's part of the page."""

    def __init__(self, subject: Backend, tickets: RunQueue) -> None:
        self.subject, self.tickets = subject, tickets
        self.stage = TraceView(subject.name, racing=not subject.fixed)

    # ---- components

    def build(self) -> None:
        subject = self.subject
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self._controls()
            with gr.Column(scale=7, min_width=320):
                self.stage.build(legend=True)
                if subject.name == "image":
                    self.patches = gr.HTML(
                        remark("Click a cell of a grid: the codes that look most like it."),
                        elem_id="image-patches",
                        min_height=74,
                    )
                self.stage.build_steps(pictures=subject.name == "image")
        self._wire()

    def _controls(self) -> None:
        subject = self.subject
        drafters = offered(subject)
        usual = subject.usual if subject.usual in drafters else PLAIN
        self.prompt = gr.Textbox(
            label=subject.what.capitalize(),
            value=subject.examples[0],
            lines=3,
            max_lines=8,
            max_length=validate.PROMPT,
            elem_id=f"{subject.name}-prompt",
        )
        gr.Examples([[one] for one in subject.examples], [self.prompt], label="Examples", api_visibility="private")
        with gr.Group():
            self.drafter = gr.Dropdown(drafters, value=usual, label="Drafter", elem_id=f"{subject.name}-drafter")
            self.rule = gr.Dropdown(
                rules_for(subject, usual), value=EXACT.name, label="Rule", elem_id=f"{subject.name}-rule"
            )
        self.about = gr.HTML(self._about(usual, EXACT.name), elem_id=f"{subject.name}-about", min_height=74)
        with gr.Row():
            run = [gr.Button("Run", variant="primary", min_width=70, elem_id=f"{subject.name}-run")]
            run.append(gr.Button("Race", min_width=70, elem_id=f"{subject.name}-go", visible=not subject.fixed))
            run.append(gr.Button("Stop", variant="stop", min_width=70, elem_id=f"{subject.name}-stop"))
        self.run, self.go, self.stop = run
        with gr.Row():
            self.heat = gr.Slider(
                0, validate.HEAT, subject.heat, step=0.05, label="temperature (0 is greedy)", min_width=150
            )
            self.seed = gr.Number(0, label="seed", precision=0, minimum=0, maximum=validate.SEED, min_width=90)
        self.extras = [controls.component(one) for one in subject.extras]
        with gr.Accordion("Options of the drafter and the rule", open=False):
            self.drafting = [controls.slider(one) for one in controls.padded(drafting(subject, usual), _KNOBS)]
            self.wording = [controls.dropdown(one) for one in controls.padded(wording(subject, usual), _WORDS)]
            self.judging = [controls.slider(one) for one in controls.padded(judging(subject, EXACT.name), _RULES)]
        self.link = gr.HTML("", elem_id=f"{subject.name}-link", min_height=24)
        self.ticket = gr.State(0)

    @property
    def inputs(self) -> list[Any]:
        told = [self.prompt, self.drafter, self.rule, self.heat, self.seed, *self.extras]
        return [*told, *self.drafting, *self.wording, *self.judging]

    def _about(self, drafter: str, rule: str) -> Drawing:
        lossless = bool(RULES[rule].lossless)
        return Drawing(
            f'<div style="margin-bottom:4px">{trace_html.badge(lossless)}</div><div style="font-size:.88em;opacity:.8">'
            f"<b>{safe(drafter)}</b>: {safe(summary(drafter, METHODS))}.<br><b>{safe(rule)}</b>: "
            f"{safe(summary(rule, RULES))}.</div>"
        )

    # ---- events

    def _wire(self) -> None:
        self.drafter.input(
            self._chosen,
            [self.drafter, self.rule],
            [self.rule, self.about, *self.drafting, *self.wording, *self.judging],
            **quiet(),
        )
        self.rule.input(self._ruled, [self.drafter, self.rule], [self.about, *self.judging], **quiet())
        for button, work in ((self.run, self._run), (self.go, self._race)):
            button.click(self._begin, None, [self.ticket, self.stage.status], **quiet()).then(
                self._load,
                None,
                [self.stage.status],
                concurrency_limit=1,
                concurrency_id=LANE,
                show_progress="minimal",
                api_visibility="private",
            ).then(
                work,
                [self.ticket, *self.inputs],
                [*self.stage.outputs, self.link],
                concurrency_limit=1,
                concurrency_id=LANE,
                api_visibility="private",
                **controls.UNMARKED,
            )
        self.stop.click(self._stop, None, [self.stage.status], **quiet())
        if self.subject.name == "image":
            self.stage.out.click(self._like, [self.stage.recording], [self.patches], **quiet(queue=True))

    def _chosen(self, drafter: str, rule: str) -> list[Update]:
        rules = rules_for(self.subject, drafter) if drafter in offered(self.subject) else [EXACT.name]
        rule = rule if rule in rules else EXACT.name
        turned = [controls.turned(one) for one in controls.padded(drafting(self.subject, drafter), _KNOBS)]
        turned += [controls.reworded(one) for one in controls.padded(wording(self.subject, drafter), _WORDS)]
        return [
            gr.update(choices=rules, value=rule),
            self._about(drafter, rule),
            *turned,
            *self._ruled(drafter, rule)[1:],
        ]

    def _ruled(self, drafter: str, rule: str) -> list[Update]:
        if rule not in RULES:
            return [gr.skip()] * (1 + _RULES)
        return [
            self._about(drafter, rule),
            *(controls.turned(one) for one in controls.padded(judging(self.subject, rule), _RULES)),
        ]

    def _begin(self, request: gr.Request) -> list[Update]:
        return [self.tickets.take(visitor(request)), waiting("Waiting for the model's lane …")]

    def _stop(self, request: gr.Request) -> Update:
        return waiting("Stopping …") if self.tickets.give_back(visitor(request)) else gr.skip()

    def _load(self, progress: gr.Progress = gr.Progress(track_tqdm=True)) -> Iterator[Update]:  # noqa: B008
        if self.subject.loaded:
            yield gr.skip()
            return
        yield waiting(f"Loading {self.subject.about} …")
        progress(0.1, f"Loading {self.subject.about}")
        try:
            laned(self.subject.load)
        except Exception as error:
            yield fault(error)

    def asked(self, values: Sequence[Any]) -> Asked:
        """The panel's controls, checked."""
        prompt, drafter, rule, heat, seed, *rest = values
        extras, rest = rest[: len(self.extras)], rest[len(self.extras) :]
        turned, worded, judged = rest[:_KNOBS], rest[_KNOBS : _KNOBS + _WORDS], rest[_KNOBS + _WORDS :]
        given: dict[str, Any] = {"prompt": prompt, "drafter": drafter, "rule": rule, "temperature": heat, "seed": seed}
        given |= {one.name: value for one, value in zip(self.subject.extras, extras, strict=True)}
        for key, name, turning, numbers in (
            ("drafter_options", drafter, partial(drafting, self.subject), turned),
            ("rule_options", rule, partial(judging, self.subject), judged),
        ):
            known = turning(name) if isinstance(name, str) else []
            given[key] = {one.name: value for one, value in zip(known, numbers, strict=False)}
        words = wording(self.subject, drafter) if isinstance(drafter, str) else []
        given["drafter_options"] |= {one.name: value for one, value in zip(words, worded, strict=False)}
        return checked(self.subject, given)

    def _run(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from stepped(self._work(ticket, values, request, race=False))

    def _race(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from stepped(self._work(ticket, values, request, race=True))

    def _work(self, ticket: int, values: Sequence[Any], request: gr.Request, race: bool) -> Generator[list[Update]]:
        going = partial(self.tickets.valid, visitor(request), ticket)
        try:
            asked = self.asked(values)
            plain: Recording | None = None
            if race:
                beside = replace(asked, drafter=PLAIN, drafter_options={})
                for update, found in follow(self.subject, beside, going, "plain decoding …"):
                    plain = found
                    yield [*self.stage.only(*update), gr.skip()]
            recording: Recording | None = None
            for update, found in follow(self.subject, asked, going, f"{asked.drafter} …"):
                recording = found
                yield [*self.stage.only(*update), gr.skip()]
            if recording is None or not recording.trace.steps:
                yield [*self.stage.only("", remark("Stopped before it began.")), gr.skip()]
                return
            whole = replace(recording, plain=plain) if plain is not None and plain.trace.steps else recording
            tab = "race" if whole.plain is not None else ""
            yield [*self.stage.shown(whole, "" if going() else "stopped", tab), self._link(asked)]
        except Exception as error:
            yield [*self.stage.only(fault(error)), gr.skip()]
        finally:
            if going():
                self.tickets.give_back(visitor(request))

    def _like(self, recording: Recording | None, event: gr.EventData) -> Update:
        cell = getattr(event, "cell", None)
        if not isinstance(recording, Recording) or not isinstance(cell, int):
            return gr.skip()
        found = [token for step in recording.trace.steps for token in step.emitted]
        if not 0 <= cell < len(found):
            return gr.skip()
        if not self.subject.loaded:
            return remark("The codes' patches come from the model: press Run once.")
        try:
            like = laned(partial(self.subject.like, found[cell]))  # type: ignore[attr-defined]
        except Exception as error:
            return fault(error)
        shown = "".join(
            f'<figure><img alt="" src="{safe(data)}"><figcaption>{code}</figcaption></figure>' for code, data in like
        )
        row, column = divmod(cell, recording.columns)
        return Drawing(
            f'<div class="or-said">Code {found[cell]} at row {row + 1}, column {column + 1}, and those that '
            f'look most like it:</div><div class="or-patches">{shown}</div>'
        )

    # ---- links

    def _link(self, asked: Asked) -> Drawing:
        """An address that brings these settings back."""
        given: dict[str, Any] = {"panel": self.subject.name, "prompt": asked.prompt, "drafter": asked.drafter}
        given |= {"rule": asked.rule, "temperature": f"{asked.temperature:g}", "seed": asked.seed, **asked.extra}
        for letter, options in (("d", asked.drafter_options), ("r", asked.rule_options)):
            said = {name: value if isinstance(value, str) else f"{value:g}" for name, value in options.items()}
            given |= {f"{letter}.{name}": value for name, value in said.items()}
        return Drawing(f'<a href="?{safe(urlencode(given))}" target="_blank" rel="noopener">Link to these settings</a>')

    def linked(self, query: dict[str, str]) -> list[Update]:
        """The controls as an address says; what it doesn't say, or says wrongly, stays."""
        if query.get("panel") != self.subject.name:
            return [gr.skip() for _ in [*self.inputs, self.about]]
        try:
            asked = checked(self.subject, _plain(query, self.subject))
        except OutriderError:
            return [gr.skip() for _ in [*self.inputs, self.about]]
        found: list[Update] = [
            asked.prompt,
            asked.drafter,
            gr.update(choices=rules_for(self.subject, asked.drafter), value=asked.rule),
            asked.temperature,
            asked.seed,
        ]
        found += [asked.extra[one.name] for one in self.subject.extras]
        options = asked.drafter_options
        found += [
            controls.turned(one, options) for one in controls.padded(drafting(self.subject, asked.drafter), _KNOBS)
        ]
        found += [
            controls.reworded(one, options) for one in controls.padded(wording(self.subject, asked.drafter), _WORDS)
        ]
        found += [
            controls.turned(one, asked.rule_options)
            for one in controls.padded(judging(self.subject, asked.rule), _RULES)
        ]
        return [*found, self._about(asked.drafter, asked.rule)]


def _plain(query: dict[str, str], subject: Backend) -> dict[str, Any]:
    """What an address says, as plain values."""

    def number(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    given: dict[str, Any] = {key: query[key] for key in ("prompt", "drafter", "rule") if key in query}
    given |= {key: number(query[key]) for key in ("temperature", "seed") if key in query}
    for one in subject.extras:
        if one.name in query:
            given[one.name] = number(query[one.name]) if isinstance(one, Knob) else query[one.name]
    for key, letter in (("drafter_options", "d."), ("rule_options", "r.")):
        given[key] = {name.removeprefix(letter): number(v) for name, v in query.items() if name.startswith(letter)}
    return given
