"""Tests the codec on human speech. It was trained on one synthetic voice.

The clips are one speaker's prompts of a telephone exchange at 16 kHz, without transcripts. The recogniser's transcript
of the original clip is the reference for those of the vocoder's and of the codec's reconstruction. Independent of
tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import PurePosixPath
from typing import Any

from outrider.core.assets.archives import contents
from outrider.core.bench.runner import SCHEMA
from outrider.core.trace import machine, versions
from outrider.speech.audio import Sound
from outrider.speech.evaluation.bench import CODEC, Quality, sentence_quality, summarise
from outrider.speech.evaluation.metrics import SpeechMetrics, normalised_words
from outrider.speech.evaluation.opus import decode_g722
from outrider.speech.mel import RATE
from outrider.speech.model import SpeechModel
from outrider.speech.vocoder import VocoderStream

HUMAN, VOCODER = "human", "vocoder alone"
MIN_SECONDS, MIN_WORDS = 1.5, 3  # of a clip


def clips() -> Iterator[Sound]:
    """The clips of MIN_SECONDS or more, ordered by a hash of their names so that the first ones are a random sample."""
    files = {PurePosixPath(name).name: data for name, data in contents("human-speech", r"\.g722$")}
    for name in sorted(files, key=lambda name: hashlib.sha256(name.encode()).digest()):
        sound = decode_g722(files[name])
        if sound.seconds >= MIN_SECONDS:
            yield sound.resample(RATE)


def vocode(sp: SpeechModel, sound: Sound) -> Sound:
    """A sound reconstructed by the vocoder from its mel frames, without the codec."""
    samples = VocoderStream(sp.vocoder).finish(sound.mel().to(sp.codec.mean.device))
    return Sound(samples.float().cpu().numpy())


def ladder(
    sp: SpeechModel,
    sounds: Iterable[Sound],
    metrics: SpeechMetrics,
    limit: int,
    progress: Callable[[str], Any] = lambda name: None,
) -> dict[str, list[Quality]]:
    """The quality of the original, the vocoder's and the codec's version of the first `limit` sounds in which MIN_WORDS
    words are recognised. The original is the reference."""
    rungs: dict[str, list[Quality]] = {HUMAN: [], VOCODER: [], CODEC: []}
    transcribed = ((sound, metrics.errors(sound, "").transcript) for sound in sounds)
    long_enough = ((sound, text) for sound, text in transcribed if len(normalised_words(text)) >= MIN_WORDS)
    for original, text in islice(long_enough, limit):
        versions = {HUMAN: original, VOCODER: vocode(sp, original), CODEC: sp.resynthesised(original)}
        for name, sound in versions.items():
            rungs[name].append(sentence_quality(metrics, text, sound, original))
            progress(name)
    return rungs


def report(sp: SpeechModel, rungs: Mapping[str, Sequence[Quality]], *, about: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of `outrider bench codec`. It has rungs and no rows, because nothing is drafted."""
    return {
        "schema": SCHEMA,
        "machine": machine(),
        "versions": versions(),
        "settings": {"model": sp.name, "dtype": "float32", "shortest": MIN_SECONDS, "fewest": MIN_WORDS, **about},
        "rows": [],
        "ladder": {name: summarise(qualities, rungs[HUMAN]) for name, qualities in rungs.items()},
        "judged": len(rungs[HUMAN]),
        "skipped": {},
        "peers": [],
    }
