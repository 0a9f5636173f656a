"""Run the notebooks and save their outputs: `python notebooks/save.py [NAME ...]`.

Saved outputs contain no machine paths, progress bars, warnings, widget state or run times. Each SVG is also saved as a
PNG, because JupyterLab shows no SVG in an untrusted notebook.
"""

from __future__ import annotations

import asyncio
import base64
import io
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

FOLDER = Path(__file__).resolve().parent
_WIDGET = "application/vnd.jupyter.widget-view+json"
_SVG, _PNG = "image/svg+xml", "image/png"
_SOLUTION = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.DOTALL)


def notebooks() -> list[Path]:
    """Return the paths of all notebooks in reading order."""
    return sorted(FOLDER.glob("[0-9][0-9]-*.ipynb"))


def solutions(notebook: Any) -> list[str]:
    """Return the code of the hidden solutions to its exercises."""
    texts = [cell.source for cell in notebook.cells if cell.cell_type == "markdown"]
    return [code for text in texts for code in _SOLUTION.findall(text)]


def run(path: Path, *, solved: bool = False, timeout: int = 600) -> Any:
    """Run a notebook in a new kernel; with `solved`, run the solutions after its last cell."""
    notebook = nbformat.read(path, as_version=4)
    if solved:
        notebook.cells += [nbformat.v4.new_code_cell(code) for code in solutions(notebook)]
    client = NotebookClient(
        notebook,
        timeout=timeout,
        kernel_name="python3",
        store_widget_state=False,
        record_timing=False,
        resources={"metadata": {"path": str(path.parent)}},
    )
    asyncio.run(client.async_execute())  # unlike execute(), closes its event loop
    return notebook


def png(drawing: str) -> str:
    """Render an SVG as a 64-colour PNG in base64."""
    from resvg import render, usvg

    options = usvg.Options.default()
    options.load_system_fonts()
    tree = usvg.Tree.from_str(drawing.replace("currentColor", "#222"), options)
    rendered = io.BytesIO(bytes(render(tree, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0))))
    compressed = io.BytesIO()
    Image.open(rendered).convert("RGB").quantize(64).save(compressed, "PNG", optimize=True)
    return base64.b64encode(compressed.getvalue()).decode()


def clean(notebook: Any) -> Any:
    """Drop stderr, widgets, timing and metadata, add PNGs, and number the cells."""
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number + 1:02}"
        if cell.cell_type != "code":
            continue
        cell.metadata.pop("execution", None)
        outputs = []
        for output in cell.outputs:
            if output.output_type == "stream" and output.name == "stderr":
                continue
            if "data" in output:
                output.data.pop(_WIDGET, None)
                shown = output.data.get("text/plain", "")
                if not set(output.data) - {"text/plain"} and ("(children=" in shown or "it/s]" in shown):
                    continue  # a bare widget, such as a progress bar
                if _SVG in output.data:
                    output.data[_PNG] = png(output.data[_SVG])
            if output.output_type == "stream" and outputs and outputs[-1].output_type == "stream":
                outputs[-1].text += output.text  # Jupyter splits a stream at arbitrary points
                continue
            outputs.append(output)
        cell.outputs = outputs
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def main(names: list[str]) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    for path in notebooks():
        if names and not any(path.name.startswith(name) for name in names):
            continue
        start = time.monotonic()
        nbformat.write(clean(run(path)), path)
        print(f"{path.name}: {time.monotonic() - start:.0f} s, {path.stat().st_size / 1e3:.0f} kB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
