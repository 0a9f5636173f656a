"""The tab of traces: those that ship, and any that is opened; scrubbed without a model. Knows recordings and stages."""

from __future__ import annotations

from typing import Any

import gradio as gr

from outrider.app.page import recordings, validate
from outrider.app.page.controls import Update, quiet
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import fault
from outrider.app.page.trace_view import TraceView
from outrider.app.viz.svg import safe
from outrider.core.errors import InvalidOption


class TracesTab:
    """The tab."""

    def __init__(self) -> None:
        self.stage = TraceView("traces", "Choose a recorded trace, or open one of your own.")
        self.files = recordings.examples()

    def build(self) -> None:
        with gr.Row():
            with gr.Column(scale=3, min_width=320):
                self.pick = gr.Dropdown(list(self.files), value=None, label="Recorded traces", elem_id="traces-pick")
                self.upload = gr.UploadButton(
                    "Open a trace (JSON)", file_types=[".json"], type="binary", elem_id="traces-open"
                )
                self.about = gr.HTML("", elem_id="traces-about", min_height=60)
                gr.Markdown(
                    "A trace is what a run's figures are made of: every guess, chance and millisecond. Nothing of it "
                    "is executed, and no model is needed to look at it. `outrider text PROMPT --trace F` writes one."
                )
            with gr.Column(scale=7, min_width=320):
                self.stage.build(legend=True)
                self.stage.build_steps(pictures=True)
        outputs = [*self.stage.outputs, self.about]
        self.pick.input(self._picked, [self.pick], outputs, **quiet())
        self.upload.upload(self._opened, [self.upload], outputs, **quiet(trigger_mode="once"))

    def _picked(self, title: Any) -> list[Update]:
        try:
            path = self.files[validate.one_of(title, "recorded trace", self.files)]
            return self._shown(recordings.read(path.read_bytes()))
        except Exception as error:
            return [*self.stage.only(fault(error)), gr.skip()]

    def _opened(self, data: Any) -> list[Update]:
        try:
            if not isinstance(data, bytes):
                raise InvalidOption("no file came; choose a JSON file of at most 5 MB")
            return self._shown(recordings.read(data))
        except Exception as error:
            return [*self.stage.only(fault(error)), gr.skip()]

    def _shown(self, recording: Recording) -> list[Update]:
        prompt = safe(recording.prompt[:400])
        about = f'<div style="overflow-wrap:anywhere"><b>{safe(recording.modality)}</b>: {prompt}</div>'
        return [*self.stage.shown(recording, tab="steps"), about]
