"""Listening samples: Opus files of the first sentences of a benchmark, from each rung of the quality ladder."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.core.bench.runner import Item
from outrider.speech.evaluation.bench import SpeechBench, Teacher, ladder_sounds
from outrider.speech.evaluation.opus import encode_opus
from outrider.speech.training.sentences import KINDS

COUNT = len(KINDS)  # sentences: one of each kind


def write_samples(
    speech: SpeechBench, items: Sequence[Item], teacher: Teacher | None, folder: Path
) -> list[dict[str, Any]]:
    """Write the samples, and return each sentence's text and its files by rung, as paths below the folder's parent."""
    folder.mkdir(parents=True, exist_ok=True)
    samples = []
    for number, item in enumerate(items[:COUNT], 1):
        files = {}
        for name, (sound, _) in ladder_sounds(speech, item, teacher).items():
            if len(sound.samples):
                path = folder / f"{number}-{re.sub(r'[^a-z0-9.=-]+', '-', name).strip('-')}.ogg"
                path.write_bytes(encode_opus(sound))
                files[name] = f"{folder.name}/{path.name}"
        samples.append({"text": item.content, "files": files})
    return samples
