"""Mel frames against an independent filter bank, and streaming vocoding against vocoding of the whole."""

from __future__ import annotations

import pytest
import torch

from outrider.core.errors import InvalidOption
from outrider.speech.mel import HOP, RATE, SILENCE, _filter_bank, mel_frames
from outrider.speech.vocoder import CONTEXT, Vocoder, VocoderStream


def test_the_filter_bank_is_slaneys() -> None:
    audio = pytest.importorskip("transformers.audio_utils")
    theirs = audio.mel_filter_bank(513, 80, 0.0, 8000.0, RATE, norm="slaney", mel_scale="slaney")
    torch.testing.assert_close(_filter_bank(), torch.from_numpy(theirs).T.double(), rtol=0, atol=1e-9)


def test_a_tone_peaks_in_its_bin() -> None:
    time = torch.arange(RATE) / RATE
    for hertz in (300.0, 2000.0, 5000.0):
        frames = mel_frames(torch.sin(2 * torch.pi * hertz * time) / 2)
        assert frames.shape == (80, RATE // HOP)
        centre = (_filter_bank() * torch.linspace(0, RATE / 2, 513)).sum(1) / _filter_bank().sum(1)
        assert (centre[frames[:, 40].argmax()] - hertz).abs() < 0.06 * hertz
    with pytest.raises(InvalidOption, match="at least one window"):
        mel_frames(torch.zeros(100))


@pytest.mark.slow
def test_streaming_equals_the_whole() -> None:
    torch.manual_seed(0)
    vocoder = Vocoder(32).double()
    for parameter in vocoder.parameters():  # large enough that every frame in the context matters
        parameter.data *= 2
    mel = torch.randn(80, 90, dtype=torch.double)
    with torch.no_grad():  # the stream appends silence
        whole = vocoder(torch.nn.functional.pad(mel, (0, CONTEXT), value=SILENCE)[None])[0, : 90 * HOP]
    for size in (5, 40, 90):
        stream = VocoderStream(vocoder)
        chunks = [stream.push(frames) for frames in mel.split(size, 1)]
        torch.testing.assert_close(torch.cat([*chunks, stream.finish()]), whole, rtol=0, atol=1e-12)
    assert not len(VocoderStream(vocoder).finish())


def test_weight_normalised_checkpoints_load() -> None:
    torch.manual_seed(0)
    plain = Vocoder(16)
    tensors = {}
    for name, ours in plain.state_dict().items():
        tensor = ours[:, :, 0] if ours.ndim == 4 else ours  # published weights are one-dimensional
        if name.endswith("weight"):
            tensors[name + "_v"] = tensor * 3
            tensors[name + "_g"] = tensor.flatten(1).norm(dim=1)[:, None, None]
        else:
            tensors[name] = tensor
    mel = torch.randn(1, 80, 5)
    torch.testing.assert_close(Vocoder.from_tensors(tensors)(mel), plain(mel).detach(), rtol=0, atol=1e-5)
    with pytest.raises(InvalidOption, match="HiFi-GAN"):
        Vocoder.from_tensors({"bias": torch.zeros(1)})
