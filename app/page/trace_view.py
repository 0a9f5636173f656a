"""The view of a recording: the answer, the stepper, the numbers and the theory. For runs and for traces from files.

Puts the HTML of `render` into Gradio components. Independent of models.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gradio as gr

from outrider.app.page import recordings, render, theme, validate
from outrider.app.page.controls import Update, redraw, visitor
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import error_box, hint
from outrider.app.page.theme import CELLS
from outrider.app.page.theory import FORMULA, Estimate, advice, estimate, theory
from outrider.app.viz.image_grid import OVERLAYS
from outrider.app.viz.svg import Drawing, safe

VIEWS = {"text": ("Read", "Who wrote it", "Guesses"), "image": tuple(name.capitalize() for name in OVERLAYS)}
_OPENING = {  # lossless runs
    "text": "text writing code",
    "image": "image a window of guesses",
    "speech": "speech a sentence",
}


def chooser(name: str, what: str) -> Drawing:
    """Radio buttons that choose one of the views; the style sheet follows them."""
    buttons = [
        f'<label><input type="radio" name="{name}-{what}-view" value="or-view-{label.split()[-1].lower()}"'
        f"{' checked' if index == 0 else ''}> {safe(label)}</label>"
        for index, label in enumerate(VIEWS[what])
    ]
    return Drawing(f'<fieldset class="or-views"><legend>View</legend>{"".join(buttons)}</fieldset>')


@dataclass
class TraceView:
    """The components of a view, and the updates that show a recording in them."""

    name: str
    kept: KeptRecordings
    kinds: tuple[str, ...] = ()  # the modalities it may show
    empty: str = "Press Run."
    status: Any = None
    output: Any = None
    steps: Any = None
    charts: Any = None
    advice: Any = None
    theory: Any = None

    @cached_property
    def example(self) -> Recording | None:
        """The bundled recording with which the view opens."""
        own = theme.file(f"{self.name}.json")
        path = own if own.is_file() else recordings.examples().get(_OPENING.get(self.name, ""))
        return None if path is None else recordings.read(path.read_bytes())

    @cached_property
    def _opening(self) -> list[Update]:
        """The updates that show the example, drawn once for all visitors."""
        return [] if self.example is None else self.shown(self.example, "recorded")

    def build(self, opened: bool = False) -> None:
        """The answer with its views; `opened`: with the example in it."""
        example = self.example if opened else None
        with gr.Row(elem_classes=["or-top"]):
            for kind in self.kinds:
                if kind in VIEWS:
                    gr.HTML(chooser(self.name, kind), elem_id=f"{self.name}-{kind}-views", min_width=200)
            status = render.figures(example.trace, "recorded") if example else hint("")
            self.status = gr.HTML(status, elem_id=f"{self.name}-status", min_width=200)
        output = render.output(example) if example else hint(self.empty)
        self.output = gr.HTML(output, elem_id=f"{self.name}-out", elem_classes=["or-out"], js_on_load=CELLS)

    def build_steps(self, opened: bool = False) -> None:
        """The stepper, and below it the numbers and the theory."""
        example = self.example if opened else None
        gr.HTML("<h2>How did it do that?</h2>", elem_classes=["or-title"])
        steps = render.steps(example) if example else hint("After a run: the guesses of every target pass.")
        self.steps = gr.HTML(steps, elem_id=f"{self.name}-steps", min_height=120)
        run = estimate(example)
        gr.HTML("<h2>What would make it faster?</h2>", elem_classes=["or-title"])
        self.advice = gr.HTML(_advice(run), elem_id=f"{self.name}-advice")
        with gr.Accordion("Other acceptance, costs and lengths", open=False, elem_id=f"{self.name}-faster"):
            with gr.Row():
                self.sliders = [
                    gr.Slider(
                        0, 1, run.acceptance, step=0.01, label="Acceptance a", min_width=130, elem_id=f"{self.name}-a"
                    ),
                    gr.Slider(0, 1, run.cost, step=0.01, label="Cost of a guess c", min_width=130),
                    gr.Slider(0, 16, round(run.length), step=1, label="Guesses k", min_width=130),
                    gr.Slider(0, 0.5, run.growth, step=0.01, label="Cost of checking one more", min_width=130),
                ]
            self.theory = gr.HTML(_theory(run), elem_id=f"{self.name}-theory")
            gr.Markdown(FORMULA)
        with gr.Accordion("All numbers", open=False, elem_id=f"{self.name}-numbers"):
            self.charts = gr.HTML(
                render.charts(example) if example else hint("After a run."), elem_id=f"{self.name}-charts"
            )
        for slider in self.sliders:
            slider.input(self._imagine, self.sliders, [self.theory], **redraw())

    @property
    def outputs(self) -> list[Any]:
        return [self.status, self.output, self.steps, self.charts, self.advice, self.theory, *self.sliders]

    def find(self, request: gr.Request) -> Recording | None:
        """The recording that the visitor made or opened in this view."""
        return self.kept.find(visitor(request), self.name)

    def updates(self, recording: Recording, request: gr.Request, state: str = "", more: str = "") -> list[Update]:
        """Keep a recording and update all components for it; `more` is HTML beside the link to its trace."""
        self.kept.keep(visitor(request), self.name, recording)
        return self.shown(recording, state, more)

    def shown(self, recording: Recording, state: str = "", more: str = "") -> list[Update]:
        link = f'<a download="outrider-{recording.modality}.json" href="{recording.link()}">Download this trace</a>'
        charts = f'<p class="or-links">{link}{more}</p>{render.charts(recording)}'
        run = estimate(recording)
        sliders = [run.acceptance, run.cost, round(min(run.length, 16)), run.growth]
        updates: list[Update] = [render.figures(recording.trace, state), render.output(recording)]
        return [*updates, render.steps(recording), charts, _advice(run), _theory(run), *sliders]

    def open_example(self, request: gr.Request) -> list[Update]:
        """Show the bundled recording to a visitor who has begun no run here."""
        opening = self._opening
        if not opening or self.kept.has_begun(visitor(request), self.name):  # also while it was drawn
            return [gr.skip() for _ in self.outputs]
        return opening

    def partial(self, status: str | None = None, output: str | None = None) -> list[Update]:
        """Updates of the status or the output alone."""
        given = [status, output]
        return [gr.skip() if part is None else part for part in (*given, *[None] * (len(self.outputs) - 2))]

    def _imagine(self, a: float, c: float, k: float, growth: float, request: gr.Request) -> Update:
        try:
            run = estimate(self.find(request) or self.example)
            return theory(a, c, validate.whole_number(k, "length", 0, 16), growth, run)
        except Exception as error:
            return error_box(error)


def opening_race() -> str:
    """The HTML of the race with which the page opens; empty if it was not recorded."""
    example = TraceView("text", KeptRecordings()).example
    return render.output(example) if example is not None else ""


def _advice(run: Estimate) -> Drawing:
    return Drawing(f'<p class="or-say">{safe(advice(run))}</p>')


def _theory(run: Estimate) -> Drawing:
    return theory(run.acceptance, run.cost, round(min(run.length, 16)), run.growth, run)
