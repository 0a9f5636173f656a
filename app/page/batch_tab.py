"""The Batch tab: several prompts decoded together, a row each, with the guesses of every row in each target pass.

Runs the language model of the Text tab; the rows share the target passes.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any

import gradio as gr

from outrider.app.page import validate
from outrider.app.page.backends.interface import Backend, compatible
from outrider.app.page.controls import NO_PROGRESS, Update, redraw, visitor
from outrider.app.page.drafter_menu import drafter_menu
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.recordings import Recording, tokens_in
from outrider.app.page.run_queue import MODEL, REFUSED, RunQueue, steps_on_model_thread
from outrider.app.page.runner import PAUSE, enter, error_box, running, waiting
from outrider.app.page.trace_view import TraceView
from outrider.core.bench.runner import PLAIN
from outrider.core.errors import InvalidOption
from outrider.core.methods.rules import EXACT
from outrider.core.trace import Trace
from outrider.text import TextModel
from outrider.text.stream import Stream

_PROMPTS = """Write a Python function that reverses a string.
List the numbers from one to ten in words.
Why is the sky blue?
Write a haiku about a fast horse."""
_TOKENS, _MOST = 48, 96


def begin(lm: TextModel, lines: Sequence[str], drafter: str, tokens: int) -> Stream:
    """Decode prompts together, a row each."""
    name = None if drafter == PLAIN else drafter
    return lm.stream(list(lines), drafter=name, temperature=0, max_new_tokens=tokens, alternatives=3)


def recording_of(lm: TextModel, lines: Sequence[str], trace: Trace) -> Recording:
    names = {str(token): lm.tokens.piece(token)[:200] for token in sorted(tokens_in(trace))}
    return Recording("text", trace, "\n".join(lines), names)


def opening_run(backend: Backend) -> Recording:
    """A run with the settings that the tab opens with."""
    lm, lines = backend.load(), _PROMPTS.splitlines()
    assert isinstance(lm, TextModel)
    stream = begin(lm, lines, _first(drafter_menu(backend)), _TOKENS)
    for _ in stream:
        pass
    return recording_of(lm, lines, stream.trace)


def _first(drafters: Sequence[tuple[str, str]]) -> str:
    return next((name for _, name in drafters if name == "token-recycling"), drafters[0][1])


class BatchTab:
    """The components and the events of the tab."""

    def __init__(self, backend: Backend, queue: RunQueue, kept: KeptRecordings) -> None:
        self.backend, self.queue = backend, queue
        self.view = TraceView("batch", kept, ("text",), "Press Run: all prompts are decoded together, a row each.")

    def build(self) -> None:
        drafters = drafter_menu(self.backend)
        with gr.Column(elem_classes=["or-root"]):
            self.view.build()
            with gr.Row(elem_classes=["or-ask"]):
                self.prompts = gr.Textbox(
                    _PROMPTS,
                    label=f"Prompts, one per line, up to {validate.PROMPTS}",
                    lines=3,
                    max_lines=8,
                    scale=6,
                    min_width=240,
                    elem_id="batch-prompts",
                )
                with gr.Row(scale=2):
                    self.run = gr.Button("Run", variant="primary", min_width=60, elem_id="batch-run")
                    self.stop = gr.Button("Stop", variant="stop", min_width=60, elem_id="batch-stop")
            with gr.Row():
                self.drafter = gr.Dropdown(drafters, value=_first(drafters), label="Drafter", min_width=240)
                self.tokens = gr.Slider(1, _MOST, _TOKENS, step=1, label="Tokens of each row", min_width=150)
            self.view.build_steps()
        self.ticket = gr.State(0)
        self.run.click(self._begin, None, [self.ticket, self.view.status], **redraw()).then(
            self._run,
            [self.ticket, self.prompts, self.drafter, self.tokens],
            self.view.outputs,
            concurrency_limit=1,
            concurrency_id=MODEL,
            api_visibility="private",
            **NO_PROGRESS,
        )
        self.stop.click(self._stop, None, [self.view.status], **redraw())

    def _begin(self, request: gr.Request) -> list[Update]:
        ticket, status = enter(self.queue, visitor(request))
        if ticket != REFUSED:
            self.view.kept.begin(visitor(request), self.view.name)
        return [ticket, status]

    def _stop(self, request: gr.Request) -> Update:
        return waiting("Stopping …") if self.queue.cancel(visitor(request)) else gr.skip()

    def _run(self, ticket: int, request: gr.Request, *values: Any) -> Iterator[list[Update]]:
        yield from steps_on_model_thread(self._work(ticket, request, *values))

    def _work(
        self, ticket: int, request: gr.Request, prompts: str, drafter: str, tokens: float
    ) -> Generator[list[Update]]:
        active = partial(self.queue.is_current, visitor(request), ticket)
        if ticket == REFUSED:
            return
        try:
            lines = [line.strip() for line in validate.text(prompts, "prompts").splitlines() if line.strip()]
            if len(lines) > validate.PROMPTS:
                raise InvalidOption(f"there are {len(lines)} prompts; give at most {validate.PROMPTS}")
            validate.one_of(drafter, "drafter", [name for _, name in drafter_menu(self.backend)])
            if not compatible(drafter, EXACT.name):
                raise InvalidOption(f"the rule '{EXACT.name}' cannot verify the drafts of '{drafter}'")
            limit = validate.whole_number(tokens, "tokens", 1, _MOST)
            if not self.backend.loaded:
                yield self.view.partial(waiting(f"Loading {self.backend.description} …"))
            lm = self.backend.load()
            assert isinstance(lm, TextModel)
            stream = begin(lm, lines, drafter, limit)
            try:
                shown = time.perf_counter()
                for count, _ in enumerate(stream, 1):
                    if not active():
                        break
                    if time.perf_counter() - shown >= PAUSE["text"]:
                        yield self.view.partial(running(f"{len(lines)} rows, {count} steps …"))
                        shown = time.perf_counter()
            finally:
                stream.close()
            trace = stream.trace
            if not trace.steps:
                yield self.view.partial(running("Stopped before the first target pass."))
                return
            recording = recording_of(lm, lines, trace)
            yield self.view.updates(recording, request, f"{trace.rows} rows" + ("" if active() else ", stopped"))
        except Exception as error:
            yield self.view.partial(error_box(error))
        finally:
            if active():
                self.queue.cancel(visitor(request))
