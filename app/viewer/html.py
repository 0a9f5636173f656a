"""Builds the viewer's page: its scripts, its style, the narration and the bundled recordings in one HTML file.

The page runs no code but its own: a Content-Security-Policy admits its script and its style by their hashes, and data
are JSON in which `<` is escaped. Independent of models.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Mapping
from hashlib import sha256
from html import escape
from importlib import resources
from pathlib import Path

SCRIPTS = ("data.js", "engines.js", "story.js", "draw.js", "media.js", "card.js", "app.js")  # in this order
LIVE = "live.js"  # before the last of them, in a page with a model
LARGEST = 10_000_000  # bytes of a page


def page(opened: str | None = None, name: str = "", *, live: bool = False) -> str:
    """The page as HTML. `opened` is the JSON that it shows first, under this name; without it, the first chapter.
    `live`: with a part that decodes, for a folder that outrider.app.viewer.live writes."""
    scripts = (*SCRIPTS[:-1], LIVE, SCRIPTS[-1]) if live else SCRIPTS
    script = '(() => {\n"use strict";\n' + "\n".join(text(file) for file in scripts) + "\n})();"
    style = text("style.css")
    parts = {
        "policy": policy(script, style) + ("; worker-src 'self'" if live else ""),
        "style": style,
        "data": "\n".join(_data(opened, name)),
        "script": script,
    }
    html = text("index.html")
    for part, content in parts.items():
        before, mark, after = html.partition("{" + part + "}")
        assert mark, part
        html = before + content + after
    return html


def policy(script: str, style: str) -> str:
    """The Content-Security-Policy. Addresses are fetched only to open a trace that a link names."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; img-src data:; "
        "media-src data:; connect-src 'self' http: https:; base-uri 'none'; form-action 'none'"
    )


def recordings() -> dict[str, Path]:
    """The bundled recordings by name, of which the narration shows some."""
    folder = Path(str(resources.files("outrider.app"))) / "traces"
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def title(name: str) -> str:
    """A file's name as a title: text-random-numbers is "Text: random numbers"."""
    modality, _, rest = name.partition("-")
    return f"{modality.capitalize()}: {rest.replace('-', ' ')}"


def chapters() -> list[dict[str, object]]:
    """The narration: chapters with a title and paragraphs, each with the recording and the step that it shows."""
    found: list[dict[str, object]] = json.loads(text("chapters.json"))
    return found


def _data(opened: str | None, name: str) -> list[str]:
    files = recordings()
    titles: Mapping[str, str] = {file: title(file) for file in files}
    parts = [_json("titles", json.dumps(titles)), _json("chapters", json.dumps(chapters()))]
    parts += [_json(f"recording-{file}", path.read_text(encoding="utf-8").strip()) for file, path in files.items()]
    if opened is not None:
        parts.append(_json("opened", opened, f' data-name="{escape(name)}"'))
    return parts


def _json(name: str, content: str, more: str = "") -> str:
    """A block of JSON that no text within it can end."""
    escaped = content.replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}"{more}>{escaped}</script>'


def _hash(content: str) -> str:
    return f"sha256-{b64encode(sha256(content.encode()).digest()).decode()}"


def text(name: str) -> str:
    """A file of the page."""
    return resources.files("outrider.app.viewer").joinpath("page", name).read_text("utf-8")
