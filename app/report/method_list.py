"""`outrider methods`: every drafter, acceptance rule and retrieval method, as a list or as JSON.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import AsJson

if TYPE_CHECKING:
    from outrider.core.methods import Method


def methods(
    as_json: AsJson = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown tables: what runs where.")] = False,
) -> None:
    """List every drafter, acceptance rule and retrieval method."""
    if markdown:
        from outrider.app.report.method_table import markdown as table

        print(table(), end="")
        return
    from outrider.core.methods import DRAFTERS, RULES
    from outrider.text.rag.methods import METHODS

    if as_json:
        rows = [describe("drafter", method) for method in DRAFTERS.values()]
        rows += [describe("rule", method) for method in RULES.values()]
        rows += [describe("answering", method) for method in METHODS.values()]
        print(json.dumps(rows, indent=2, ensure_ascii=False))
    else:
        _draw_methods("Drafters", DRAFTERS)
        _draw_methods("Rules", RULES)
        _draw_methods("Answering from documents", METHODS)


def describe(kind: str, method: Method) -> dict[str, Any]:
    """A method's row as JSON data."""
    from outrider.core.methods.measured import verdicts

    return {
        "name": method.name,
        "kind": kind,
        "systems": list(method.systems),
        "summary": method.summary,
        "modalities": list(method.modalities),
        "topology": list(method.topology),
        "needs": list(method.needs),
        "inputs": {option: str(kind) for option, kind in method.inputs.items()},
        "lossless": method.lossless,
        "measured": verdicts(method),
        "options": {name: _plain(default) for name, default in method.options.items()},
        "module": method.module,
        "paper": method.paper,
    }


def _plain(value: Any) -> Any:
    """An option's default as a JSON value; what JSON cannot represent becomes text."""
    if value is None or isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value)):
        return value
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return str(value)


def _draw_methods(title: str, table: dict[str, Method]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    from outrider.core.methods.measured import verdicts

    drawn = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    drawn.add_column("name", style="cyan", no_wrap=True)
    drawn.add_column("what it does")
    drawn.add_column("drafts", no_wrap=True)
    drawn.add_column("needs" if title == "Drafters" else "keeps", no_wrap=True)
    for method in table.values():
        if method.lossless is None:
            last = ", ".join(method.needs)
        else:
            last = "[green]lossless[/]" if method.lossless else "[yellow]relaxed[/]"
        found = "".join(f"\n[dim]{modality}: {escape(said)}[/]" for modality, said in verdicts(method).items())
        drawn.add_row(method.name, escape(method.summary) + found, ", ".join(method.topology), last)
    Console().print(drawn)
