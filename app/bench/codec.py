"""`outrider bench codec`: how far the codec carries to a human whom it never heard.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import Device, OwnWeights

if TYPE_CHECKING:
    from rich.console import Console


def codec(
    limit: Annotated[int, typer.Option(min=1, help="So many clips.")] = 20,
    weights: OwnWeights = None,
    device: Device = "cpu",
    output: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write everything; - is stdout.")
    ] = None,
) -> None:
    """What the codec of speech, and the vocoder alone, leave of a human's speech, beside that itself."""
    import torch
    from rich.console import Console

    from outrider.app.bench.progress import bar
    from outrider.app.bench.speech import say
    from outrider.speech import load
    from outrider.speech.evaluation import human_speech, opus
    from outrider.speech.evaluation.metrics import Judges

    opus.library()
    console = Console(stderr=True, highlight=False)
    with console.status("Loading ..."):
        sp = load(device=device, folder=weights)
    with bar(console, 3 * limit, "Listening") as step:
        heard = human_speech.ladder(sp, human_speech.clips(), Judges(torch.get_num_threads()), limit, step)
    say(human_speech.report(sp, heard, about={"clips_wanted": limit, "device": device}), output, draw)


def draw(console: Console, told: Mapping[str, Any]) -> None:
    """The table: what is heard, beside what is heard of the human."""
    from outrider.app.bench.speech import heard_table

    console.print(heard_table(f"What is heard of {told['judged']} clips of a human", told["ladder"], "human"))
