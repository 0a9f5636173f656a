"""Training of the speech models: every kind of recipe, resuming, and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.core.errors import InvalidOption
from outrider.core.training import trainer
from outrider.core.training.checkpoint import about, load
from outrider.core.training.recipes import NoWeights
from outrider.core.training.request import TrainingRequest
from outrider.speech import recipes
from outrider.speech.recipes import KINDS
from outrider.speech.training import data, run
from outrider.speech.training.data import Utterance
from outrider.speech.training.run import VoiceTask
from outrider.speech.voice import Voice

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "plot", lambda history, path: False)  # slower than the training itself


SMALL = {"width": 32, "layers": 2, "heads": 2, "hidden": 48, "reading": 16}


def speech(count: int = 90, codes: int = 0) -> list[Utterance]:
    """Utterances in which each phoneme repeats one mel frame, its own, or one code."""
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (8, 80))
    utterances = []
    for number in range(count):
        phonemes = np.concatenate([[0], rng.integers(1, 8, 12), [0]])
        lengths = rng.integers(4, 20, len(phonemes)) // 2 * 2
        mel = np.repeat(frames[phonemes], lengths, 0).T.astype(np.uint8)
        tokens = np.repeat(phonemes, lengths // 2) if codes else np.zeros(0, np.int64)
        mel = mel[:, :0] if codes else mel
        utterances.append(Utterance(f"number {number}", "numbers", phonemes, lengths, 1.0, mel, tokens))
    return utterances


@pytest.mark.slow
def test_a_codec_trains_loads_and_resumes(tmp_path: Path) -> None:
    data.save(tmp_path / "a.npz", speech())
    options = {"width": 24, "levels": (5, 5), "depth": 2}
    request = TrainingRequest(
        recipes=("speech-codec",), data=tmp_path, out=tmp_path / "out", steps=60, batch=4, rate=8e-3, options=options,
        quiet=True,
    )  # fmt: skip
    log: list[str] = []
    (file,) = run.train(request, log.append)
    codec = load(file, KINDS, None)
    assert isinstance(codec, recipes.Codec) and codec.codes == 25 and "90 sentences" in log[0]
    frames = data.dequantise(speech(3)[2].mel)[None]
    loud = frames > -5  # bins with a large weight
    error = (codec.decode(codec.encode(frames)) - frames).abs()[loud].mean()
    assert error < 0.9 * (codec.mean - frames).abs()[loud].mean()
    facts = about(file)["provenance"]
    assert facts["recipe"] == "speech-codec" and facts["done"]["steps"] == 60
    run.train(TrainingRequest(**{**vars(request), "steps": 64}), log.append)
    assert about(file)["provenance"]["done"]["steps"] in (60, 64) and "64 steps" in log[-1]


@pytest.mark.slow
def test_the_decoder_recipe_keeps_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    data.save(tmp_path / "a.npz", speech())
    rough = recipes.Codec(width=24, levels=(5, 5), depth=2).requires_grad_(False).bfloat16().float()  # as saved

    def train(name: str, steps: int, **more: Any) -> Path:
        request = TrainingRequest(
            recipes=(name,), data=tmp_path / "a.npz", steps=steps, batch=4, rate=8e-3, quiet=True, **more
        )  # fmt: skip
        return run.train(request, lambda _: None)[0]

    file = train("speech-recogniser", 60, options={"width": 24, "depth": 2, "drop": 0.0})
    assert about(file)["provenance"]["validation"]["frame accuracy"] > 0.9
    monkeypatch.setattr(recipes, "codec", lambda: rough)
    frames = data.dequantise(speech(3)[2].mel)[None]
    before, recogniser = rough.encode(frames), recipes.recogniser().requires_grad_(False)
    phonemes = torch.from_numpy(np.repeat(speech(3)[2].phonemes, speech(3)[2].lengths))[None]
    loss = float(recogniser.perceptual_loss(rough.decode(before), frames, phonemes))
    codec = load(train("speech-decoder", 60), KINDS, None).requires_grad_(False)
    assert isinstance(codec, recipes.Codec) and torch.equal(codec.encode(frames), before)
    assert float(recogniser.perceptual_loss(codec.decode(before), frames, phonemes)) < 0.8 * loss


@pytest.mark.slow
def test_a_voice_trains(tmp_path: Path) -> None:
    data.save(tmp_path / "tokens.npz", speech(codes=8))
    request = TrainingRequest(
        recipes=("speech-voice",), data=tmp_path / "tokens.npz", out=tmp_path / "out", steps=150, batch=900, rate=4e-3,
        options={**SMALL, "drop": 0.0}, quiet=True,
    )  # fmt: skip
    (file,) = run.train(request, lambda _: None)
    validation = about(file)["provenance"]["validation"]
    assert validation["held-out nats per token"] < 0.25 * np.log(8) and validation["nats of the end token"] < 1
    voice = load(file, KINDS, None)
    assert isinstance(voice, Voice) and voice.end == 8
    script = voice.script([[0, 3, 5, 0]])
    assert 2 < script.lengths[0] < 60  # durations are random in this data


def test_batches_hold_their_utterances() -> None:
    task = VoiceTask(speech(codes=8), 8, 900, 0, torch.device("cpu"))
    utterances = task.training[:2]
    phonemes, present, durations, _, inputs, labels, mask = task.pad(utterances)
    for row, each in enumerate(utterances):
        size, tokens = len(each.phonemes), len(each.codes)
        assert phonemes[row, :size].tolist() == each.phonemes.tolist() and present[row].sum() == size
        assert durations[row].sum() == tokens and mask[row].sum() == tokens + 1
        assert inputs[row, : tokens + 1].tolist() == [8, *each.codes.tolist()]
        assert labels[row, : tokens + 1].tolist() == [*each.codes.tolist(), 8]
    batches = [task.batch(number, 0.0) for number in range(2 * task._count)]
    assert sum(len(batch[0]) for batch in batches[: task._count]) >= len(task.training)
    assert all(batch[4].numel() <= 1000 for batch in batches)
    again = task.batch(1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(again, batches[1], strict=True))


def test_missing_data_and_weights_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(InvalidOption, match="recipe"):
        run.train(TrainingRequest(recipes=("speech-song",)))
    with pytest.raises(NoWeights, match="outrider train speech-voice"):
        recipes.weights("speech-voice", tmp_path)
    with pytest.raises(data.DataError, match="speech-data"):
        run.train(TrainingRequest(recipes=("speech-codec",)))
