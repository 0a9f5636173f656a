"""A stage: what came, every step of it, its figures, and a race, for a run and for a trace that was opened alike.

Puts showing onto Gradio's components. Knows recordings, nothing of models.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import gradio as gr

from outrider.app.page import render
from outrider.app.page.controls import Update, quiet
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import remark
from outrider.app.page.theme import CELLS
from outrider.app.viz import trace_html

SLOWER = {"as it was": 1.0, "4 times slower": 4.0, "20 times slower": 20.0}


@dataclass
class TraceView:
    """What came, and every step of it: for a run and for a trace that was opened alike."""

    name: str
    invitation: str = "Press Run."
    recording: Any = None
    status: Any = None
    out: Any = None
    place: Any = None
    step: Any = None
    charts: Any = None
    save: Any = None
    tabs: Any = None
    compare: Any = None  # two pictures under one slider
    race: Any = None
    slower: Any = None
    races: int = field(default=0)
    racing: bool = True

    def build(self, legend: bool) -> None:
        self.recording = gr.State(None, time_to_live=3600)
        self.status = gr.HTML(remark(""), elem_id=f"{self.name}-status")
        self.out = gr.HTML(
            remark(self.invitation), elem_id=f"{self.name}-out", elem_classes=["or-out"], js_on_load=CELLS
        )
        if legend:
            gr.HTML(trace_html.legend())

    def build_steps(self, pictures: bool) -> None:
        with gr.Tabs(elem_id=f"{self.name}-more") as self.tabs:
            with gr.Tab("Steps", id="steps"):
                with gr.Row(equal_height=True):
                    back = gr.Button("◀ back", size="sm", min_width=70, scale=1, elem_id=f"{self.name}-back")
                    self.place = gr.Slider(
                        1,
                        2,
                        1,
                        step=1,
                        label="call of the target",
                        scale=8,
                        elem_id=f"{self.name}-step",
                        interactive=True,
                    )
                    on = gr.Button("on ▶", size="sm", min_width=70, scale=1, elem_id=f"{self.name}-on")
                self.step = gr.HTML(
                    remark("After a run, every call can be looked at here."),
                    elem_id=f"{self.name}-tree",
                    min_height=160,
                )
            with gr.Tab("Figures", id="figures"):
                self.charts = gr.HTML(
                    remark("After a run: acceptance, tokens of each call, time."),
                    elem_id=f"{self.name}-charts",
                    min_height=160,
                )
                self.save = gr.HTML("", elem_id=f"{self.name}-save")
            with gr.Tab("Race", id="race", visible=self.racing):
                with gr.Row(equal_height=True):
                    self.slower = gr.Radio(list(SLOWER), value="as it was", label="clock", scale=6)
                    again = gr.Button("Replay", size="sm", min_width=90, scale=1, elem_id=f"{self.name}-replay")
                self.race = gr.HTML(
                    remark("Press Race: plain decoding, then this drafter, with the same seed."),
                    elem_id=f"{self.name}-race",
                    min_height=200,
                )
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
        moved = [self.out, self.step, self.charts]
        self.place.input(self._look, [self.recording, self.place], moved, **quiet())
        for button, by in ((back, -1), (on, 1)):
            button.click(
                lambda recording, place, by=by: self._move(recording, place, by),
                [self.recording, self.place],
                [self.place, *moved],
                **quiet(),
            )
        for trigger in (again.click, self.slower.input):
            trigger(self._replay, [self.recording, self.slower], [self.race], **quiet())

    @property
    def outputs(self) -> list[Any]:
        found = [
            self.recording,
            self.status,
            self.out,
            self.place,
            self.step,
            self.charts,
            self.save,
            self.race,
            self.tabs,
        ]
        return [*found, self.compare] if self.compare is not None else found

    def shown(self, recording: Recording, state: str = "", tab: str = "") -> list[Update]:
        """All of it, with a tab to begin with."""
        count = len(recording.trace.steps)
        place = gr.update(maximum=max(count, 2), value=max(count, 1))
        link = f'<a download="outrider-{recording.modality}.json" href="{recording.link()}">Download this trace</a>'
        found: list[Update] = [recording, render.figures(recording.trace, state), render.made(recording), place]
        found += [render.step(recording, count - 1), render.charts(recording), link, render.race(recording)]
        found.append(gr.Tabs(selected=tab) if tab else gr.skip())
        return [*found, both(recording)] if self.compare is not None else found

    def only(self, status: str | None = None, out: str | None = None) -> list[Update]:
        """A status or what there is so far; all else stays."""
        found: list[Update] = [gr.skip() for _ in self.outputs]
        if status is not None:
            found[1] = status
        if out is not None:
            found[2] = out
        return found

    def _look(self, recording: Recording | None, place: float) -> list[Update]:
        if not isinstance(recording, Recording) or not recording.trace.steps:
            return [gr.skip()] * 3
        current = min(max(int(place), 1), len(recording.trace.steps)) - 1
        whole = current == len(recording.trace.steps) - 1
        return [
            render.made(recording, None if whole else current),
            render.step(recording, current),
            render.charts(recording, current),
        ]

    def _move(self, recording: Recording | None, place: float, by: int) -> list[Update]:
        if not isinstance(recording, Recording) or not recording.trace.steps:
            return [gr.skip()] * 4
        to = min(max(int(place) + by, 1), len(recording.trace.steps))
        return [to, *self._look(recording, to)]

    def _replay(self, recording: Recording | None, slower: str) -> Update:
        if not isinstance(recording, Recording) or recording.plain is None:
            return gr.skip()
        self.races += 1  # another text, so that the page draws it anew
        return render.race(recording, SLOWER.get(str(slower), 1.0), self.races)


def both(recording: Recording) -> Any:
    """Plain and speculative picture, for a slider between them."""
    if recording.plain is None or not recording.picture or not recording.plain.picture:
        return gr.update(visible=False, value=None)
    import io
    from base64 import b64decode

    from PIL import Image

    found = [Image.open(io.BytesIO(b64decode(one.picture)), formats=["PNG"]) for one in (recording.plain, recording)]
    if any(max(one.size) > 1024 for one in found):
        return gr.update(visible=False, value=None)
    pair = tuple(one.convert("RGB").resize((320, 320), Image.Resampling.NEAREST) for one in found)
    return gr.update(visible=True, value=pair)
