"""The codec: every code is what a nearest-neighbour search says, white is one code, and diffusers reads the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.image.grid import neighbours
from outrider.image.tokenizer import Layout, Tokenizer, loss, psnr

TINY = Layout(levels=(4, 3, 3), channels=(8, 16, 16))


@pytest.fixture
def codec() -> Tokenizer:
    torch.manual_seed(0)
    return Tokenizer(TINY).eval()


def test_codes_are_the_nearest_of_the_codebook(codec: Tokenizer) -> None:
    latents = torch.randn(2, 3, 5, 5) * 1.5
    far = (latents.movedim(1, -1)[..., None, :] - codec.codebook).square().sum(-1)
    assert torch.equal(codec.nearest(latents), far.argmin(-1))
    assert torch.equal(codec.nearest(codec.codebook.T[None, :, :, None])[0, :, 0], torch.arange(TINY.codes))


def test_white_patches_are_one_code(codec: Tokenizer) -> None:
    pictures = torch.ones(1, 3, 16, 16)
    pictures[:, :, 5, 6] = 0.0
    white = codec.encode(pictures)[0] == codec.white
    assert white.sum() >= 15 and white[0, 0] and white[3, 3]


@pytest.mark.slow
def test_it_learns(codec: Tokenizer) -> None:
    pictures = torch.ones(2, 3, 16, 16)
    pictures[:, 0, 4:12, 4:12] = -1.0
    optimiser = torch.optim.AdamW(codec.parameters(), 5e-3)
    before = psnr(codec(pictures)[0], pictures).mean()
    for _ in range(40):
        optimiser.zero_grad()
        back, outside = codec(pictures)
        loss(back, pictures, outside).backward()
        optimiser.step()
    assert psnr(codec.decode(codec.encode(pictures)), pictures).mean() > before + 3


@pytest.mark.slow
def test_saved_in_16_bits_it_is_the_same_here_and_in_diffusers(codec: Tokenizer, tmp_path: Path) -> None:
    codec.save(tmp_path, {"seed": 0})
    ours = Tokenizer.load(tmp_path)
    assert torch.equal(ours.codebook, codec.codebook)
    weights = tmp_path / "diffusion_pytorch_model.safetensors"
    assert weights.stat().st_size < 2.2 * sum(one.numel() for one in codec.parameters()) + 20_000
    pictures = torch.rand(2, 3, 16, 16) * 2 - 1
    with torch.no_grad():
        codes = ours.encode(pictures)
        back = ours.decode(codes)
        torch.testing.assert_close(back, codec.decode(codes), atol=0.02, rtol=0.02)
        diffusers = pytest.importorskip("diffusers")
        theirs = diffusers.VQModel.from_pretrained(tmp_path).float().eval()
        found = theirs.quantize(theirs.encode(pictures).latents)[2][2]
        assert torch.equal(found.view_as(codes), codes)
        shape = (2, 4, 4, 3)
        decoded = theirs.decode(codes, force_not_quantize=True, shape=shape).sample
    torch.testing.assert_close(decoded, back, atol=1e-5, rtol=1e-5)


def test_neighbours_of_a_lattice() -> None:
    book = Tokenizer(TINY).codebook
    near = neighbours(book, TINY.codes - 1)
    for own, row in enumerate(near.tolist()):
        assert sorted([own, *row]) == list(range(TINY.codes))
    far = (book[near].double() - book[:, None].double()).square().sum(-1)
    assert (far.diff(dim=-1) >= 0).all()
    with pytest.raises(ValueError, match="neighbours"):
        neighbours(book, TINY.codes)
