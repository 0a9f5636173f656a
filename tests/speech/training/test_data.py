"""Speech to learn from: read by a stand-in for the teacher, kept, taken up again, made into tokens."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.speech.codec import Codec
from outrider.speech.mel import HOP, mel_frames
from outrider.speech.training import data
from outrider.speech.training.kokoro import Reading, trimmed
from outrider.speech.training.sentences import Sentence


class Humming:
    """Hums for ten frames a phoneme."""

    def __init__(self) -> None:
        self.asked = 0

    def read(self, said: str, speed: float) -> Reading:
        self.asked += 1
        lengths = np.full(len(said) + 2, 10)
        time = np.arange(lengths.sum() * HOP + 37) / 22_050
        return Reading((np.sin(880 * time) / 2).astype(np.float32), lengths)


@pytest.fixture(autouse=True)
def said(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Yes.", "No.", "Nobody knows.", "Well, well."]
    numbers = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    made = [Sentence(f"{text} {number}.", "everyday") for number in numbers for text in texts]
    monkeypatch.setattr(data, "learned", lambda: iter(made))
    monkeypatch.setattr(data, "_PART", 4)


def test_what_is_read_is_kept_and_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = Humming()
    monkeypatch.setattr(data, "_teacher", lambda: teacher)
    read = partial(data.synthesise, tmp_path, 1.0, readers=2, pool=ThreadPoolExecutor)
    seconds = read(files=2)
    assert teacher.asked == 8 and sorted(path.name for path in tmp_path.iterdir()) == ["00000.npz", "00001.npz"]
    assert read(files=3) > seconds and teacher.asked == 12
    assert len({one.text for one in data.load(tmp_path)}) == 12
    there = {one.text for one in data.load(tmp_path)}
    read(files=5, but=there)  # the fourth and fifth file have what isn't there yet
    assert teacher.asked == 20 and len({one.text for one in data.load(tmp_path)} - there) == 8


def test_a_file_gives_back_what_was_put_in(tmp_path: Path) -> None:
    teacher = Humming()
    sentences = [Sentence(f"One and {text}.", "numbers") for text in ("two", "three", "four", "five")]
    read = list(data._read(sentences, teacher))
    data.save(tmp_path / "00007.npz", read)
    back = data.load_file(tmp_path / "00007.npz")
    for one, other in zip(read, back, strict=True):
        assert (one.text, one.kind, one.speed) == (other.text, other.kind, other.speed)
        for name in ("phonemes", "lengths", "mel"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert other.mel.shape[1] == other.lengths.sum() and other.mel.shape[1] % 2 == 0
        assert other.shares.sum() == other.mel.shape[1] // 2 and other.shares.min() >= 0


def test_eight_bits_are_enough() -> None:
    sound = torch.sin(torch.arange(9000) / 9) * torch.linspace(0, 1, 9000)
    mel = mel_frames(sound)
    assert (data.unpacked(data.packed(mel)) - mel).abs().max() < 0.03


def test_tokens_take_the_place_of_frames(tmp_path: Path) -> None:
    read = list(
        data._read(
            [Sentence(f"Number {text}.", "numbers") for text in ("two", "three", "four", "five", "six")], Humming()
        )
    )
    codec = Codec(width=16, levels=(5, 5), depth=2).eval()
    coded = data.encoded(read, codec)
    data.save(tmp_path / "tokens.npz", coded)
    for one, other in zip(read, data.load(tmp_path / "tokens.npz"), strict=True):
        assert len(other.codes) == one.mel.shape[1] // 2 == other.shares.sum() and not other.mel.shape[1]
        assert other.codes.max() < codec.codes
    assert "5 sentences (numbers 5)" in data.describe(coded)
    data.save(tmp_path / "more.npz", [*read[3:], *data._read([Sentence("Number nine.", "numbers")], Humming())])
    both = data.load(tmp_path / "tokens.npz", tmp_path / "more.npz")
    assert [len(one.codes) > 0 for one in both] == [True] * 5 + [False] and both[-1].text == "Number nine."
    assert [one is other for one, other in zip(both, data.encoded(both, codec), strict=True)] == [True] * 5 + [False]


def test_what_is_no_speech_is_said(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="no speech"):
        data.load(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(data.DataError, match="no speech"):
        data.load(tmp_path / "a.npz")


def test_silence_around_is_cut_and_lengths_still_fit() -> None:
    quiet, loud = np.zeros(12_000, np.float32), np.sin(np.arange(24_000) / 20).astype(np.float32)
    found = trimmed(np.concatenate([quiet, loud, quiet]), np.array([20, 20, 20, 20]))
    margin = 0.05 * 22_050
    assert abs(len(found.sound) - 22_050 - 2 * margin) < 300
    assert found.lengths.sum() == round(len(found.sound) / HOP) and len(found.lengths) == 4
    assert found.lengths[1:3].tolist() == [43, 43] and abs(found.lengths[0] - found.lengths[3]) <= 1
