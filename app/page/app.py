"""The page: tabs for text, image and speech, for measuring drafters and for traces.

It is served on 127.0.0.1, or on another address with a password, behind the layers of `guard`. Models are loaded on
first use, the language model when a browser first opens the page. The page loads nothing from elsewhere, one run
computes at a time, and the queue is bounded. Programs can call one endpoint for each modality: /text, /image and
/speech.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import gradio as gr

from outrider.app.page import device_load, theme, validate
from outrider.app.page.backends.image import ImageBackend
from outrider.app.page.backends.interface import Backend, ModelSpec, checked
from outrider.app.page.backends.speech import SpeechBackend
from outrider.app.page.backends.text import MODEL as LANGUAGE_MODEL
from outrider.app.page.backends.text import TextBackend
from outrider.app.page.backends.vllm import VllmBackend
from outrider.app.page.batch_tab import BatchTab
from outrider.app.page.controls import NO_PROGRESS, redraw, visitor
from outrider.app.page.first_view import FirstView, first_view
from outrider.app.page.guard import guarded
from outrider.app.page.guard.access import LOCAL, Access
from outrider.app.page.guard.limits import Limits
from outrider.app.page.guard.sessions import abandoned, bound_sessions, forget, waiting_runs
from outrider.app.page.kept_recordings import KeptRecordings
from outrider.app.page.lab_tab import LabTab
from outrider.app.page.modality_tab import ModalityTab
from outrider.app.page.recordings import Modality, Recording
from outrider.app.page.run_queue import MODEL, RunQueue, on_model_thread, soon_on_model_thread
from outrider.app.page.runner import error_box
from outrider.app.page.trace_view import opening_race
from outrider.app.page.traces_tab import TracesTab
from outrider.app.viz.words import words
from outrider.core.assets.catalogue import ASSETS
from outrider.core.device import AUTO, device_name, return_freed_memory, share_arenas, usable_device, usual_dtype
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods.rules import EXACT

_RETURN_SECONDS = 60.0  # after which freed memory is given back

TABS = {name: name for name in ("text", "image", "speech", "lab", "batch", "traces")} | {
    "compare": "lab",
    "theory": "text",
}


def backends(
    device: str = "cpu", dtype: str | None = None, weights: Path | None = None, text: ModelSpec | None = None
) -> dict[str, Backend]:
    """The backends of the three modalities. `weights` may contain your own weights in folders `image` and `speech`;
    `text` names another language model."""
    image, speech = (None if weights is None else weights / name for name in ("image", "speech"))
    usual = _precision(device)
    return {
        "text": TextBackend(device=device, dtype=_precision(device, dtype), spec=text),
        "image": ImageBackend(device=device, dtype=usual, folder=image),
        "speech": SpeechBackend(device=device, dtype=usual, folder=speech),
    }


def _precision(device: str, dtype: str | None = None) -> str:
    return usual_dtype(usable_device(device)) if dtype is None or dtype == AUTO else dtype


def build(
    shown: Mapping[str, Backend] | None = None,
    compared: Mapping[str, Backend] | None = None,
    device: str = "cpu",
    dtype: str | None = None,
    opened: Callable[[], None] = lambda: None,
) -> gr.Blocks:
    """The page, whose models run on `device`, the language model in `dtype` (by default the device's usual one).
    `shown` are the backends of the modality tabs, `compared` of the Lab tab (by default the same). `opened` is called
    when a visitor's browser has built the page."""
    shown = backends() if shown is None else shown
    kept = KeptRecordings()
    chip_now = partial(device_load.chip, device_name(device), _precision(device, dtype))
    queue = RunQueue(validate.WAITING, lambda: waiting_runs(page))
    tabs = {name: ModalityTab(backend, queue, kept) for name, backend in shown.items()}
    with gr.Blocks(title=theme.TITLE, analytics_enabled=False, delete_cache=(600, 600)) as page:
        with gr.Row(elem_classes=["or-head"]):
            gr.HTML(theme.HEAD, js_on_load=theme.script())
            chip = gr.HTML(chip_now(), elem_id="device-chip")
        with gr.Tabs(elem_id="tabs") as container:
            for name, tab in tabs.items():
                with gr.Tab(tab.backend.title, id=name, elem_id=f"tab-{name}") as shown_tab:
                    tab.build(opened=name == "text")
                if name != "text":
                    shown_tab.select(tab.view.open_example, None, tab.view.outputs, **redraw())
            lab, batch = LabTab(compared or shown, queue, kept), BatchTab((compared or shown)["text"], queue, kept)
            with gr.Tab("Lab", id="lab") as shown_tab:
                lab.build()
            shown_tab.select(lab.open_example, None, [lab.output], **redraw())
            with gr.Tab("Batch", id="batch") as shown_tab:
                batch.build()
            shown_tab.select(batch.view.open_example, None, batch.view.outputs, **redraw())
            with gr.Tab("Traces", id="traces"):
                TracesTab(kept).build()
        with gr.Accordion("Words", open=False, elem_id="words"):
            gr.HTML(words())
        outputs = [chip, *(part for tab in tabs.values() for part in tab.linked)]

        def apply_query(request: gr.Request) -> list[Any]:
            query = {key[:40]: value for key, value in list(dict(request.query_params).items())[:40]}
            selected = gr.Tabs(selected=TABS[query["panel"]]) if query.get("panel") in TABS else gr.skip()
            updates = (update for tab in tabs.values() for update in tab.from_query(query))
            opened()
            return [selected, chip_now(), *updates]

        page.load(apply_query, None, [container, *outputs], queue=False, api_visibility="private", **NO_PROGRESS)

        def release(request: gr.Request) -> None:
            queue.cancel(visitor(request))
            kept.forget(visitor(request))
            forget(page, visitor(request))

        page.unload(release)
        for name, backend in shown.items():
            gr.api(
                endpoint(backend, partial(abandoned, page)), api_name=name, concurrency_limit=1, concurrency_id=MODEL
            )
    page.queue(max_size=validate.WAITING, default_concurrency_limit=4, api_open=False)
    return page


def endpoint(backend: Backend, abandoned: Callable[[str], bool]) -> Callable[..., dict[str, Any]]:
    """The function that programs call for a modality. `abandoned` says whether a session's program has left."""

    def run(
        request: gr.Request,
        prompt: str,
        drafter: str = backend.default_drafter,
        rule: str = EXACT.name,
        temperature: float = backend.default_temperature,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One complete run. `drafter` is "plain" or a drafter of the tab; `options` may contain options of the modality
        (max_new_tokens; guidance_scale, style; speed), "drafter_options" and "rule_options". Returns the text, the
        summary of the trace, and the recording (trace, token texts, image or sound in base64)."""
        given = {"prompt": prompt, "drafter": drafter, "rule": rule, "temperature": temperature, "seed": seed}

        def record() -> Recording:
            backend.load()
            live = backend.begin(checked(backend, {**(options or {}), **given}))
            try:
                for _ in live:
                    if abandoned(visitor(request)):
                        break
                return live.recording()
            finally:
                live.close()

        try:
            if options is not None and not isinstance(options, dict):
                raise InvalidOption("options must be a JSON object of option names and values")
            recording = on_model_thread(record)
        except OutriderError as error:
            raise gr.Error(str(error)[:600], print_exception=False) from None
        except Exception as error:
            error_box(error)  # logs it
            raise gr.Error("unexpected error; see the server's terminal", print_exception=False) from None
        from dataclasses import asdict

        summary = asdict(recording.trace.summary())
        text = prompt
        if backend.name == "text":
            text = "".join(recording.name(token) for token in recording.trace.tokens())
        return {"text": text, "summary": summary, "recording": json.loads(recording.to_json())}

    return run


def _ahead(text: Backend) -> None:
    """Load the language model and decode a step while the visitor reads, so that the first run need not prepare
    anything; not if the model had to be fetched."""

    def prepare() -> None:
        text.load()
        live = text.begin(checked(text, {"prompt": text.examples[0]}))
        next(live)
        live.close()

    if not text.loaded and ASSETS[LANGUAGE_MODEL].here:
        soon_on_model_thread(prepare)


def serve(
    *,
    port: int | None = None,
    browser: bool = True,
    device: str = "cpu",
    dtype: str | None = None,
    weights: Path | None = None,
    own: Mapping[str, Backend] | None = None,
    vllm: str | None = None,
    published: Mapping[Modality, ModelSpec] | None = None,
    access: Access = LOCAL,
) -> tuple[gr.Blocks, str]:
    """Open the page; the page and its address. `page.close()` ends it, `page.block_thread()` waits.

    `access` says where it listens and whom it answers. `vllm` is the address of a vLLM server that runs the Text tab;
    `published` are the published models of tabs, loaded before the page opens. The Lab tab measures the language
    model of the Text tab, and our own image and speech models (`own`) in any case."""
    share_arenas()  # before there are threads
    published = dict(published or {})
    language_model = published.pop("text", None)
    ours = own or backends(device, dtype, weights, language_model)
    if language_model is not None:
        on_model_thread(ours["text"].load)
    shown = dict(ours)
    if vllm:
        shown["text"] = VllmBackend(vllm)
    precision = "float32" if device == "cpu" else _precision(device)
    for name, named in published.items():
        shown[name] = (ImageBackend if name == "image" else SpeechBackend)(device=device, dtype=precision, spec=named)
        on_model_thread(shown[name].load)
    usual = own is None and language_model is None and not vllm
    page = build(shown, ours, device, dtype, partial(_ahead, ours["text"]) if usual else lambda: None)

    @asynccontextmanager
    async def lifespan(app: Any) -> AsyncIterator[None]:
        bound_sessions(page, app)
        race = opening_race()
        inner = FirstView(app.middleware_stack, first_view(race)) if race else app.middleware_stack
        limits = Limits(inner, validate.FILE + 10_000)
        app.middleware_stack = guarded(limits, access.hosts, access.password)  # outside Gradio's own layers
        returning = asyncio.create_task(_return_memory())
        yield
        returning.cancel()

    _, address, _ = page.launch(
        server_name=f"[{access.host}]" if ":" in access.host else access.host,
        server_port=port,
        share=False,
        inbrowser=browser,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=validate.FILE,
        allowed_paths=[],
        app_kwargs={"lifespan": lifespan},
        footer_links=["api"],
        ssr_mode=False,
        theme=theme.theme(),
        css=theme.style(),
        enable_monitoring=False,
        pwa=False,
    )
    return page, address


async def _return_memory() -> None:
    """So that the memory of the page is not that of the most that was ever open at once."""
    while True:
        await asyncio.sleep(_RETURN_SECONDS)
        await asyncio.to_thread(return_freed_memory)
