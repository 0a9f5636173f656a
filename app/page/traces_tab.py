"""The Traces tab: shows bundled recordings and traces from files, step by step, without a model."""

from __future__ import annotations

from typing import Any

import gradio as gr

from outrider.app.page import recordings, validate
from outrider.app.page.controls import Update, redraw
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import error_box
from outrider.app.page.trace_view import TraceView
from outrider.app.viz.svg import safe
from outrider.core.errors import InvalidOption


class TracesTab:
    """The components and the events of the tab."""

    def __init__(self, kept: KeptRecordings) -> None:
        self.view = TraceView("traces", kept, ("text", "image"), "Choose a recorded trace, or open a file.")
        self.files = recordings.examples()

    def build(self) -> None:
        with gr.Column(elem_classes=["or-root"]):
            with gr.Row():
                self.pick = gr.Dropdown(
                    list(self.files), value=None, label="Recorded traces", min_width=240, elem_id="traces-pick"
                )
                self.upload = gr.UploadButton(
                    "Open a trace (JSON)", file_types=[".json"], type="binary", elem_id="traces-open"
                )
            self.about = gr.HTML("", elem_id="traces-about")
            self.view.build()
            self.view.build_steps()
            gr.Markdown(
                "A trace records every target pass of a run: guesses, probabilities, decisions and times. Opening one "
                "needs no model and executes nothing. `outrider text PROMPT --trace FILE` writes one."
            )
        outputs = [*self.view.outputs, self.about]
        self.pick.input(self._open_example, [self.pick], outputs, **redraw())
        one_at_a_time = redraw(queue=True, trigger_mode="once", concurrency_limit=1, concurrency_id="files")
        self.upload.upload(self._open_file, [self.upload], outputs, **one_at_a_time)

    def _open_example(self, title: Any, request: gr.Request) -> list[Update]:
        try:
            path = self.files[validate.one_of(title, "recorded trace", self.files)]
            return self._updates(recordings.read(path.read_bytes()), request)
        except Exception as error:
            return [*self.view.partial(error_box(error)), gr.skip()]

    def _open_file(self, data: Any, request: gr.Request) -> list[Update]:
        try:
            if not isinstance(data, bytes):
                raise InvalidOption("no file was received; choose a JSON file of at most 5 MB")
            return self._updates(recordings.read(data), request)
        except Exception as error:
            return [*self.view.partial(error_box(error)), gr.skip()]

    def _updates(self, recording: Recording, request: gr.Request) -> list[Update]:
        prompt = safe(recording.prompt[:400])
        about = f'<div style="overflow-wrap:anywhere"><b>{safe(recording.modality)}</b>: {prompt}</div>'
        return [*self.view.updates(recording, request, "recorded"), about]
