"""The view of a recording: output, steps, charts and race. Used for runs and for traces from files.

Puts the HTML of `render` into Gradio components. Independent of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from outrider.app.page import render
from outrider.app.page.controls import Update, redraw, visitor
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import hint
from outrider.app.page.theme import CELLS
from outrider.app.viz import trace_html

_RELEASED = "This recording was released to make room for others. Run it or open it again."
SLOWDOWN = {"real time": 1.0, "4 times slower": 4.0, "20 times slower": 20.0}


@dataclass
class TraceView:
    """The components of a view, and the updates that show a recording in them."""

    name: str
    kept: KeptRecordings
    empty: str = "Press Run."
    with_race: bool = True
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
        self.position.input(self._show_step, [self.position], views, **redraw())
        for button, move in ((back, self._back), (forward, self._forward)):
            button.click(move, [self.position], [self.position, *views], **redraw())
        for trigger in (replay.click, self.slowdown.input):
            trigger(self._replay, [self.slowdown], [self.race], **redraw())

    @property
    def outputs(self) -> list[Any]:
        components = [
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

    def find(self, request: gr.Request) -> Recording | None:
        """The recording that the visitor looks at."""
        return self.kept.find(visitor(request), self.name)

    def updates(self, recording: Recording, request: gr.Request, state: str = "", tab: str = "") -> list[Update]:
        """Keep a recording and update all components for it; `tab` is the one to select, if any."""
        self.kept.keep(visitor(request), self.name, recording)
        count = len(recording.trace.steps)
        position = gr.update(maximum=max(count, 2), value=max(count, 1))
        link = f'<a download="outrider-{recording.modality}.json" href="{recording.link()}">Download this trace</a>'
        result: list[Update] = [render.figures(recording.trace, state), render.output(recording), position]
        result += [render.step(recording, count - 1), render.charts(recording), link, render.race(recording)]
        result.append(gr.Tabs(selected=tab) if tab else gr.skip())
        return [*result, picture_pair(recording)] if self.compare is not None else result

    def partial(self, status: str | None = None, output: str | None = None) -> list[Update]:
        """Updates of the status or the output alone."""
        result: list[Update] = [gr.skip() for _ in self.outputs]
        if status is not None:
            result[0] = status
        if output is not None:
            result[1] = output
        return result

    def _show_step(self, position: float, request: gr.Request) -> list[Update]:
        return self._step(self.find(request), position)

    def _back(self, position: float, request: gr.Request) -> list[Update]:
        return self._move(self.find(request), position, -1)

    def _forward(self, position: float, request: gr.Request) -> list[Update]:
        return self._move(self.find(request), position, 1)

    def _step(self, recording: Recording | None, position: float) -> list[Update]:
        if recording is None:
            return [gr.skip(), hint(_RELEASED), gr.skip()]
        current = min(max(int(position), 1), len(recording.trace.steps)) - 1
        is_last = current == len(recording.trace.steps) - 1
        return [
            render.output(recording, None if is_last else current),
            render.step(recording, current),
            render.charts(recording, current),
        ]

    def _move(self, recording: Recording | None, position: float, by: int) -> list[Update]:
        if recording is None:
            return [gr.skip(), *self._step(recording, position)]
        new = min(max(int(position) + by, 1), len(recording.trace.steps))
        return [new, *self._step(recording, new)]

    def _replay(self, slowdown: str, request: gr.Request) -> Update:
        recording = self.find(request)
        if recording is None or recording.plain is None:
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
