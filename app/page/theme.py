"""The theme of the page, its heading, and its script and style sheet, which are files of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

TITLE = "Outrider"
HEAD = """<h1>Outrider</h1><p class="or-tagline">A fast drafter guesses; the target model checks all guesses in one
pass.</p>"""


def file(name: str) -> Path:
    """A file of the page: its script, its style sheet, and what its tabs open with."""
    return Path(__file__).with_name("static") / name


def script() -> str:
    """The script of replays, steppers and cards."""
    return file("page.js").read_text()


def style() -> str:
    """The style sheet."""
    return file("page.css").read_text()


CELLS = """element.addEventListener('click', (event) => {
  const cell = event.target.closest('[data-cell]');
  if (cell) trigger('click', {cell: Number(cell.dataset.cell)});
});"""


def theme() -> Any:
    """Gradio's base theme with system fonts, so that no font is downloaded."""
    import gradio as gr

    return gr.themes.Base(
        primary_hue=gr.themes.colors.sky,
        neutral_hue=gr.themes.colors.slate,
        font=("system-ui", "-apple-system", "Segoe UI", "DejaVu Sans", "sans-serif"),
        font_mono=("ui-monospace", "Consolas", "monospace"),
    ).set(
        button_primary_background_fill="#0072B2",
        button_primary_background_fill_dark="#0072B2",
        button_primary_text_color="white",
    )
