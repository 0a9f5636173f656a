"""Gradio helpers that the tabs share: components for knobs and choices, settings of events, and the visitor's id.

Tabs have a fixed number of components, which are updated or hidden when another method is chosen. Independent of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import gradio as gr

from outrider.app.page.backends.interface import Choice, Knob

M = TypeVar("M", Knob, Choice)
Update = Any


def visitor(request: gr.Request | None) -> str:
    """The id of the visitor's session."""
    return str(getattr(request, "session_hash", None) or "nobody")


# For events that show their own progress. An empty `show_progress_on` matters: by default Gradio updates the status of
# every output component at every message, which took half of the browser's time during a run.
NO_PROGRESS: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": []}


def redraw(**given: Any) -> dict[str, Any]:
    """Arguments of events that only redraw: not queued, only the last of several runs, no loading animation."""
    return {"queue": False, "trigger_mode": "always_last", "api_visibility": "private", **NO_PROGRESS, **given}


def padded(items: Sequence[M], count: int) -> list[M | None]:
    """The items, filled up with None to `count`."""
    return [items[index] if index < len(items) else None for index in range(count)]


def slider(knob: Knob | None) -> Any:
    if knob is None:
        return gr.Slider(0, 1, 0, step=0.01, label="-", visible=False)
    return gr.Slider(knob.low, knob.high, knob.value, step=knob.step, label=knob.label)


def update_slider(knob: Knob | None, given: Any = None) -> Update:
    if knob is None:
        return gr.update(visible=False, minimum=0, maximum=1, value=0, label="-")
    value = (given or {}).get(knob.name, knob.value)
    return gr.update(visible=True, minimum=knob.low, maximum=knob.high, step=knob.step, value=value, label=knob.label)


def dropdown(choice: Choice | None) -> Any:
    if choice is None:
        return gr.Dropdown([], label="-", visible=False)
    return component(choice)


def update_dropdown(choice: Choice | None, given: Any = None) -> Update:
    if choice is None:
        return gr.update(visible=False, choices=[], value=None, label="-")
    value = (given or {}).get(choice.name, choice.value)
    return gr.update(visible=True, choices=list(choice.choices), value=value, label=choice.label)


def component(option: Knob | Choice) -> Any:
    if isinstance(option, Choice):
        return gr.Dropdown(list(option.choices), value=option.value, label=option.label)
    return gr.Slider(option.low, option.high, option.value, step=option.step, label=option.label)
