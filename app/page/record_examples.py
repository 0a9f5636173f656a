"""Records what the page opens with: `python -m outrider.app.page.record_examples [DEVICE [FOLDER [NAME ...]]]`.

Each example is a run beside plain decoding with the installed models; examples whose models are missing are skipped
with a message. The rows of the Batch tab (`batch`) and a result of the Lab (`lab`) are recorded too, into the page's
own files, unless the folder is another than that of the bundled traces. NAMEs record some alone.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from outrider.app.page import theme
from outrider.app.page.backends.interface import Backend, checked
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import race
from outrider.core.assets.files import write_atomically
from outrider.core.bench.other_load import Others
from outrider.core.bench.processor import processor
from outrider.core.errors import OutriderError, unknown

EXAMPLES: Mapping[str, tuple[str, Mapping[str, Any]]] = {  # file name -> modality and settings
    "text-writing-code": (
        "text",
        {
            "prompt": "Write a Python class Point with x and y, add, subtract and multiply methods.",
            "drafter": "auto",
            "max_new_tokens": 96,
        },
    ),
    "text-a-trained-head-writes-code": (
        "text",
        {
            "prompt": "Write a Python class Point with x and y, add, subtract and multiply methods.",
            "drafter": "eagle3",
            "max_new_tokens": 96,
        },
    ),
    "text-copying-its-input": (
        "text",
        {
            "prompt": "Copy this list exactly: apple, banana, cherry, date, elderberry, fig, grape, honeydew, kiwi, "
            "lemon, mango, nectarine, orange, papaya.",
            "drafter": "prompt-lookup",
            "max_new_tokens": 64,
        },
    ),
    "text-a-surprised-drafter": (
        "text",
        {"prompt": "Write a haiku about a fast horse.", "drafter": "token-recycling", "temperature": 0.8, "seed": 4},
    ),
    "text-copying-prompt-lookup": (
        "text",
        {
            "prompt": "Repeat this sentence three times: the quick brown fox jumps over the lazy dog.",
            "drafter": "prompt-lookup",
            "max_new_tokens": 48,
        },
    ),
    "text-a-small-model-drafts": (
        "text",
        {"prompt": "Why is the sky blue?", "drafter": "draft-model", "max_new_tokens": 48},
    ),
    "text-a-tree-of-successors": (
        "text",
        {
            "prompt": "Write a Python function that reverses a string, then one that reverses a list.",
            "drafter": "token-recycling",
            "max_new_tokens": 48,
        },
    ),
    "text-a-relaxed-rule": (
        "text",
        {
            "prompt": "Why is the sky blue?",
            "drafter": "draft-model",
            "rule": "lenience",
            "temperature": 0.7,
            "rule_options": {"lenience": 0.3},
            "max_new_tokens": 48,
        },
    ),
    "text-random-numbers-decide": (
        "text",
        {
            "prompt": "Write two sentences about the sea.",
            "drafter": "draft-model",
            "rule": "token",
            "temperature": 0.8,
            "seed": 1,
            "max_new_tokens": 48,
        },
    ),
    "text-heads-of-the-target-draft": (
        "text",
        {"prompt": "Explain why leaves are green.", "drafter": "eagle3", "max_new_tokens": 48},
    ),
    "image-a-window-of-guesses": ("image", {"prompt": "red heart", "drafter": "jacobi", "seed": 3}),
    "image-neighbours-pass": ("image", {"prompt": "red heart", "drafter": "jacobi", "rule": "lantern", "seed": 3}),
    "speech-a-sentence": ("speech", {"prompt": "Good morning.", "drafter": "jacobi", "temperature": 0}),
    "speech-a-relaxed-rule": ("speech", {"prompt": "Good morning.", "drafter": "jacobi", "rule": "tolerance"}),
}
TABS = ("batch", "lab")  # tabs that open with a recording of their own
_TRACES = Path(__file__).resolve().parents[1] / "traces"


def recorded(backend: Backend, given: Mapping[str, Any]) -> Recording:
    """The recording of a run, with that of plain decoding in it."""
    *_, (_, recording) = race(backend, checked(backend, given), lambda: True)
    assert recording is not None
    return recording


def record(backends: Mapping[str, Backend], folder: Path, names: Collection[str] = ()) -> Iterator[str]:
    """Record the examples of these names, or all, into a folder; yields a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (modality, given) in EXAMPLES.items():
        if names and name not in names:
            continue
        try:
            backend = backends[modality]
            backend.load()
            recording = recorded(backend, given)
        except OutriderError as error:
            yield f"{name}: skipped: {error}"
            continue
        path = folder / f"{name}.json"
        write_atomically(path, recording.to_json() + "\n")
        summary = recording.trace.summary()
        yield f"{name}: {summary.tokens_per_pass:.2f} tokens per target pass, {path.stat().st_size / 1000:.0f} kB"


def record_tabs(backend: Backend, names: Collection[str] = ()) -> Iterator[str]:
    """Record what the Batch and the Lab tab open with, by a text backend; yields a line about each."""
    backend.load()
    for name, make in (("batch", _batch), ("lab", _lab)):
        if not names or name in names:
            write_atomically(theme.file(f"{name}.json"), make(backend) + "\n")
            yield f"{name}: {theme.file(f'{name}.json').stat().st_size / 1000:.0f} kB"


def _batch(backend: Backend) -> str:
    from outrider.app.page.batch_tab import opening_run

    others = Others()
    recording = opening_run(backend)
    machine = recording.trace.machine | {"other_load": round(others.cores(), 2)}
    return replace(recording, trace=replace(recording.trace, machine=machine)).to_json()


def _lab(backend: Backend) -> str:
    """The result of a measurement, and where it was made."""
    from outrider.app.page.lab_tab import opening_comparison, result

    others, comparison = Others(), opening_comparison(backend)
    for _ in comparison.bench.go():
        pass
    bench = comparison.bench
    place = f"{backend.description}, {processor()}, {torch.get_num_threads()} threads; "
    place += f"{len(bench.items)} prompts, {bench.repeat} timings of each"
    return json.dumps({**result(comparison, others.cores()), "place": place}, allow_nan=False)


def main(device: str = "cpu", folder: Path = _TRACES, names: Collection[str] = ()) -> None:
    from outrider.app.page.app import backends

    for name in names:
        if name not in (*EXAMPLES, *TABS):
            raise SystemExit(str(unknown("example", name, (*EXAMPLES, *TABS))))
    shown = backends(device)
    lines = record(shown, folder, names)
    for line in lines if folder.resolve() != _TRACES else chain(lines, record_tabs(shown["text"], names)):
        print(line, flush=True)


if __name__ == "__main__":
    given = sys.argv[1:]
    main(given[0] if given else "cpu", Path(given[1]) if len(given) > 1 else _TRACES, given[2:])
