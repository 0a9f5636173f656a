"""That the page opens soon, and that nothing is left of how."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("gradio")

_LOOK = """
import ast, gc, inspect, sys
read = []
whole = ast.parse
ast.parse = lambda code, *given, **named: read.append(code) or whole(code, *given, **named)
from outrider.app.opening import soon
with soon():
    assert not gc.isenabled()
    import gradio
sources = sum(isinstance(code, str) and "(Component" in code for code in read)
print(sources, gc.isenabled(), inspect.getfile(gradio.Textbox).endswith("textbox.py"))
"""


def test_no_component_s_source_is_read_to_open_the_page() -> None:
    done = subprocess.run([sys.executable, "-c", _LOOK], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]
