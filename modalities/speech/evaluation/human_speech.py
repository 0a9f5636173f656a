"""How far the codec carries: a human whom it never heard, for it learned from one synthetic voice.

The speech is the prompts of a telephone exchange, one speaker in a wide band (16,000 samples a second, so that nothing
is above 8 kHz). Nobody wrote down what is said: the recogniser does, and what vocoder and codec leave of a clip is
compared with what is heard of the clip itself. Knows sounds and judges, nothing of tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

import torch

from outrider.core.assets.archives import contents
from outrider.core.bench.runner import SCHEMA
from outrider.core.trace import machine, versions
from outrider.speech.audio import Sound
from outrider.speech.evaluation.bench import CODEC, Heard, judged, measured
from outrider.speech.evaluation.metrics import Judges, plain_words
from outrider.speech.evaluation.opus import g722
from outrider.speech.mel import RATE
from outrider.speech.model import SpeechModel
from outrider.speech.vocoder import VocoderStream

HUMAN, VOCODER = "human", "vocoder alone"
SHORTEST, FEWEST = 1.5, 3  # seconds and words of a clip that is listened to


def clips() -> Iterator[Sound]:
    """Those that are long enough, in an order by their names' hash, so that a few are of all sorts."""
    found = {PurePosixPath(name).name: data for name, data in contents("human-speech", r"\.g722$")}
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        sound = g722(found[name])
        if sound.seconds >= SHORTEST:
            yield sound.at(RATE)


def vocoded(sp: SpeechModel, sound: Sound) -> Sound:
    """What the vocoder alone leaves of a sound."""
    way = VocoderStream(sp.vocoder)
    parts = [way.push(sound.frames().to(sp.codec.mean.device)), way.finish()]
    return Sound(torch.cat(parts).float().cpu().numpy())


def ladder(
    sp: SpeechModel,
    sounds: Iterable[Sound],
    judges: Judges,
    limit: int,
    progress: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[Heard]]:
    """Every rung's verdicts on so many clips in which words enough are heard; voice and length are beside the human."""
    found: dict[str, list[Heard]] = {HUMAN: [], VOCODER: [], CODEC: []}
    heard = ((sound, judges.errors(sound, "").heard) for sound in sounds)
    for sound, text in islice((one for one in heard if len(plain_words(one[1])) >= FEWEST), limit):
        made = {HUMAN: sound, VOCODER: vocoded(sp, sound), CODEC: sp.resynthesised(sound)}
        for name, one in made.items():
            found[name].append(judged(judges, text, one, sound))
            progress(name)
    return found


def report(sp: SpeechModel, heard: Mapping[str, Sequence[Heard]], *, about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `outrider bench codec`: nobody drafts here, so that there are rungs and no rows."""
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {"model": sp.name, "dtype": "float32", "shortest": SHORTEST, "fewest": FEWEST, **about},
        "rows": [],
        "ladder": {name: measured(some, heard[HUMAN]) for name, some in heard.items()},
        "judged": len(heard[HUMAN]),
        "skipped": {},
        "peers": [],
    }
