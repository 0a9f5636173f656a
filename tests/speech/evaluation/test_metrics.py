"""How judges compare and hear. The judges themselves are asked where they are here already."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.assets.store import ASSETS
from outrider.speech.audio import Sound
from outrider.speech.evaluation.metrics import JudgeError, Judges, SpeakerEncoder, compared, distance, plain_words


@pytest.mark.parametrize(
    ("one", "other", "changes"),
    [("", "", 0), ("abc", "abc", 0), ("kitten", "sitting", 3), ("", "ab", 2), ("ab", "", 2)],
)
def test_the_least_number_of_changes(one: str, other: str, changes: int) -> None:
    assert distance(one, other) == changes == distance(other, one)


def test_what_is_heard_and_what_was_meant() -> None:
    for heard, meant in (
        ("It's $1,250, or 7%: 21 isn’t much!", "it is one thousand two hundred fifty dollars or seven percent, "
         "twenty-one is not much"),
        ("In 1960 it opened at 9:15.", "In nineteen sixty it opened at nine fifteen."),
        ("Call 456-1, Room 12.", "Call four five six one, room twelve!"),
        ("the quick brown fox, 3 times", "The quick brown fox three times."),
    ):  # fmt: skip
        same = compared(heard, meant)
        assert same.word_rate == same.letter_rate == 0 and same.words == len(plain_words(meant)) > 3
    wrong = compared("the quick frown", "The quick brown fox.")
    assert wrong.wrong == 2 and wrong.word_rate == 0.5 and wrong.off == 5
    assert compared("", "All of it.").word_rate == 1


def noise(seconds: float, seed: int) -> Sound:
    made = np.random.default_rng(seed).normal(0, 0.05, int(22_050 * seconds))
    return Sound(made.astype(np.float32))


def test_a_voice_is_a_unit_vector_whatever_its_loudness() -> None:
    torch.manual_seed(0)
    encoder = SpeakerEncoder().eval().requires_grad_(False)
    for seconds in (0.5, 3.3):
        found = encoder(noise(seconds, 1))
        assert found.shape == (256,) and abs(found.norm() - 1) < 1e-5
        quieter = encoder(Sound(noise(seconds, 1).samples / 8))
        assert float(found @ quieter) > 0.999
    with pytest.raises(JudgeError, match="no sound"):
        Judges().rating(Sound(np.zeros(0, np.float32)))


@pytest.mark.slow
@pytest.mark.skipif(
    not all(ASSETS[name].here for name in ("kokoro", "whisper-base", "dnsmos", "resemblyzer")), reason="not fetched"
)
def test_judges_know_the_teacher_from_noise(tmp_path: Path) -> None:
    pytest.importorskip("faster_whisper")
    pytest.importorskip("hibari")
    from outrider.speech.phonemes import phonemes
    from outrider.speech.training.kokoro import Teacher

    teacher, judges = Teacher(), Judges()
    texts = ("The quick brown fox jumps over the lazy dog.", "Please open the window, it is very warm in here.")
    one, two = (Sound(teacher.read(phonemes(text)).sound) for text in texts)
    assert judges.errors(one, texts[0]).word_rate == 0 and judges.errors(two, texts[1]).word_rate == 0
    assert judges.errors(one, texts[1]).word_rate > 0.5
    assert judges.rating(one).overall > 2.9 > judges.rating(noise(3.0, 1)).overall + 1
    assert judges.alike(one, two) > 0.75 > judges.alike(one, noise(3.0, 1))
