"""The tab of a modality: its controls, the buttons Run, Race and Stop, and the view of the result.

The same for every modality. Text of visitors and models is escaped by `render` and `viz` before it enters the page.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from typing import Any
from urllib.parse import urlencode

import gradio as gr

from outrider.app.page import controls, validate
from outrider.app.page.backends.interface import (
    METHODS,
    Backend,
    Knob,
    RunSettings,
    checked,
    drafter_choices,
    drafter_knobs,
    rule_knobs,
    rules_for,
    salvaged,
    selectable_drafters,
    summary,
)
from outrider.app.page.controls import Update, redraw, visitor
from outrider.app.page.drafter_menu import drafter_menu
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.recordings import Recording
from outrider.app.page.run_queue import MODEL, REFUSED, RunQueue, on_model_thread, steps_on_model_thread
from outrider.app.page.runner import enter, error_box, follow, hint, waiting
from outrider.app.page.runner import race as race_
from outrider.app.page.trace_view import TraceView
from outrider.app.viz import trace_html
from outrider.app.viz.svg import Drawing, cut, safe
from outrider.core.bench.runner import PLAIN
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods import RULES
from outrider.core.methods.measured import verdict
from outrider.core.methods.rules import EXACT

_SLIDERS, _CHOICES, _RULE_SLIDERS = 4, 2, 3  # components for the options of any drafter and rule


class ModalityTab:
    """The components and the events of one modality's tab."""

    def __init__(self, backend: Backend, queue: RunQueue, kept: KeptRecordings) -> None:
        self.backend, self.queue = backend, queue
        self.view = TraceView(backend.name, kept, (backend.name,))

    # ---- components

    def build(self, opened: bool = False) -> None:
        """The result, the prompt below it, the settings, and the steps; `opened`: with a recorded race."""
        backend = self.backend
        with gr.Column(elem_classes=["or-root"]):
            self.view.build(opened)
            self._controls()
            if backend.name == "image":
                self.patches = gr.HTML("", elem_id="image-patches")
            self.view.build_steps(opened)
        self._wire()

    def _controls(self) -> None:
        backend = self.backend
        drafters = [name for _, name in drafter_menu(backend)]
        drafter = backend.default_drafter if backend.default_drafter in drafters else PLAIN
        with gr.Row(elem_classes=["or-ask"]):
            self.prompt = gr.Textbox(
                label=backend.prompt_label.capitalize(),
                value=backend.examples[0],
                lines=1,
                max_lines=6,
                scale=6,
                min_width=240,
                elem_id=f"{backend.name}-prompt",
            )
            with gr.Row(elem_classes=["or-buttons"], scale=2):
                self.run = gr.Button("Run", variant="primary", min_width=60, elem_id=f"{backend.name}-run")
                self.race = gr.Button("Race", min_width=60, elem_id=f"{backend.name}-go", visible=not backend.is_server)
                self.stop = gr.Button("Stop", variant="stop", min_width=60, elem_id=f"{backend.name}-stop")
        labels = {text: label for label, text in backend.lessons.items()}
        gr.Examples(
            [[text] for text in backend.examples],
            [self.prompt],
            label="Examples",
            example_labels=[labels.get(text, text) for text in backend.examples],
            api_visibility="private",
        )
        self.settings_line = gr.Accordion(
            self._line(drafter, EXACT.name), open=False, elem_id=f"{backend.name}-settings"
        )
        with self.settings_line:
            self._settings(drafter)
        self.ticket = gr.State(0)

    def _settings(self, drafter: str) -> None:
        backend = self.backend
        with gr.Row():
            self.drafter = gr.Dropdown(
                drafter_menu(backend), value=drafter, label="Drafter", min_width=240, elem_id=f"{backend.name}-drafter"
            )
            self.rule = gr.Dropdown(
                rules_for(backend, drafter),
                value=EXACT.name,
                label="Acceptance rule",
                min_width=200,
                elem_id=f"{backend.name}-rule",
            )
        self.about = gr.HTML(self._about(drafter, EXACT.name), elem_id=f"{backend.name}-about", min_height=74)
        with gr.Row():
            self.temperature = gr.Slider(
                0,
                validate.TEMPERATURE,
                backend.default_temperature,
                step=0.05,
                label="Temperature (0 is greedy)",
                min_width=150,
            )
            self.seed = gr.Number(0, label="Seed", precision=0, minimum=0, maximum=validate.SEED, min_width=90)
            self.extra_options = [controls.component(option) for option in backend.extra_options]
        with gr.Row():
            self.sliders = [
                controls.slider(knob) for knob in controls.padded(drafter_knobs(backend, drafter), _SLIDERS)
            ]
            self.choices = [
                controls.dropdown(choice) for choice in controls.padded(drafter_choices(backend, drafter), _CHOICES)
            ]
            self.rule_sliders = [
                controls.slider(knob) for knob in controls.padded(rule_knobs(backend, EXACT.name), _RULE_SLIDERS)
            ]

    def _line(self, drafter: str, rule: str) -> str:
        """The model, the drafter and the rule in one line."""
        kind = "lossless" if RULES[rule].lossless else "relaxed"
        return f"⚙ {cut(self.backend.description, 60)} · drafter {drafter} · rule {rule} ({kind})"

    @property
    def inputs(self) -> list[Any]:
        general = [self.prompt, self.drafter, self.rule, self.temperature, self.seed, *self.extra_options]
        return [*general, *self.sliders, *self.choices, *self.rule_sliders]

    def _about(self, drafter: str, rule: str) -> Drawing:
        lossless = bool(RULES[rule].lossless)
        found = verdict(RULES[rule], self.backend.name)
        return Drawing(
            f'<div style="margin-bottom:4px">{trace_html.badge(lossless)}</div><div style="font-size:.88em;opacity:.8">'
            f"<b>{safe(drafter)}</b>: {safe(summary(drafter, METHODS))}.<br><b>{safe(rule)}</b>: "
            f"{safe(summary(rule, RULES))}.{safe(f' At its default: {found}.') if found else ''}</div>"
        )

    # ---- events

    def _wire(self) -> None:
        self.drafter.input(
            self._change_drafter,
            [self.drafter, self.rule],
            [self.rule, self.about, self.settings_line, *self.sliders, *self.choices, *self.rule_sliders],
            **redraw(),
        )
        self.rule.input(
            self._change_rule,
            [self.drafter, self.rule],
            [self.about, self.settings_line, *self.rule_sliders],
            **redraw(),
        )
        for button, work in ((self.run, self._run), (self.race, self._race)):
            button.click(self._begin, None, [self.ticket, self.view.status], **redraw()).then(
                self._load,
                None,
                [self.view.status],
                concurrency_limit=1,
                concurrency_id=MODEL,
                show_progress="minimal",
                api_visibility="private",
            ).then(
                work,
                [self.ticket, *self.inputs],
                self.view.outputs,
                concurrency_limit=1,
                concurrency_id=MODEL,
                api_visibility="private",
                **controls.NO_PROGRESS,
            )
        self.stop.click(self._stop, None, [self.view.status], **redraw())
        if self.backend.name == "image":
            self.view.output.click(self._similar, None, [self.patches], **redraw(queue=True))

    def _change_drafter(self, drafter: str, rule: str) -> list[Update]:
        rules = rules_for(self.backend, drafter) if drafter in selectable_drafters(self.backend) else [EXACT.name]
        rule = rule if rule in rules else EXACT.name
        return [
            gr.update(choices=rules, value=rule),
            self._about(drafter, rule),
            gr.update(label=self._line(drafter, rule)),
            *self._drafter_options(drafter),
            *self._rule_options(rule),
        ]

    def _change_rule(self, drafter: str, rule: str) -> list[Update]:
        if rule not in RULES:
            return [gr.skip()] * (2 + _RULE_SLIDERS)
        return [
            self._about(drafter, rule),
            gr.update(label=self._line(drafter, rule)),
            *self._rule_options(rule),
        ]

    def _drafter_options(self, drafter: str, given: Any = None) -> list[Update]:
        knobs = controls.padded(drafter_knobs(self.backend, drafter), _SLIDERS)
        choices = controls.padded(drafter_choices(self.backend, drafter), _CHOICES)
        updates = [controls.update_slider(knob, given) for knob in knobs]
        return [*updates, *(controls.update_dropdown(choice, given) for choice in choices)]

    def _rule_options(self, rule: str, given: Any = None) -> list[Update]:
        knobs = controls.padded(rule_knobs(self.backend, rule), _RULE_SLIDERS)
        return [controls.update_slider(knob, given) for knob in knobs]

    def _begin(self, request: gr.Request) -> list[Update]:
        ticket, status = enter(self.queue, visitor(request))
        if ticket != REFUSED:
            self.view.kept.begin(visitor(request), self.view.name)
        return [ticket, status]

    def _stop(self, request: gr.Request) -> Update:
        return waiting("Stopping …") if self.queue.cancel(visitor(request)) else gr.skip()

    def _load(self, progress: gr.Progress = gr.Progress(track_tqdm=True)) -> Iterator[Update]:  # noqa: B008
        if self.backend.loaded:
            yield gr.skip()
            return
        yield waiting(f"Loading {self.backend.description} …")
        progress(0.1, f"Loading {self.backend.description}")
        try:
            on_model_thread(self.backend.load)
        except Exception as error:
            yield error_box(error)

    def settings(self, values: Sequence[Any]) -> RunSettings:
        """The values of the controls as checked settings of a run."""
        prompt, drafter, rule, temperature, seed, *options = values
        extra_options, options = options[: len(self.extra_options)], options[len(self.extra_options) :]
        sliders, choices = options[:_SLIDERS], options[_SLIDERS : _SLIDERS + _CHOICES]
        given: dict[str, Any] = {"prompt": prompt, "drafter": drafter, "rule": rule, "seed": seed}
        given |= {"temperature": temperature, "drafter_options": {}, "rule_options": {}}
        given |= {option.name: value for option, value in zip(self.backend.extra_options, extra_options, strict=True)}
        if isinstance(drafter, str):
            known = [knob.name for knob in drafter_knobs(self.backend, drafter)]
            given["drafter_options"] |= dict(zip(known, sliders, strict=False))
            known = [choice.name for choice in drafter_choices(self.backend, drafter)]
            given["drafter_options"] |= dict(zip(known, choices, strict=False))
        if isinstance(rule, str):
            known = [knob.name for knob in rule_knobs(self.backend, rule)]
            given["rule_options"] = dict(zip(known, options[_SLIDERS + _CHOICES :], strict=False))
        return checked(self.backend, given)

    def _run(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from steps_on_model_thread(self._work(ticket, values, request, race=False))

    def _race(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from steps_on_model_thread(self._work(ticket, values, request, race=True))

    def _work(self, ticket: int, values: Sequence[Any], request: gr.Request, race: bool) -> Generator[list[Update]]:
        active = partial(self.queue.is_current, visitor(request), ticket)
        if ticket == REFUSED:
            return
        try:
            settings = self.settings(values)
            work: Callable[..., Any] = race_ if race else partial(follow, label=f"{settings.drafter}:")
            recording: Recording | None = None
            for update, result in work(self.backend, settings, active):
                recording = result
                yield self.view.partial(*update)
            if recording is None or not recording.trace.steps:
                yield self.view.partial("", hint("Stopped before the first target pass."))
                return
            yield self.view.updates(recording, request, "" if active() else "stopped", self._link(settings))
        except Exception as error:
            yield self.view.partial(error_box(error))
        finally:
            if active():
                self.queue.cancel(visitor(request))

    def _similar(self, event: gr.EventData, request: gr.Request) -> Update:
        """The image codes that look most like the one in the clicked cell."""
        cell, recording = getattr(event, "cell", None), self.view.find(request)
        if recording is None or not isinstance(cell, int):
            return gr.skip()
        codes = [token for step in recording.trace.steps for token in step.emitted]
        if not 0 <= cell < len(codes):
            return gr.skip()
        if not self.backend.loaded:
            return hint("The patches need the model: press Run once.")
        try:
            similar = on_model_thread(partial(self.backend.similar, codes[cell]))  # type: ignore[attr-defined]
        except Exception as error:
            return error_box(error)
        figures = "".join(
            f'<figure><img alt="" src="{safe(data)}"><figcaption>{code}</figcaption></figure>' for code, data in similar
        )
        row, column = divmod(cell, recording.columns)
        return Drawing(
            f'<div class="or-caption">Code {codes[cell]} at row {row + 1}, column {column + 1}, and the codes that '
            f'look most like it:</div><div class="or-patches">{figures}</div>'
        )

    # ---- links

    def _link(self, settings: RunSettings) -> Drawing:
        """A link that opens the page with these settings."""
        query: dict[str, Any] = {"panel": self.backend.name, "prompt": settings.prompt, "drafter": settings.drafter}
        query |= {"rule": settings.rule, "temperature": f"{settings.temperature:g}", "seed": settings.seed}
        query |= settings.extra
        for letter, options in (("d", settings.drafter_options), ("r", settings.rule_options)):
            for name, value in options.items():
                query[f"{letter}.{name}"] = value if isinstance(value, str) else f"{value:g}"
        link = f"?{safe(urlencode(query))}"
        return Drawing(
            f' <a href="{link}" target="_blank" rel="noopener">Link to these settings</a> '
            f'<button type="button" class="or-button or-copy" data-link="{link}">Copy the link</button>'
        )

    @property
    def linked(self) -> list[Any]:
        """The components that an address changes."""
        return [*self.inputs, self.about, self.settings_line, self.view.status]

    def from_query(self, query: dict[str, str]) -> list[Update]:
        """Updates of the controls from the page's address. Invalid settings are named and left out; nothing changes if
        the address is for another tab."""
        if query.get("panel") != self.backend.name:
            return [gr.skip() for _ in self.linked]
        try:
            settings, notes = salvaged(self.backend, _parsed(query, self.backend))
        except OutriderError:
            return [gr.skip() for _ in self.linked]
        return [
            settings.prompt,
            settings.drafter,
            gr.update(choices=rules_for(self.backend, settings.drafter), value=settings.rule),
            settings.temperature,
            settings.seed,
            *(settings.extra[option.name] for option in self.backend.extra_options),
            *self._drafter_options(settings.drafter, settings.drafter_options),
            *self._rule_options(settings.rule, settings.rule_options),
            self._about(settings.drafter, settings.rule),
            gr.update(label=self._line(settings.drafter, settings.rule)),
            error_box(InvalidOption("left out of the link: " + "; ".join(notes))) if notes else gr.skip(),
        ]


def _parsed(query: dict[str, str], backend: Backend) -> dict[str, Any]:
    """The settings in an address, with numbers parsed."""

    def number(text: str) -> Any:
        try:
            return float(text)
        except ValueError:
            return text

    given: dict[str, Any] = {key: query[key] for key in ("prompt", "drafter", "rule") if key in query}
    given |= {key: number(query[key]) for key in ("temperature", "seed") if key in query}
    for option in backend.extra_options:
        if option.name in query:
            given[option.name] = number(query[option.name]) if isinstance(option, Knob) else query[option.name]
    for key, prefix in (("drafter_options", "d."), ("rule_options", "r.")):
        given[key] = {name.removeprefix(prefix): number(v) for name, v in query.items() if name.startswith(prefix)}
    return given
