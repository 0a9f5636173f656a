"""HiFi-GAN's generator in compiled kernels, held against torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.kernels import vocoder as kernels
from outrider.speech.mel import BINS
from outrider.speech.vocoder import _UPS, Vocoder, VocoderStream

pytestmark = pytest.mark.skipif(not kernels.usable(512, [stride for stride, _ in _UPS]), reason="no tiles of 16 bits")


@pytest.fixture(scope="module")
def generator() -> Vocoder:
    """A generator with random weights that keep the size of what passes."""
    torch.manual_seed(0)
    made = Vocoder().eval().requires_grad_(False)
    for layer in made.modules():
        if isinstance(layer, torch.nn.Conv2d | torch.nn.ConvTranspose2d):
            torch.nn.init.kaiming_normal_(layer.weight).mul_(0.55)
            layer.bias.normal_(std=0.05)
    return made


@pytest.fixture(scope="module")
def halved(generator: Vocoder) -> Vocoder:
    made = Vocoder().eval().requires_grad_(False).to(torch.bfloat16)
    made.load_state_dict(generator.state_dict())
    return made


@torch.no_grad()
def sound_of(vocoder: Vocoder, frames: int = 24, seed: int = 1) -> Tensor:
    return vocoder(torch.randn(1, BINS, frames, generator=torch.Generator().manual_seed(seed)))[0]


def test_sound_is_as_close_to_32_bits_as_torch_in_16(
    generator: Vocoder, halved: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, wanted = sound_of(halved), sound_of(generator)
    monkeypatch.setattr(halved, "_compiled", lambda: None)
    torchs = sound_of(halved)
    assert wanted.std() > 0.01 and not torch.equal(found, torchs)
    assert (found - wanted).abs().mean() < 1.2 * (torchs - wanted).abs().mean()
    assert (found - wanted).abs().max() < 1.5 * (torchs - wanted).abs().max()


def test_samples_do_not_depend_on_threads_nor_on_what_was_computed_before(halved: Vocoder) -> None:
    threads, first = torch.get_num_threads(), sound_of(halved)
    sound_of(halved, 60, seed=2)  # leaves its numbers behind
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            assert torch.equal(sound_of(halved), first)
    finally:
        torch.set_num_threads(threads)


def test_a_stream_has_the_samples_of_the_whole_bit_for_bit(halved: Vocoder) -> None:
    mel = torch.randn(BINS, 90, generator=torch.Generator().manual_seed(3))
    stream, whole = VocoderStream(halved), VocoderStream(halved)
    parts = [stream.push(mel[:, :33]), stream.push(mel[:, 33:70]), stream.finish(mel[:, 70:])]
    assert torch.equal(torch.cat(parts), whole.finish(mel))


def test_other_generators_and_gradients_are_left_to_torch(halved: Vocoder, monkeypatch: pytest.MonkeyPatch) -> None:
    assert halved._compiled() is None  # gradients are on here
    with torch.no_grad():
        assert Vocoder()._compiled() is None  # 32 bits
        assert Vocoder(128).to(torch.bfloat16)._compiled() is None  # other widths
        monkeypatch.setattr(kernels, "_library", lambda: None)
        assert Vocoder().to(torch.bfloat16)._compiled() is None
