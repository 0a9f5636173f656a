"""Samples to be listened to: what everybody said of the first sentences of a bench, as small files. Knows the bench
alone."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from outrider.core.bench.runner import Item
from outrider.speech.evaluation.bench import Read, Speech, rungs
from outrider.speech.evaluation.opus import opus
from outrider.speech.training.sentences import KINDS

COUNT = len(KINDS)  # sentences: of those that are held out, one of every kind


def written(speech: Speech, items: Sequence[Item], read: Read | None, folder: Path) -> list[dict[str, Any]]:
    """Of each sentence its text, and the files of those who say it by their names, the folder's before them."""
    folder.mkdir(parents=True, exist_ok=True)
    found = []
    for number, item in enumerate(items[:COUNT], 1):
        files = {}
        for name, (sound, _) in rungs(speech, item, read).items():
            if len(sound.samples):
                path = folder / f"{number}-{re.sub(r'[^a-z0-9.=-]+', '-', name).strip('-')}.ogg"
                path.write_bytes(opus(sound))
                files[name] = f"{folder.name}/{path.name}"
        found.append({"text": item.content, "files": files})
    return found
