"""The speech training set: synthesis with a fake teacher, files, and encoding."""

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
from outrider.speech.training.kokoro import Reading, trim
from outrider.speech.training.sentences import Sentence


class FakeTeacher:
    """Reads every phoneme as a tone of ten frames."""

    def __init__(self) -> None:
        self.calls = 0

    def read(self, phonemes: str, speed: float) -> Reading:
        self.calls += 1
        lengths = np.full(len(phonemes) + 2, 10)
        time = np.arange(lengths.sum() * HOP + 37) / 22_050
        return Reading((np.sin(880 * time) / 2).astype(np.float32), lengths)


@pytest.fixture(autouse=True)
def few_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["Yes.", "No.", "Nobody knows.", "Well, well."]
    numbers = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
    generated = [Sentence(f"{text} {number}.", "everyday") for number in numbers for text in texts]
    monkeypatch.setattr(data, "training_sentences", lambda: iter(generated))
    monkeypatch.setattr(data, "_PER_FILE", 4)


def test_synthesis_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    teacher = FakeTeacher()
    monkeypatch.setattr(data, "_teacher", lambda: teacher)
    read = partial(data.synthesise, tmp_path, 1.0, workers=2, pool=ThreadPoolExecutor)
    seconds = read(files=2)
    assert teacher.calls == 8 and sorted(path.name for path in tmp_path.iterdir()) == ["00000.npz", "00001.npz"]
    assert read(files=3) > seconds and teacher.calls == 12
    assert len({utterance.text for utterance in data.load(tmp_path)}) == 12
    existing = {utterance.text for utterance in data.load(tmp_path)}
    read(files=5, exclude=existing)  # the fourth and fifth file have new sentences
    assert teacher.calls == 20 and len({utterance.text for utterance in data.load(tmp_path)} - existing) == 8


def test_files_are_read_back(tmp_path: Path) -> None:
    teacher = FakeTeacher()
    sentences = [Sentence(f"One and {text}.", "numbers") for text in ("two", "three", "four", "five")]
    read = list(data._read(sentences, teacher))
    data.save(tmp_path / "00007.npz", read)
    back = data.load_file(tmp_path / "00007.npz")
    for one, other in zip(read, back, strict=True):
        assert (one.text, one.kind, one.speed) == (other.text, other.kind, other.speed)
        for name in ("phonemes", "lengths", "mel"):
            assert np.array_equal(getattr(one, name), getattr(other, name))
        assert other.mel.shape[1] == other.lengths.sum() and other.mel.shape[1] % 2 == 0
        assert other.durations.sum() == other.mel.shape[1] // 2 and other.durations.min() >= 0


def test_quantisation_to_8_bits() -> None:
    sound = torch.sin(torch.arange(9000) / 9) * torch.linspace(0, 1, 9000)
    mel = mel_frames(sound)
    assert (data.dequantise(data.quantise(mel)) - mel).abs().max() < 0.03


def test_codes_replace_frames(tmp_path: Path) -> None:
    read = list(
        data._read(
            [Sentence(f"Number {text}.", "numbers") for text in ("two", "three", "four", "five", "six")], FakeTeacher()
        )
    )
    codec = Codec(width=16, levels=(5, 5), depth=2).eval()
    encoded = data.encode(read, codec)
    data.save(tmp_path / "tokens.npz", encoded)
    for one, other in zip(read, data.load(tmp_path / "tokens.npz"), strict=True):
        assert len(other.codes) == one.mel.shape[1] // 2 == other.durations.sum() and not other.mel.shape[1]
        assert other.codes.max() < codec.codes
    assert "5 sentences (numbers 5)" in data.describe(encoded)
    data.save(tmp_path / "more.npz", [*read[3:], *data._read([Sentence("Number nine.", "numbers")], FakeTeacher())])
    both = data.load(tmp_path / "tokens.npz", tmp_path / "more.npz")
    assert [len(one.codes) > 0 for one in both] == [True] * 5 + [False] and both[-1].text == "Number nine."
    assert [one is other for one, other in zip(both, data.encode(both, codec), strict=True)] == [True] * 5 + [False]


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(data.DataError, match="no speech"):
        data.load(tmp_path)
    (tmp_path / "a.npz").write_bytes(b"nothing")
    with pytest.raises(data.DataError, match="not a speech training file"):
        data.load(tmp_path / "a.npz")


def test_trimming_keeps_the_alignment() -> None:
    silence, tone = np.zeros(12_000, np.float32), np.sin(np.arange(24_000) / 20).astype(np.float32)
    reading = trim(np.concatenate([silence, tone, silence]), np.array([20, 20, 20, 20]))
    margin = 0.05 * 22_050
    assert abs(len(reading.sound) - 22_050 - 2 * margin) < 300
    assert reading.lengths.sum() == round(len(reading.sound) / HOP) and len(reading.lengths) == 4
    assert reading.lengths[1:3].tolist() == [43, 43] and abs(reading.lengths[0] - reading.lengths[3]) <= 1
