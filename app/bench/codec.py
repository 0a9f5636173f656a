"""`outrider bench codec`: the quality of the speech codec on a human voice outside its training data.

Heavy packages are imported when it runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.app.options import DEVICE, Device, JsonFile, OwnWeights

if TYPE_CHECKING:
    from rich.console import Console


def codec(
    num_prompts: Annotated[int, typer.Option(min=1, help="Number of recordings.")] = 20,
    weights: OwnWeights = None,
    device: Device = DEVICE,
    output: JsonFile = None,
) -> None:
    """Measure what the speech codec, and the vocoder alone, do to recordings of a human voice."""
    import torch
    from rich.console import Console

    from outrider.app.bench.progress import bar
    from outrider.app.bench.speech import show
    from outrider.speech import load
    from outrider.speech.evaluation import human_speech, opus
    from outrider.speech.evaluation.metrics import SpeechMetrics

    opus.library()
    console = Console(stderr=True, highlight=False)
    with console.status("Loading ..."):
        sp = load(device=device, folder=weights)
    with bar(console, 3 * num_prompts, "Listening") as step:
        heard = human_speech.ladder(sp, human_speech.clips(), SpeechMetrics(torch.get_num_threads()), num_prompts, step)
    show(human_speech.report(sp, heard, about={"clips_wanted": num_prompts, "device": device}), output, draw)


def draw(console: Console, report: Mapping[str, Any]) -> None:
    """Print the table of speech quality, compared with the recordings."""
    from outrider.app.bench.speech import quality_table
    from outrider.app.viz.fitted import Fitted

    table = quality_table(f"Speech quality over {report['judged']} human clips", report["ladder"], "human")
    console.print(Fitted(table))
