"""Speech metrics. The models run only where they have been fetched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.assets.store import ASSETS
from outrider.speech.audio import Sound
from outrider.speech.evaluation.metrics import (
    MetricError,
    SpeakerEncoder,
    SpeechMetrics,
    compare,
    edit_distance,
    normalised_words,
)


@pytest.mark.parametrize(
    ("first", "second", "changes"),
    [("", "", 0), ("abc", "abc", 0), ("kitten", "sitting", 3), ("", "ab", 2), ("ab", "", 2)],
)
def test_edit_distance(first: str, second: str, changes: int) -> None:
    assert edit_distance(first, second) == changes == edit_distance(second, first)


def test_normalised_texts_are_compared() -> None:
    for transcript, text in (
        ("It's $1,250, or 7%: 21 isn’t much!", "it is one thousand two hundred fifty dollars or seven percent, "
         "twenty-one is not much"),
        ("In 1960 it opened at 9:15.", "In nineteen sixty it opened at nine fifteen."),
        ("Call 456-1, Room 12.", "Call four five six one, room twelve!"),
        ("the quick brown fox, 3 times", "The quick brown fox three times."),
    ):  # fmt: skip
        equal = compare(transcript, text)
        assert equal.word_errors == equal.letter_errors == 0 and equal.words == len(normalised_words(text)) > 3
    wrong = compare("the quick frown", "The quick brown fox.")
    assert (wrong.word_errors, wrong.words, wrong.letter_errors) == (2, 4, 5)
    none = compare("", "All of it.")
    assert none.word_errors == none.words == 3


def noise(seconds: float, seed: int) -> Sound:
    samples = np.random.default_rng(seed).normal(0, 0.05, int(22_050 * seconds))
    return Sound(samples.astype(np.float32))


def test_speaker_vectors_are_independent_of_loudness() -> None:
    torch.manual_seed(0)
    encoder = SpeakerEncoder().eval().requires_grad_(False)
    for seconds in (0.5, 3.3):
        vector = encoder(noise(seconds, 1))
        assert vector.shape == (256,) and abs(vector.norm() - 1) < 1e-5
        quieter = encoder(Sound(noise(seconds, 1).samples / 8))
        assert float(vector @ quieter) > 0.999
    with pytest.raises(MetricError, match="no samples"):
        SpeechMetrics().rating(Sound(np.zeros(0, np.float32)))


@pytest.mark.slow
@pytest.mark.skipif(
    not all(ASSETS[name].here for name in ("kokoro", "whisper-base", "dnsmos", "resemblyzer")), reason="not fetched"
)
def test_metrics_tell_the_teacher_from_noise(tmp_path: Path) -> None:
    pytest.importorskip("faster_whisper")
    pytest.importorskip("hibari")
    from outrider.speech.phonemes import phonemes
    from outrider.speech.training.kokoro import Kokoro

    teacher, metrics = Kokoro(), SpeechMetrics()
    texts = ("The quick brown fox jumps over the lazy dog.", "Please open the window, it is very warm in here.")
    first, second = (Sound(teacher.read(phonemes(text)).sound) for text in texts)
    assert metrics.errors(first, texts[0]).word_errors == 0 and metrics.errors(second, texts[1]).word_errors == 0
    other = metrics.errors(first, texts[1])
    assert other.word_errors > 0.5 * other.words
    assert metrics.rating(first).overall > 2.9 > metrics.rating(noise(3.0, 1)).overall + 1
    assert metrics.similarity(first, second) > 0.75 > metrics.similarity(first, noise(3.0, 1))
