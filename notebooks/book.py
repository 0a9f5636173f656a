"""Convert the notebooks, with their saved outputs, to static pages: `python notebooks/book.py [FOLDER]`.

Writes one page per notebook and a table of contents. The pages load nothing from the network and run no scripts:
formulas become MathML.
"""

from __future__ import annotations

import base64
import html
import re
import sys
from pathlib import Path

import nbformat
from latex2mathml.converter import convert
from nbconvert import HTMLExporter
from pygments.formatters import HtmlFormatter
from save import notebooks

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem 1.2rem 4rem; background: #fff; color: #222;
  font: 17px/1.6 "Source Sans 3", "Helvetica Neue", Arial, sans-serif; }
p, li, details { max-width: 46rem; }
h1, h2, h3 { line-height: 1.25; margin: 2.2em 0 .6em; }
h1 { margin-top: 1em; font-size: 2em; }
a { color: #0b5c92; }
a.anchor-link { visibility: hidden; text-decoration: none; padding-left: .3em; }
h1:hover a.anchor-link, h2:hover a.anchor-link, h3:hover a.anchor-link { visibility: visible; }
nav { display: flex; justify-content: space-between; gap: 1em; font-size: .9em; border-bottom: 1px solid #ddd;
  padding-bottom: .5rem; }
nav.end { border: 0; border-top: 1px solid #ddd; padding-top: .8rem; margin-top: 3rem; }
code, pre { font-family: "DejaVu Sans Mono", Menlo, Consolas, monospace; font-size: .8em; }
:not(pre) > code { background: #f3f4f6; padding: .1em .3em; border-radius: 3px; }
pre { line-height: 1.45; overflow-x: auto; margin: 0; white-space: pre; }
.highlight { background: #f6f8fa; border-left: 3px solid #c6d4e0; border-radius: 4px; padding: .7em .9em;
  margin: .8em 0 .3em; }
.output { margin: .2em 0 1em; }
.output pre { padding: .4em .9em; color: #333; white-space: pre-wrap; }
.output_svg { overflow-x: auto; }
.output svg, .output img { display: block; margin: .4em 0; }
.prompt, .jp-InputPrompt, .jp-OutputPrompt { display: none; }
details { border: 1px solid #ddd; border-radius: 6px; padding: .5em 1em; margin: .6em 0; background: #fcfcfd; }
summary { cursor: pointer; color: #0b5c92; }
table { border-collapse: collapse; margin: 1em 0; }
th, td { border: 1px solid #ddd; padding: .3em .7em; text-align: left; }
ol.contents { list-style: none; padding: 0; }
ol.contents li { margin: 1.1em 0; }
ol.contents p { margin: .2em 0; color: #555; }
"""


_MATH = re.compile(r"(```.*?```|`[^`\n]*`)|\$\$(.+?)\$\$|\$([^$\n]+)\$", re.DOTALL)  # or code, which stays as it is
_BADGE = re.compile(r"\[!\[([^]]*)\]\([^)]*\)\]\(([^)]*)\)")
_IMAGE = re.compile(r'<img alt="[^"]*" src="data:image/svg\+xml;base64,([^"]*)"[^>]*>')


def inline_svgs(body: str) -> str:
    """Replace SVG images by inline SVG, which shows tooltips."""
    return _IMAGE.sub(lambda match: base64.b64decode(match[1]).decode(), body)


def offline(source: str) -> str:
    """Markdown with its formulas as MathML, and badges as links."""

    def formula(match: re.Match[str]) -> str:
        if match[1]:
            return match[1]
        return str(convert(match[2] or match[3], display="block" if match[2] else "inline"))

    return _MATH.sub(formula, _BADGE.sub(r"[\1](\2)", source))


def title(notebook: nbformat.NotebookNode) -> str:
    return str(notebook.cells[0].source.splitlines()[0].lstrip("# "))


def summary(notebook: nbformat.NotebookNode) -> str:
    """Return its first paragraph as plain text."""
    text = re.sub(r"[*`]|\[([^]]*)\]\([^)]*\)", r"\1", notebook.cells[0].source.split("\n\n")[1])
    return text if not text.endswith(":") else text[: text.rfind(".") + 1]  # drop a sentence that introduces a list


def page(title_text: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{html.escape(title_text)}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}{HtmlFormatter(style='default').get_style_defs('.highlight')}</style></head>"
        f"<body>{body}</body></html>\n"
    )


def build(folder: Path) -> list[Path]:
    """Write all pages and return their paths, the table of contents first."""
    folder.mkdir(parents=True, exist_ok=True)
    exporter = HTMLExporter(template_name="basic", exclude_input_prompt=True, exclude_output_prompt=True)
    files = notebooks()
    loaded = [nbformat.read(path, as_version=4) for path in files]
    written, entries = [], []
    for index, (path, notebook) in enumerate(zip(files, loaded, strict=True)):
        for cell in notebook.cells:
            if cell.cell_type == "markdown":
                cell.source = offline(cell.source)
        body, _ = exporter.from_notebook_node(notebook)
        body = re.sub(r'href="([0-9][0-9]-[^"]*)\.ipynb"', r'href="\1.html"', inline_svgs(body))
        previous = following = "<span></span>"
        if index:
            previous = f'<a href="{files[index - 1].stem}.html">← {html.escape(title(loaded[index - 1]))}</a>'
        if index + 1 < len(files):
            following = f'<a href="{files[index + 1].stem}.html">{html.escape(title(loaded[index + 1]))} →</a>'
        links = f'{previous}<a href="index.html">Contents</a>{following}'
        out = folder / f"{path.stem}.html"
        out.write_text(
            page(title(notebook), f'<nav>{links}</nav>{body}<nav class="end">{links}</nav>'), encoding="utf-8"
        )
        written.append(out)
        entries.append(
            f'<li><a href="{out.name}">{html.escape(title(notebook))}</a><p>{html.escape(summary(notebook))}</p></li>'
        )
    contents_page = folder / "index.html"
    contents = (
        "<h1>Speculative decoding in lessons</h1><p>What it is, why it works, and how to add a method of "
        "your own; then one thing each, and at the end all of it timed. Read the first ten in order.</p>"
        f'<ol class="contents">{"".join(entries)}</ol>'
    )
    contents_page.write_text(page("Speculative decoding in lessons", contents), encoding="utf-8")
    return [contents_page, *written]


if __name__ == "__main__":
    pages = build(Path(sys.argv[1] if len(sys.argv) > 1 else "build/book"))
    print(f"{len(pages)} pages; begin with {pages[0]}")
