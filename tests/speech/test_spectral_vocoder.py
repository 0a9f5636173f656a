"""The vocoder in the frequency domain: its inverse transform, the frames that a sample depends on, and its training."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from outrider.core.errors import InvalidOption
from outrider.core.training import trainer
from outrider.core.training.checkpoint import about, load
from outrider.core.training.request import TrainingRequest
from outrider.speech import load as load_voice
from outrider.speech import recipes
from outrider.speech.codec import FRAMES
from outrider.speech.mel import HOP, RATE, SILENCE, WINDOW, mel_frames
from outrider.speech.spectral_vocoder import SpectralVocoder, _overlapped
from outrider.speech.training import data, run, vocoder_training
from outrider.speech.vocoder import CONTEXT, Vocoder, VocoderStream


def test_spectra_of_a_sound_give_it_back() -> None:
    sound = torch.randn(2, 20 * HOP, dtype=torch.double, generator=torch.Generator().manual_seed(0))
    window = torch.hann_window(WINDOW, dtype=torch.double)
    around = torch.nn.functional.pad(sound, ((WINDOW - HOP) // 2,) * 2)
    spectrum = torch.stft(around, WINDOW, HOP, window=window, center=False, return_complex=True)
    back = _overlapped(torch.fft.irfft(spectrum, n=WINDOW, dim=1) * window[:, None])
    inside = slice(2 * HOP, -2 * HOP)  # at the edges windows are missing
    torch.testing.assert_close(back[:, inside], sound[:, inside], rtol=0, atol=1e-12)


def random_vocoder() -> SpectralVocoder:
    torch.manual_seed(0)
    vocoder = SpectralVocoder(width=24, hidden=48).double().requires_grad_(False)
    for block in vocoder.blocks:
        block.gain.fill_(3.0)  # large enough that every frame in the context matters
    return vocoder


def test_a_sample_depends_on_the_frames_of_the_context_and_no_others() -> None:
    vocoder, mel = random_vocoder(), torch.randn(1, 80, 60, dtype=torch.double)
    before = vocoder(mel).view(60, HOP)
    mel[:, :, 30] += 1
    changed = (vocoder(mel).view(60, HOP) != before).any(1).nonzero()[:, 0]
    assert (int(changed[0]), int(changed[-1])) == (30 - CONTEXT, 30 + CONTEXT)
    with pytest.raises(InvalidOption, match="layers"):
        SpectralVocoder(layers=7)


def test_products_in_16_bits_change_little() -> None:
    vocoder, mel = random_vocoder().float(), torch.randn(1, 80, 20)
    with torch.autocast("cpu", torch.bfloat16):
        rough = vocoder(mel)
    exact = vocoder(mel)
    assert rough.dtype == torch.float32 and 0 < (rough - exact).norm() < 0.1 * exact.norm()


def test_streaming_equals_the_whole() -> None:
    vocoder, mel = random_vocoder(), torch.randn(80, 90, dtype=torch.double)
    whole = vocoder(torch.nn.functional.pad(mel, (0, 2 * CONTEXT), value=SILENCE)[None])[0, : 90 * HOP]
    for size in (5, 40, 90):
        stream = VocoderStream(vocoder)
        chunks = [stream.push(frames) for frames in mel.split(size, 1)]
        torch.testing.assert_close(torch.cat([*chunks, stream.finish()]), whole, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_it_trains_on_the_teachers_sound_and_then_with_discriminators(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.setattr(trainer, "plot", lambda history, path: False)
    monkeypatch.setattr(vocoder_training, "_SPEECH", (8.0, 8.0))
    torch.manual_seed(0)
    monkeypatch.setattr(recipes, "hifi_gan", lambda device: Vocoder(16).eval().requires_grad_(False))
    shipped = data.load(recipes.training_data()[0])
    some = [one for one in shipped if not one.held_out][:12] + [one for one in shipped if one.held_out][:2]
    data.save(tmp_path / "a.npz", some)
    out, log = tmp_path / "out", list[str]()
    request = TrainingRequest(
        recipes=("speech-vocoder",),
        data=tmp_path / "a.npz",
        out=out,
        steps=12,
        batch=2,
        rate=3e-3,
        options={"width": 24, "hidden": 48, "layers": 2},
        quiet=True,
    )
    (file,) = run.train(request, log.append)
    sounds = sorted(path.name for path in (out / "sounds").iterdir())
    assert 3 < len(sounds) < 14 and sum(name.startswith("held-out") for name in sounds) == 2
    curve = [
        row["models"]["speech-vocoder"]["held-out spectral distance"]
        for row in json.loads((out / "curve.json").read_text())
    ]
    assert curve[-1] < 0.9 * curve[0]
    facts = about(file)["provenance"]
    assert facts["sounds"] == len(sounds) - 2 and facts["done"]["steps"] == 12
    vocoder = load(file, recipes.KINDS, None)
    assert isinstance(vocoder, SpectralVocoder) and vocoder(torch.zeros(1, 80, 7)).shape == (1, 7 * HOP)
    again = TrainingRequest(**{**vars(request), "out": tmp_path / "more", "start": file, "steps": 2})
    (tmp_path / "more").mkdir()
    (out / "sounds").rename(tmp_path / "more" / "sounds")
    (file,) = run.train(again, log.append)
    assert about(file)["provenance"]["done"]["steps"] == 2


def test_the_losses_tell_sounds_apart() -> None:
    generator = torch.Generator().manual_seed(0)
    sound = torch.randn(2, 64 * HOP, generator=generator) / 10
    assert vocoder_training.spectral_distance(sound, sound, 1.0) < 1e-3
    near, far = (sound + scale * torch.randn(sound.shape, generator=generator) for scale in (0.01, 0.1))
    distances = [float(vocoder_training.spectral_distance(one, sound, 0.0)) for one in (near, far, -sound)]
    assert 0 < distances[0] < distances[1] and distances[2] < 1e-6, "magnitudes have no sign"
    assert vocoder_training.spectral_distance(-sound, sound, 1.0) > 1
    judged = vocoder_training.Discriminators()(sound)
    assert len(judged) == 8 and all(len(part) == 6 for part in judged)


def test_the_shipped_vocoder_keeps_the_frames() -> None:
    """Its sound of the shipped speech has the mel frames that it was made from."""
    voice = load_voice(device="cpu", dtype="float32", vocoder="vocos")
    (held_out, *_) = [one for one in data.load(recipes.training_data()[0]) if one.held_out]
    with torch.no_grad():
        mel = voice.codec.decode(torch.from_numpy(held_out.codes.astype("int64"))[None])[0]
        sound = VocoderStream(voice.vocoder).finish(mel)
    assert len(sound) == mel.shape[1] * HOP and 0.05 < float(sound.abs().max()) <= 1
    error = (mel_frames(sound) - mel).abs()[mel > -6]
    assert float(error.mean()) < 0.35
    result = voice.generate("Good morning.", seed=1)
    assert result.sound.sample_rate == RATE and len(result.sound.samples) == FRAMES * HOP * (len(result.tokens) - 1)
    with pytest.raises(InvalidOption, match="vocoder"):
        load_voice(vocoder="wavenet")
