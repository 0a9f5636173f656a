"""Recipes: from speech in a folder to weights that can be loaded, going on where a run was broken off."""

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
from outrider.speech import recipes
from outrider.speech.recipes import KINDS
from outrider.speech.training import data, run
from outrider.speech.training.data import Utterance
from outrider.speech.training.run import TrainingRequest, VoiceTask
from outrider.speech.voice import Voice

pytest.importorskip("accelerate")


@pytest.fixture(autouse=True)
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer, "plot", lambda history, path: False)  # takes longer than all the rest


SMALL = {"width": 32, "layers": 2, "heads": 2, "hidden": 48, "reading": 16}


def speech(count: int = 90, codes: int = 0) -> list[Utterance]:
    """Every phoneme has a frame of its own, which it keeps up for as long as it lasts."""
    draw = np.random.default_rng(0)
    looks = draw.integers(0, 255, (8, 80))
    found = []
    for number in range(count):
        said = np.concatenate([[0], draw.integers(1, 8, 12), [0]])
        lengths = draw.integers(4, 20, len(said)) // 2 * 2
        mel = np.repeat(looks[said], lengths, 0).T.astype(np.uint8)
        tokens = np.repeat(said, lengths // 2) if codes else np.zeros(0, np.int64)
        mel = mel[:, :0] if codes else mel
        found.append(Utterance(f"number {number}", "numbers", said, lengths, 1.0, mel, tokens))
    return found


@pytest.mark.slow
def test_a_codec_is_trained_loaded_and_gone_on_with(tmp_path: Path) -> None:
    data.save(tmp_path / "a.npz", speech())
    options = {"width": 24, "levels": (5, 5), "depth": 2}
    wanted = TrainingRequest(
        recipes=("speech-codec",), data=tmp_path, out=tmp_path / "out", steps=60, batch=4, rate=8e-3, options=options,
        quiet=True,
    )  # fmt: skip
    said: list[str] = []
    (file,) = run.train(wanted, said.append)
    codec = load(file, KINDS, None)
    assert isinstance(codec, recipes.Codec) and codec.codes == 25 and "90 sentences" in said[0]
    frames = data.unpacked(speech(3)[2].mel)[None]
    loud = frames > -5  # what counts most
    near = (codec.decode(codec.encode(frames)) - frames).abs()[loud].mean()
    assert near < 0.9 * (codec.mean - frames).abs()[loud].mean()
    facts = about(file)["provenance"]
    assert facts["recipe"] == "speech-codec" and facts["done"]["steps"] == 60
    run.train(TrainingRequest(**{**vars(wanted), "steps": 64}), said.append)
    assert about(file)["provenance"]["done"]["steps"] in (60, 64) and "64 steps" in said[-1]


@pytest.mark.slow
def test_a_decoder_learns_to_be_understood_and_codes_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    data.save(tmp_path / "a.npz", speech())
    rough = recipes.Codec(width=24, levels=(5, 5), depth=2).requires_grad_(False).bfloat16().float()  # as it is kept

    def learned(name: str, steps: int, **more: Any) -> Path:
        wanted = TrainingRequest(
            recipes=(name,), data=tmp_path / "a.npz", steps=steps, batch=4, rate=8e-3, quiet=True, **more
        )  # fmt: skip
        return run.train(wanted, lambda _: None)[0]

    listener = learned("speech-listener", 60, options={"width": 24, "depth": 2, "drop": 0.0})
    assert about(listener)["provenance"]["validation"]["frames heard"] > 0.9
    monkeypatch.setattr(recipes, "codec", lambda: rough)
    frames = data.unpacked(speech(3)[2].mel)[None]
    before, heard = rough.encode(frames), recipes.listener().requires_grad_(False)
    said = torch.from_numpy(np.repeat(speech(3)[2].phonemes, speech(3)[2].lengths))[None]
    off = float(heard.misheard(rough.decode(before), frames, said))
    codec = load(learned("speech-decoder", 60), KINDS, None).requires_grad_(False)
    assert isinstance(codec, recipes.Codec) and torch.equal(codec.encode(frames), before)
    assert float(heard.misheard(codec.decode(before), frames, said)) < 0.8 * off


@pytest.mark.slow
def test_a_voice_learns_what_phonemes_sound_like(tmp_path: Path) -> None:
    data.save(tmp_path / "tokens.npz", speech(codes=8))
    wanted = TrainingRequest(
        recipes=("speech-voice",), data=tmp_path / "tokens.npz", out=tmp_path / "out", steps=150, batch=900, rate=4e-3,
        options={**SMALL, "drop": 0.0}, quiet=True,
    )  # fmt: skip
    (file,) = run.train(wanted, lambda _: None)
    judged = about(file)["provenance"]["validation"]
    assert judged["held-out nats a token"] < 0.25 * np.log(8) and judged["nats of the end"] < 1
    voice = load(file, KINDS, None)
    assert isinstance(voice, Voice) and voice.end == 8
    script = voice.script([[0, 3, 5, 0]])
    assert 2 < script.lengths[0] < 60  # lengths are drawn anew each time: nobody can know them


def test_rows_of_a_batch_say_what_their_utterances_say() -> None:
    course = VoiceTask(speech(codes=8), 8, 900, 0, torch.device("cpu"))
    one, two = course.learned[:2]
    said, there, shares, _, read, label, counts = course.rows([one, two])
    for row, each in enumerate((one, two)):
        size, tokens = len(each.phonemes), len(each.codes)
        assert said[row, :size].tolist() == each.phonemes.tolist() and there[row].sum() == size
        assert shares[row].sum() == tokens and counts[row].sum() == tokens + 1
        assert read[row, : tokens + 1].tolist() == [8, *each.codes.tolist()]
        assert label[row, : tokens + 1].tolist() == [*each.codes.tolist(), 8]
    batches = [course.batch(number, 0.0) for number in range(2 * course._each)]
    assert sum(len(batch[0]) for batch in batches[: course._each]) >= len(course.learned)
    assert all(batch[4].numel() <= 1000 for batch in batches)
    again = course.batch(1, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(again, batches[1], strict=True))


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(InvalidOption, match="recipe"):
        TrainingRequest(recipes=("speech-song",))
    with pytest.raises(NoWeights, match="outrider train speech-voice"):
        recipes.weights("speech-voice", tmp_path)
    with pytest.raises(data.DataError, match="speech-data"):
        run.train(TrainingRequest(recipes=("speech-codec",)))
