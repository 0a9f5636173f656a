"""A human's speech by way of a codec that never heard it: here made clips and judges who hear what they are told."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outrider.speech.audio import Sound
from outrider.speech.evaluation import human_speech
from outrider.speech.evaluation.metrics import Errors, Rating, compared
from outrider.speech.mel import RATE
from outrider.speech.model import SpeechModel


def noise(seconds: float, rate: int = RATE) -> Sound:
    made = np.random.default_rng(0).uniform(-0.1, 0.1, int(rate * seconds))
    return Sound(made.astype(np.float32), rate)


class ConditionedDecoder:
    """Judges who hear so many words of each clip, the original or not."""

    def __init__(self, *heard: str) -> None:
        self.heard = iter(heard)

    def errors(self, sound: Sound, meant: str) -> Errors:
        return compared(next(self.heard), meant)

    def rating(self, sound: Sound) -> Rating:
        return Rating(3.0, 3.0, 3.0)

    def alike(self, one: Sound, other: Sound) -> float:
        return float(one is other)


def test_clips_are_long_enough_and_in_an_order_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"a/one.g722": 2.0, "a/two.g722": 1.0, "b/three.g722": 1.6}

    def contents(name: str, pattern: str) -> Iterator[tuple[str, bytes]]:
        assert name == "human-speech"
        yield from ((path, path.encode()) for path in lengths)

    monkeypatch.setattr(human_speech, "contents", contents)
    monkeypatch.setattr(human_speech, "g722", lambda data: noise(lengths[data.decode()], 16_000))
    found = list(human_speech.clips())
    assert all(one.rate == RATE for one in found)
    assert sorted(round(one.seconds, 1) for one in found) == [1.6, 2.0]
    assert [len(one.samples) for one in human_speech.clips()] == [len(one.samples) for one in found]


def test_rungs_are_beside_what_is_heard_of_the_human(speaker: SpeechModel) -> None:
    said = "press one to go on"
    judges = ConditionedDecoder("too few", said, said, "press one", "nothing at all", said, said, said, "")
    heard = human_speech.ladder(speaker, [noise(1.5), noise(1.6), noise(1.7), noise(1.8)], judges, 2)  # type: ignore[arg-type]
    assert list(heard) == ["human", "vocoder alone", "codec"] and all(len(one) == 2 for one in heard.values())
    told = human_speech.report(speaker, heard, about={"clips_wanted": 2})
    rungs = told["ladder"]
    assert rungs["human"]["word_error"]["value"] == 0 and rungs["human"]["speaker_similarity"]["value"] == 1
    assert rungs["vocoder alone"]["word_error"]["value"] == 3 / 10
    assert rungs["codec"]["word_error"]["apart"] == 1 and rungs["codec"]["duration_ratio"]["value"] > 0.9
    assert told["judged"] == 2 and told["rows"] == [] and told["settings"]["clips_wanted"] == 2
