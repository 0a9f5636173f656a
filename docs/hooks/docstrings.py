"""A Griffe extension that prepares docstrings and comments for the API reference.

Interactive examples become code blocks, and the comment beside a field becomes its description.
"""

from __future__ import annotations

import re
from typing import Any

import griffe

_COMMENT = re.compile(r"  # (?!type:|noqa)(.+)$")


class Docstrings(griffe.Extension):
    """Rewrites the docstrings of all objects that Griffe reads."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)

    def on_attribute(self, *, attr: griffe.Attribute, **_: Any) -> None:
        if attr.docstring is None and attr.endlineno and isinstance(attr.parent, griffe.Class):
            comment = _COMMENT.search(attr.parent.lines_collection[attr.filepath][attr.endlineno - 1])
            if comment:
                attr.docstring = griffe.Docstring(comment[1], parent=attr)


def fenced(text: str) -> str:
    """Wrap each run of lines from a `>>>` to the next blank line in a code block; elsewhere `a[i][j]` is no link."""
    parts = re.split(r"\n\n(?=>>> )", text.replace("][", "]\\["))
    examples = [part.partition("\n\n") for part in parts[1:]]
    return "\n\n".join([parts[0], *(f"```pycon\n{code}\n```\n\n{rest}".rstrip() for code, _, rest in examples)])
