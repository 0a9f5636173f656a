"""The codec's test on human speech, with synthetic clips and scripted metrics."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from outrider.speech.audio import Sound
from outrider.speech.evaluation import human_speech
from outrider.speech.evaluation.metrics import Errors, Rating, compare
from outrider.speech.mel import RATE
from outrider.speech.model import SpeechModel


def noise(seconds: float, rate: int = RATE) -> Sound:
    samples = np.random.default_rng(0).uniform(-0.1, 0.1, int(rate * seconds))
    return Sound(samples.astype(np.float32), rate)


class ScriptedMetrics:
    """Metrics whose recogniser returns given transcripts in order."""

    def __init__(self, *transcripts: str) -> None:
        self.transcripts = iter(transcripts)

    def errors(self, sound: Sound, text: str) -> Errors:
        return compare(next(self.transcripts), text)

    def rating(self, sound: Sound) -> Rating:
        return Rating(3.0, 3.0, 3.0)

    def similarity(self, first: Sound, second: Sound) -> float:
        return float(first is second)


def test_short_clips_are_skipped_and_the_order_is_fixed(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = {"a/one.g722": 2.0, "a/two.g722": 1.0, "b/three.g722": 1.6}

    def contents(name: str, pattern: str) -> Iterator[tuple[str, bytes]]:
        assert name == "human-speech"
        yield from ((path, path.encode()) for path in lengths)

    monkeypatch.setattr(human_speech, "contents", contents)
    monkeypatch.setattr(human_speech, "decode_g722", lambda data: noise(lengths[data.decode()], 16_000))
    clips = list(human_speech.clips())
    assert all(clip.sample_rate == RATE for clip in clips)
    assert sorted(round(clip.seconds, 1) for clip in clips) == [1.6, 2.0]
    assert [len(clip.samples) for clip in human_speech.clips()] == [len(clip.samples) for clip in clips]


def test_rungs_are_compared_with_the_original_clip(speaker: SpeechModel) -> None:
    text = "press one to go on"
    metrics = ScriptedMetrics("too few", text, text, "press one", "nothing at all", text, text, text, "")
    qualities = human_speech.ladder(speaker, [noise(1.5), noise(1.6), noise(1.7), noise(1.8)], metrics, 2)  # type: ignore[arg-type]
    assert list(qualities) == ["human", "vocoder alone", "codec"] and all(len(rung) == 2 for rung in qualities.values())
    report = human_speech.report(speaker, qualities, about={"clips_wanted": 2})
    rungs = report["ladder"]
    assert rungs["human"]["word_error"]["value"] == 0 and rungs["human"]["speaker_similarity"]["value"] == 1
    assert rungs["vocoder alone"]["word_error"]["value"] == 3 / 10
    assert rungs["codec"]["word_error"]["apart"] == 1 and rungs["codec"]["duration_ratio"]["value"] > 0.9
    assert report["judged"] == 2 and report["rows"] == [] and report["settings"]["clips_wanted"] == 2
