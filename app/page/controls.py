"""What tabs share of Gradio: knobs and choices as its components, events that only redraw, and who asks.

A component that is turned gets other bounds and another value, or is hidden. Knows nothing of runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import gradio as gr

from outrider.app.page.backends.interface import Choice, Knob

M = TypeVar("M", Knob, Choice)
Update = Any


def visitor(request: gr.Request | None) -> str:
    return str(getattr(request, "session_hash", None) or "nobody")


# For events that show by themselves how far they are. Without the second, every piece of news of any of them has the
# page copy all that it knows of each component that one of them ever wrote to: half of what a page costs while it runs.
UNMARKED: dict[str, Any] = {"show_progress": "hidden", "show_progress_on": []}


def quiet(**given: Any) -> dict[str, Any]:
    """For events that only redraw: at once, the last one counts, and nothing fades meanwhile."""
    return {"queue": False, "trigger_mode": "always_last", "api_visibility": "private", **UNMARKED, **given}


def padded(found: Sequence[M], count: int) -> list[M | None]:
    return [found[place] if place < len(found) else None for place in range(count)]


def slider(knob: Knob | None) -> Any:
    if knob is None:
        return gr.Slider(0, 1, 0, step=0.01, label="-", visible=False)
    return gr.Slider(knob.low, knob.high, knob.value, step=knob.step, label=knob.label)


def turned(knob: Knob | None, given: Any = None) -> Update:
    if knob is None:
        return gr.update(visible=False, minimum=0, maximum=1, value=0, label="-")
    value = (given or {}).get(knob.name, knob.value)
    return gr.update(visible=True, minimum=knob.low, maximum=knob.high, step=knob.step, value=value, label=knob.label)


def dropdown(choice: Choice | None) -> Any:
    if choice is None:
        return gr.Dropdown([], label="-", visible=False)
    return component(choice)


def reworded(choice: Choice | None, given: Any = None) -> Update:
    if choice is None:
        return gr.update(visible=False, choices=[], value=None, label="-")
    value = (given or {}).get(choice.name, choice.value)
    return gr.update(visible=True, choices=list(choice.choices), value=value, label=choice.label)


def component(one: Knob | Choice) -> Any:
    if isinstance(one, Choice):
        return gr.Dropdown(list(one.choices), value=one.value, label=one.label)
    return gr.Slider(one.low, one.high, one.value, step=one.step, label=one.label)
