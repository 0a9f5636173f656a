"""That the page opens soon, and that nothing is left of how."""

from __future__ import annotations

import subprocess
import sys

import pytest

from outrider.app.page.fast_start import put_together

pytest.importorskip("gradio")

pytestmark = pytest.mark.slow
_LOOK = """
import ast, gc, inspect
read = []
whole = ast.parse
ast.parse = lambda code, *given, **named: read.append(code) or whole(code, *given, **named)
from outrider.app.page.fast_start import soon
with soon():
    assert not gc.isenabled()
    import gradio
sources = sum(isinstance(code, str) and "(Component" in code for code in read)
import jinja2
filled = jinja2.Template("{{ one }}").render(one="1")
print(sources, gc.isenabled(), inspect.getfile(gradio.Textbox).endswith("textbox.py"), filled)
"""


def test_no_component_s_source_is_read_to_open_the_page() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True", "1"]


def test_what_serves_a_page_is_made_once_it_is_opened() -> None:
    import gradio as gr

    made = gr.routes.App.create_app
    with put_together():
        with gr.Blocks() as page:
            gr.Textbox()
        page.queue()
        assert page.app is None
    assert gr.routes.App.create_app is made and made(page) is not None
