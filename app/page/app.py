"""The page: text, image and speech, the lab, theory and traces, on one address of this machine.

`build` puts the parts together, `serve` opens it. Nothing is loaded before somebody asks for it, nothing is fetched by
the page, one run computes at a time, and what waits is bounded. Besides the page there is one endpoint a modality for
programs: /text, /image and /speech.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gradio as gr

from outrider.app.page import theme, validate
from outrider.app.page.backends.image import Pictures
from outrider.app.page.backends.interface import Backend, Named, checked
from outrider.app.page.backends.speech import Speech
from outrider.app.page.backends.text import Text
from outrider.app.page.backends.vllm import Served
from outrider.app.page.compare_tab import CompareTab
from outrider.app.page.controls import UNMARKED, visitor
from outrider.app.page.modality_tab import Panel
from outrider.app.page.recordings import Modality, Recording
from outrider.app.page.run_queue import LANE, RunQueue, laned
from outrider.app.page.runner import fault
from outrider.app.page.theory_tab import build_theory
from outrider.app.page.traces_tab import TracesTab
from outrider.core.errors import InvalidOption, OutriderError
from outrider.core.methods.rules import EXACT

PANELS = ("text", "image", "speech", "lab", "theory", "traces")


def subjects(device: str = "cpu", dtype: str | None = None, weights: Path | None = None) -> dict[str, Backend]:
    """The three modalities. `weights` is a folder whose folders `image` and `speech` hold weights of one's own."""
    image, speech = (None if weights is None else weights / one for one in ("image", "speech"))
    return {
        "text": Text(device=device, dtype=dtype or "bfloat16"),
        "image": Pictures(device=device, folder=image),
        "speech": Speech(device=device, folder=speech),
    }


def build(found: Mapping[str, Backend] | None = None, lab: Mapping[str, Backend] | None = None) -> gr.Blocks:
    """The page, ready to be opened. `lab`: what the lab measures, if other than what the panels show."""
    found = subjects() if found is None else found
    tickets = RunQueue()
    panels = {name: Panel(one, tickets) for name, one in found.items()}
    with gr.Blocks(title=theme.TITLE, analytics_enabled=False, delete_cache=(3600, 3600)) as page:
        gr.HTML(theme.HEAD)
        with gr.Tabs(elem_id="panels") as tabs:
            for name, panel in panels.items():
                with gr.Tab(panel.subject.title, id=name, elem_id=f"tab-{name}"):
                    panel.build()
            with gr.Tab("Lab", id="lab"):
                CompareTab(lab or found, tickets).build()
            with gr.Tab("Theory", id="theory"):
                build_theory()
            with gr.Tab("Traces", id="traces"):
                TracesTab().build()
        outputs = [part for panel in panels.values() for part in (*panel.inputs, panel.about)]

        def linked(request: gr.Request) -> list[Any]:
            query = {key[:40]: value[: validate.PROMPT] for key, value in list(dict(request.query_params).items())[:40]}
            wanted = query.get("panel")
            shown = gr.Tabs(selected=wanted) if wanted in PANELS else gr.skip()
            return [shown, *(update for panel in panels.values() for update in panel.linked(query))]

        page.load(linked, None, [tabs, *outputs], queue=False, api_visibility="private", **UNMARKED)

        def left(request: gr.Request) -> None:
            tickets.give_back(visitor(request))

        page.unload(left)
        for name, one in found.items():
            gr.api(endpoint(one), api_name=name, concurrency_limit=1, concurrency_id=LANE)
    page.queue(max_size=validate.WAITING, default_concurrency_limit=4)
    return page


def endpoint(subject: Backend) -> Callable[..., dict[str, Any]]:
    """What programs call."""

    def run(
        prompt: str,
        drafter: str = subject.usual,
        rule: str = EXACT.name,
        temperature: float = subject.heat,
        seed: int = 0,
        options: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """One run from beginning to end. `drafter` is "plain" or one of the panel's; `options` may hold the modality's
        own (max_new_tokens; guidance_scale, style; speed), "drafter_options" and "rule_options". Returns the recording
        (trace, names of tokens, image or sound in base64) and the summary of its trace."""
        given = {"prompt": prompt, "drafter": drafter, "rule": rule, "temperature": temperature, "seed": seed}

        def made() -> Recording:
            subject.load()
            live = subject.begin(checked(subject, {**(options or {}), **given}))
            try:
                for _ in live:
                    pass
                return live.recording()
            finally:
                live.close()

        try:
            if options is not None and not isinstance(options, dict):
                raise InvalidOption("options are an object of names and values")
            recording = laned(made)
        except OutriderError as error:
            raise gr.Error(str(error)[:600], print_exception=False) from None
        except Exception as error:
            fault(error)
            raise gr.Error("something unexpected went wrong; the terminal says more", print_exception=False) from None
        from dataclasses import asdict

        summary = asdict(recording.trace.summary())
        words = (
            "".join(recording.name(token) for token in recording.trace.tokens()) if subject.name == "text" else prompt
        )
        return {"text": words, "summary": summary, "recording": json.loads(recording.to_json())}

    return run


def serve(
    *,
    port: int | None = None,
    browser: bool = True,
    device: str = "cpu",
    dtype: str | None = None,
    weights: Path | None = None,
    found: Mapping[str, Backend] | None = None,
    vllm: str | None = None,
    published: Mapping[Modality, Named] | None = None,
) -> tuple[gr.Blocks, str]:
    """Open the page, on this machine alone: the page and its address. `close` ends it, `block_thread` waits. `vllm` is
    the address of a server that the text panel asks instead of a model of ours; `published` names the models
    that the image and the speech panel show in place of ours, read before the page opens; the lab measures ours all the
    same."""
    ours = found or subjects(device, dtype, weights)
    shown = dict(ours)
    if vllm:
        shown["text"] = Served(vllm)
    precision = "float32" if device == "cpu" else "bfloat16"
    for name, named in (published or {}).items():
        shown[name] = (Pictures if name == "image" else Speech)(device=device, dtype=precision, named=named)
        laned(shown[name].load)
    page = build(shown, ours)
    _, address, _ = page.launch(
        server_name="127.0.0.1",
        server_port=port,
        share=False,
        inbrowser=browser,
        quiet=True,
        prevent_thread_lock=True,
        max_file_size=validate.FILE,
        allowed_paths=[],
        footer_links=["api"],
        ssr_mode=False,
        theme=theme.theme(),
        css=theme.CSS,
        enable_monitoring=False,
        pwa=False,
    )
    return page, address
