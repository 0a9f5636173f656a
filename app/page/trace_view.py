"""The view of a recording: output, steps, charts and race. Used for runs and for traces from files.

Puts the HTML of `render` into Gradio components. Independent of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from outrider.app.page import render
from outrider.app.page.controls import Update, redraw
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import hint
from outrider.app.page.theme import CELLS
from outrider.app.viz import trace_html

SLOWDOWN = {"real time": 1.0, "4 times slower": 4.0, "20 times slower": 20.0}


@dataclass
class TraceView:
    """The components of a view, and the updates that show a recording in them."""

    name: str
    empty: str = "Press Run."
    with_race: bool = True
    recording: Any = None
    status: Any = None
    output: Any = None
    position: Any = None  # the slider over target passes
    step: Any = None
    charts: Any = None
    save: Any = None
    tabs: Any = None
    compare: Any = None  # two images under one slider
    race: Any = None
    slowdown: Any = None
    replays: int = field(default=0)

    def build(self, legend: bool) -> None:
        self.recording = gr.State(None, time_to_live=3600)
        self.status = gr.HTML(hint(""), elem_id=f"{self.name}-status")
        self.output = gr.HTML(hint(self.empty), elem_id=f"{self.name}-out", elem_classes=["or-out"], js_on_load=CELLS)
        if legend:
            gr.HTML(trace_html.legend())

    def build_steps(self, pictures: bool) -> None:
        with gr.Tabs(elem_id=f"{self.name}-more") as self.tabs:
            with gr.Tab("Steps", id="steps"):
                with gr.Row(equal_height=True):
                    back = gr.Button("◀ Back", size="sm", min_width=70, scale=1, elem_id=f"{self.name}-back")
                    self.position = gr.Slider(
                        1,
                        2,
                        1,
                        step=1,
                        label="Target pass",
                        scale=8,
                        elem_id=f"{self.name}-step",
                        interactive=True,
                    )
                    forward = gr.Button("Next ▶", size="sm", min_width=70, scale=1, elem_id=f"{self.name}-next")
                self.step = gr.HTML(
                    hint("After a run, this shows the draft and the decisions of every target pass."),
                    elem_id=f"{self.name}-tree",
                    min_height=160,
                )
            with gr.Tab("Charts", id="charts"):
                self.charts = gr.HTML(
                    hint("After a run, this shows tokens per target pass, acceptance, and time."),
                    elem_id=f"{self.name}-charts",
                    min_height=160,
                )
                self.save = gr.HTML("", elem_id=f"{self.name}-save")
            with gr.Tab("Race", id="race", visible=self.with_race):
                with gr.Row(equal_height=True):
                    self.slowdown = gr.Radio(list(SLOWDOWN), value="real time", label="Replay speed", scale=6)
                    replay = gr.Button("Replay", size="sm", min_width=90, scale=1, elem_id=f"{self.name}-replay")
                self.race = gr.HTML(hint(render.NO_RACE), elem_id=f"{self.name}-race", min_height=200)
                if pictures:
                    self.compare = gr.ImageSlider(
                        label="plain | speculative",
                        type="pil",
                        interactive=False,
                        visible=False,
                        max_height=400,
                        elem_id=f"{self.name}-compare",
                        format="png",
                    )
        views = [self.output, self.step, self.charts]
        self.position.input(self._show_step, [self.recording, self.position], views, **redraw())
        for button, by in ((back, -1), (forward, 1)):
            button.click(
                lambda recording, position, by=by: self._move(recording, position, by),
                [self.recording, self.position],
                [self.position, *views],
                **redraw(),
            )
        for trigger in (replay.click, self.slowdown.input):
            trigger(self._replay, [self.recording, self.slowdown], [self.race], **redraw())

    @property
    def outputs(self) -> list[Any]:
        components = [
            self.recording,
            self.status,
            self.output,
            self.position,
            self.step,
            self.charts,
            self.save,
            self.race,
            self.tabs,
        ]
        return [*components, self.compare] if self.compare is not None else components

    def updates(self, recording: Recording, state: str = "", tab: str = "") -> list[Update]:
        """Updates of all components for a recording; `tab` is the one to select, if any."""
        count = len(recording.trace.steps)
        position = gr.update(maximum=max(count, 2), value=max(count, 1))
        link = f'<a download="outrider-{recording.modality}.json" href="{recording.link()}">Download this trace</a>'
        result: list[Update] = [recording, render.figures(recording.trace, state), render.output(recording), position]
        result += [render.step(recording, count - 1), render.charts(recording), link, render.race(recording)]
        result.append(gr.Tabs(selected=tab) if tab else gr.skip())
        return [*result, picture_pair(recording)] if self.compare is not None else result

    def partial(self, status: str | None = None, output: str | None = None) -> list[Update]:
        """Updates of the status or the output alone."""
        result: list[Update] = [gr.skip() for _ in self.outputs]
        if status is not None:
            result[1] = status
        if output is not None:
            result[2] = output
        return result

    def _show_step(self, recording: Recording | None, position: float) -> list[Update]:
        if not isinstance(recording, Recording) or not recording.trace.steps:
            return [gr.skip()] * 3
        current = min(max(int(position), 1), len(recording.trace.steps)) - 1
        is_last = current == len(recording.trace.steps) - 1
        return [
            render.output(recording, None if is_last else current),
            render.step(recording, current),
            render.charts(recording, current),
        ]

    def _move(self, recording: Recording | None, position: float, by: int) -> list[Update]:
        if not isinstance(recording, Recording) or not recording.trace.steps:
            return [gr.skip()] * 4
        new = min(max(int(position) + by, 1), len(recording.trace.steps))
        return [new, *self._show_step(recording, new)]

    def _replay(self, recording: Recording | None, slowdown: str) -> Update:
        if not isinstance(recording, Recording) or recording.plain is None:
            return gr.skip()
        self.replays += 1  # changes the HTML, so that the browser restarts the animations
        return render.race(recording, SLOWDOWN.get(str(slowdown), 1.0), self.replays)


def picture_pair(recording: Recording) -> Any:
    """The images of plain and speculative decoding, for a slider between them."""
    if recording.plain is None or not recording.picture or not recording.plain.picture:
        return gr.update(visible=False, value=None)
    import io
    from base64 import b64decode

    from PIL import Image

    data = (recording.plain.picture, recording.picture)
    try:
        pictures = [Image.open(io.BytesIO(b64decode(picture)), formats=["PNG"]) for picture in data]
        if any(max(picture.size) > 1024 for picture in pictures):
            return gr.update(visible=False, value=None)
        pair = tuple(picture.convert("RGB").resize((320, 320), Image.Resampling.NEAREST) for picture in pictures)
    except (OSError, ValueError, SyntaxError):  # of a damaged file
        return gr.update(visible=False, value=None)
    return gr.update(visible=True, value=pair)
