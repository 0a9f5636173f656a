"""Records the bundled example traces: `python -m outrider.app.page.record_examples [DEVICE [FOLDER]]`.

Each example is a run beside plain decoding with the installed models; examples whose models are missing are skipped
with a message.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outrider.app.page.backends.interface import Backend, checked
from outrider.app.page.recordings import Recording
from outrider.app.page.runner import race
from outrider.core.assets.files import write_atomically
from outrider.core.errors import OutriderError

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
    "speech-a-sentence": ("speech", {"prompt": "Good morning.", "drafter": "jacobi", "rule": "tolerance"}),
}


def recorded(backend: Backend, given: Mapping[str, Any]) -> Recording:
    """The recording of a run, with that of plain decoding in it."""
    *_, (_, recording) = race(backend, checked(backend, given), lambda: True)
    assert recording is not None
    return recording


def record(backends: Mapping[str, Backend], folder: Path) -> Iterator[str]:
    """Record all examples into a folder; yields a line about each."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (modality, given) in EXAMPLES.items():
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


if __name__ == "__main__":
    from outrider.app.page.app import backends

    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else Path(__file__).resolve().parents[1] / "traces"
    for line in record(backends(device), folder):
        print(line, flush=True)
