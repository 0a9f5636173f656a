"""The page's theme and style sheet, for light and dark, wide and narrow screens.

Replays are CSS animations: each token carries its time (--at), so that they need no script.
"""

from __future__ import annotations

from typing import Any

TITLE = "Outrider"
HEAD = """<div class="or-head"><h1>Outrider</h1><p>A fast drafter proposes several tokens; the target model checks
all of them in one pass. See what was drafted, what was accepted, and why.</p>
<p class="or-device">Runs on {device}.</p></div>"""

CSS = """
.gradio-container { width: 100%; max-width: 1480px !important; margin: 0 auto !important; --or-veil: #d9dee5; }
.dark .gradio-container, .dark.gradio-container, .dark { --or-veil: #2b3240; }
.or-head { display: flex; gap: 18px; align-items: baseline; flex-wrap: wrap; padding: 4px 2px; }
.or-head h1 { font-size: 1.5rem; font-weight: 700; margin: 0; letter-spacing: -.01em; }
.or-head p { margin: 0; opacity: .75; }
.or-figures { display: flex; flex-wrap: wrap; gap: 6px 18px; align-items: center; min-height: 32px; }
.or-figures b { font-variant-numeric: tabular-nums; font-size: 1.1em; }
.or-where { opacity: .65; font-size: .85em; min-height: 1.4em; overflow-wrap: anywhere; }
.or-state { font-weight: 600; }
.or-out { min-height: 220px; }
.or-tokens { font-size: 1.05rem; min-height: 200px; }
.or-tokens .or-t:focus { outline: 2px solid currentColor; outline-offset: 1px; }
.or-tokens .or-t:focus::after { content: attr(title); position: fixed; left: 0; right: 0; bottom: 0; z-index: 50;
  padding: 10px 16px; background: var(--body-background-fill); color: var(--body-text-color);
  border-top: 2px solid currentColor; font-size: .92rem; text-decoration: none; display: block; opacity: 1;
  white-space: normal; box-shadow: 0 -6px 24px rgba(0,0,0,.18); }
.or-empty { opacity: .6; padding: 18px 4px; }
.or-error { border-left: 4px solid #D55E00; padding: 8px 12px; background: #D55E0018; border-radius: 4px; }
.or-caption { margin: 2px 0 8px; opacity: .85; }
.or-card { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 10px 12px; height: 100%; }
.or-card h4 { margin: 0 0 6px; font-size: .92rem; font-weight: 600; }
.or-wide { overflow-x: auto; }
.or-table { border-collapse: collapse; font-size: .88rem; margin-top: 10px; font-variant-numeric: tabular-nums; }
.or-table, .or-table tr, .or-table th, .or-table td { border: 0 !important; }
.or-table th, .or-table td { padding: 2px 14px 2px 0 !important; text-align: left; white-space: pre; }
.or-table th { opacity: .6; font-weight: 500; }
.or-lanes { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(340px, 100%), 1fr)); gap: 18px; }
.or-lane { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 10px 12px; min-width: 0; }
.or-lane-head { margin-bottom: 6px; }
.or-track { height: 8px; border-radius: 4px; background: color-mix(in srgb, currentColor 12%, transparent);
  margin-bottom: 10px; }
.or-run { height: 8px; border-radius: 4px; background: #0072B2; width: var(--share);
  animation: or-run var(--takes) linear; }
.or-race .or-t, .or-late { opacity: 0; animation: or-show .01s linear var(--at) forwards; }
.or-lift { animation: or-hide .01s linear var(--at) forwards; }
.or-player { display: flex; gap: 10px; align-items: center; margin-top: 8px; flex-wrap: wrap; }
.or-player audio { max-width: 100%; height: 36px; }
.or-load { height: 4px; border-radius: 2px; overflow: hidden; margin-top: 8px;
  background: color-mix(in srgb, currentColor 14%, transparent); }
.or-load div { height: 4px; width: 30%; background: #0072B2; animation: or-slide 1.2s ease-in-out infinite alternate; }
.or-patches { display: flex; flex-wrap: wrap; gap: 8px; }
.or-patches figure { margin: 0; text-align: center; font-size: .75rem; }
.or-patches img { width: 48px; height: 48px; image-rendering: pixelated; border-radius: 4px; }
[data-cell] { cursor: pointer; }
@keyframes or-run { from { width: 0; } to { width: var(--share); } }
@keyframes or-show { to { opacity: 1; } }
@keyframes or-hide { to { opacity: 0; } }
@keyframes or-slide { from { margin-left: 0; } to { margin-left: 70%; } }
@media (prefers-reduced-motion: reduce) {
  .or-race .or-t, .or-late { animation: none; opacity: 1; }
  .or-lift { animation: none; opacity: 0; }
  .or-run, .or-load div { animation: none; }
}
@media (max-width: 640px) {
  .gradio-container .row > .column { flex: 1 1 100% !important; min-width: 0 !important; max-width: 100%; }
  .gradio-container { padding: 6px !important; }
  .or-head p { display: none; }
  .or-tokens { font-size: 1rem; }
}
"""

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
