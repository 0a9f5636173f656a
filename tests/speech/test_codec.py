"""The quantiser's codes and levels, and the codec's training and context."""

from __future__ import annotations

import pytest
import torch

from outrider.core.errors import InvalidOption
from outrider.speech.codec import Codec, Quantiser


@pytest.mark.parametrize("levels", [(8, 5, 5, 5), (2, 3), (4,)])
def test_codes_and_levels_are_inverses(levels: tuple[int, ...]) -> None:
    quantiser = Quantiser(levels)
    codes = torch.arange(quantiser.size)
    points = quantiser.points(codes)
    assert len(points.unique(dim=0)) == quantiser.size and points.abs().max() == 1
    assert (quantiser.codes(points) == codes).all()
    rounded = quantiser(torch.randn(500, len(levels), generator=torch.Generator().manual_seed(0)))
    torch.testing.assert_close(quantiser.points(quantiser.codes(rounded)), rounded)


def test_gradients_are_straight_through() -> None:
    x = torch.randn(4, 3, requires_grad=True)
    Quantiser((5, 5, 5))(x).sum().backward()
    assert x.grad is not None and (x.grad > 0).all()


@pytest.mark.slow
def test_the_codec_trains() -> None:
    torch.manual_seed(0)
    kinds = torch.randn(6, 80) * 2 - 5
    mel = kinds[torch.randint(6, (8, 20)).repeat_interleave(2, 1)].transpose(1, 2)  # [8, 80, 40]
    codec = Codec(width=32, levels=(5, 5), depth=2)
    before = codec.distance(mel).item()
    optimiser = torch.optim.Adam(codec.parameters(), 5e-3)
    for _ in range(150):
        optimiser.zero_grad()
        codec.distance(mel).backward()
        optimiser.step()
    codes = codec.encode(mel)
    assert codes.shape == (8, 20) and codes.max() < 25
    assert codec.distance(mel).item() < before / 3
    torch.testing.assert_close(codec.decode(codes), codec.reconstruct(mel), rtol=1e-4, atol=1e-4)
    with pytest.raises(InvalidOption, match="multiple"):
        codec.encode(mel[..., :3])


def test_the_context_is_finite() -> None:
    torch.manual_seed(0)
    codec, codes = Codec(width=16, levels=(5, 5), depth=4).eval(), torch.randint(25, (1, 200))
    other = codes.clone()
    other[0, 150:] = 0
    torch.testing.assert_close(codec.decode(codes)[..., :180], codec.decode(other)[..., :180])
