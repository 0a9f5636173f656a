"""Tokens per target pass of every included drafter on a few prompts: a loss of more than 5 % against
tests/tokens-per-call.json fails. `python tests/test_tokens_per_call.py` measures again and rewrites that file. Heads of
the language model that the guides do not recommend take turns; `make laws` measures all.
"""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider import image, text
from outrider.app.report.method_table import shipped
from outrider.core.methods import DRAFTERS
from outrider.image.resolve_drafter import drafters as of_pictures
from outrider.speech import recipes
from outrider.speech.model import SpeechModel
from outrider.speech.resolve_drafter import drafters as of_speech
from outrider.speech.vocoder import Vocoder
from outrider.text.bench.run import load_prompts
from outrider.text.recipes import RECIPES

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script
from tests.turns import takes_turn

PINS = Path(__file__).resolve().parent / "tokens-per-call.json"
TOLERANCE = 0.05
ALL = {
    "text": "smollm2-135m, float32, greedy, 3 prompts of different tasks, 32 tokens each",
    "image": "emoji, float32, temperature 1, guidance 3, 'red heart' and 'smiling face', seeds 0 and 1",
    "speech": "heart, float32, temperature 0.6, two sentences, seed 0",
}
SENTENCES = ["The quick brown fox jumps over the lazy dog.", "Where is the station, please?"]
FREE = {
    "text": ("prompt-lookup", "suffix", "token-recycling", "ensemble"),
    "image": ("jacobi", "suffix", "token-recycling"),
    "speech": ("jacobi", "token-recycling"),
}


def trained(modality: str) -> set[str]:
    """Return the drafters whose weights are in the package."""
    names = shipped(modality)
    known = {"text": list(RECIPES), "image": of_pictures(), "speech": of_speech()}[modality]
    return {"draft-model" if name == "draft" else name for name in names} & set(known)


@functools.cache
def model(modality: str) -> Any:
    if modality == "speech":  # the sound is not used, so the vocoder is not downloaded
        voice, codec = recipes.voice(), recipes.codec()
        small = functools.partial(recipes.voice, "speech-draft")
        return SpeechModel(voice, codec, Vocoder(16), name="heart", draft=small, taught=recipes.draft_head)
    return text.load("smollm2-135m", dtype="float32") if modality == "text" else image.load("emoji", dtype="float32")


def measure(modality: str, drafter: str) -> float:
    """Return the tokens per target pass over the slice."""
    made = model(modality)
    if modality == "text":
        asked = [item.content for item in load_prompts(limit=3)]
        result = [made.generate(one, drafter=drafter, max_new_tokens=32) for one in asked]
    elif modality == "speech":
        result = made.generate(SENTENCES, drafter=drafter, temperature=0.6, seed=0)
    else:
        result = made.generate(
            ["red heart", "smiling face"], drafter=drafter, temperature=1.0, guidance_scale=3.0, seed=0
        )
    steps = [step for one in result for step in one.trace.steps]
    return sum(len(step.emitted) for step in steps) / len(steps)


def pins() -> dict[str, dict[str, float]]:
    result: dict[str, Any] = json.loads(PINS.read_text(encoding="utf-8")) if PINS.is_file() else {}
    return dict(result.get("tokens_per_call", {}))


@pytest.mark.parametrize("modality", ALL)
def test_everything_that_ships_is_pinned(modality: str) -> None:
    assert set(pins()[modality]) == {*FREE[modality], *trained(modality)}, "python tests/test_tokens_per_call.py"
    assert set(pins()[modality]) <= set(DRAFTERS)


def measured_here() -> list[tuple[str, str]]:
    found = [(modality, drafter) for modality, some in pins().items() for drafter in some]
    return [(modality, drafter) for modality, drafter in found if modality != "text" or always(drafter)]


def always(drafter: str) -> bool:
    return drafter in (*FREE["text"], "draft-model", "eagle3", "medusa") or takes_turn(drafter)


@pytest.mark.slow
@pytest.mark.parametrize(("modality", "drafter"), measured_here())
def test_tokens_per_call_are_what_they_were(modality: str, drafter: str) -> None:
    assert measure(modality, drafter) == pytest.approx(pins()[modality][drafter], rel=TOLERANCE)


def write(*names: str) -> None:
    """Measure and write all modalities, or the given ones."""
    result = pins() | {name: dict.fromkeys(sorted({*FREE[name], *trained(name)}), 0.0) for name in names or ALL}
    for modality in names or ALL:
        some = result[modality]
        for drafter in some:
            some[drafter] = round(measure(modality, drafter), 4)
            print(modality, drafter, some[drafter])
    output = {"command": "python tests/test_tokens_per_call.py", "slices": ALL, "tokens_per_call": result}
    PINS.write_text(json.dumps(output, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(*sys.argv[1:])
