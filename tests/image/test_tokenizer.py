"""The image tokenizer: codes are nearest neighbours, white is one code, and diffusers loads the same weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.image.grid import neighbours
from outrider.image.tokenizer import Layout, Tokenizer, psnr, reconstruction_loss

TINY = Layout(levels=(4, 3, 3), channels=(8, 16, 16))


@pytest.fixture
def codec() -> Tokenizer:
    torch.manual_seed(0)
    return Tokenizer(TINY).eval()


def test_codes_are_nearest_neighbours_in_the_codebook(codec: Tokenizer) -> None:
    latents = torch.randn(2, 3, 5, 5) * 1.5
    distances = (latents.movedim(1, -1)[..., None, :] - codec.codebook).square().sum(-1)
    assert torch.equal(codec.nearest(latents), distances.argmin(-1))
    assert torch.equal(codec.nearest(codec.codebook.T[None, :, :, None])[0, :, 0], torch.arange(TINY.codes))


def test_an_all_white_patch_always_has_the_white_code(codec: Tokenizer) -> None:
    pictures = torch.ones(1, 3, 16, 16)
    pictures[:, :, 5, 6] = 0.0
    white = codec.encode(pictures)[0] == codec.white
    assert white.sum() >= 15 and white[0, 0] and white[3, 3]


@pytest.mark.slow
def test_training_raises_psnr(codec: Tokenizer) -> None:
    pictures = torch.ones(2, 3, 16, 16)
    pictures[:, 0, 4:12, 4:12] = -1.0
    optimiser = torch.optim.AdamW(codec.parameters(), 5e-3)
    before = psnr(codec(pictures)[0], pictures).mean()
    for _ in range(40):
        optimiser.zero_grad()
        reconstruction, out_of_range = codec(pictures)
        reconstruction_loss(reconstruction, pictures, out_of_range).backward()
        optimiser.step()
    assert psnr(codec.decode(codec.encode(pictures)), pictures).mean() > before + 3


@pytest.mark.slow
def test_a_saved_tokenizer_gives_the_same_pictures_here_and_in_diffusers(codec: Tokenizer, tmp_path: Path) -> None:
    codec.save(tmp_path, {"seed": 0})
    ours = Tokenizer.load(tmp_path)
    assert torch.equal(ours.codebook, codec.codebook)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_size < 2.2 * sum(weight.numel() for weight in codec.parameters()) + 20_000
    pictures = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        codes = ours.encode(pictures)
        reconstruction = ours.decode(codes)
        torch.testing.assert_close(reconstruction, codec.decode(codes), atol=0.02, rtol=0.02)
        diffusers = pytest.importorskip("diffusers")
        theirs = diffusers.VQModel.from_pretrained(tmp_path).float().eval()
        their_codes = theirs.quantize(theirs.encode(pictures).latents)[2][2]
        assert torch.equal(their_codes.view_as(codes), codes)
        shape = (2, 4, 4, 3)
        decoded = theirs.decode(codes, force_not_quantize=True, shape=shape).sample
    torch.testing.assert_close(decoded, reconstruction, atol=1e-5, rtol=1e-5)


def test_neighbours_cover_the_codebook_in_order_of_distance() -> None:
    codebook = Tokenizer(TINY).codebook
    nearest = neighbours(codebook, TINY.codes - 1)
    for code, row in enumerate(nearest.tolist()):
        assert sorted([code, *row]) == list(range(TINY.codes))
    distances = (codebook[nearest].double() - codebook[:, None].double()).square().sum(-1)
    assert (distances.diff(dim=-1) >= 0).all()
    with pytest.raises(ValueError, match="neighbours"):
        neighbours(codebook, TINY.codes)
