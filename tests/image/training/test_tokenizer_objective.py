"""The tokenizer's training: its batches, its measures, and the decoder alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from outrider.image.prompt_encoder import COMMON, HELD_OUT
from outrider.image.tokenizer import Layout, Tokenizer
from outrider.image.training.data import Picture, Pictures, split
from outrider.image.training.tokenizer_objective import CodecObjective, CodecTask, edge_energy, flat_shapes


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    def square(n: int, name: str) -> Picture:
        pixels = np.full((64, 64, 3), 255, np.uint8)
        pixels[8 : 24 + n, 8 : 24 + n] = (10 * n, 200, 30)
        return Picture(name, (), pixels)

    return split({"noto": [square(n, name) for n, name in enumerate((*HELD_OUT[:4], *COMMON[:20]))]})


def test_flat_shapes_have_at_most_two_colours() -> None:
    shapes = flat_shapes(32, torch.Generator().manual_seed(0))
    assert shapes.shape == (32, 3, 64, 64) and shapes.abs().max() <= 1
    colours = [len(torch.unique(shape.flatten(1), dim=1).T) for shape in shapes]
    assert set(colours) == {1, 2}, "flat throughout, or a shape on a ground"
    assert torch.allclose((shapes + 1) * 127.5, ((shapes + 1) * 127.5).round(), atol=1e-4), "colours of 8 bits"


def test_a_batch_depends_on_its_number_and_has_flat_shapes(pictures: Pictures) -> None:
    task = CodecTask(pictures, 24, 0, torch.device("cpu"))
    (first,), (again,), (other,) = (task.batch(number, 0.0) for number in (1, 1, 2))
    assert first.shape == (24, 3, 64, 64) and torch.equal(first, again) and not torch.equal(first, other)
    assert first.abs().max() <= 1


def test_edge_energy_is_zero_on_flat_images_and_falls_with_blur() -> None:
    image = torch.ones(1, 3, 64, 64)
    assert edge_energy(image).item() == 0
    image[:, :, 20:40, 20:40] = -1
    blurred = torch.nn.functional.avg_pool2d(image, 3, 1, 1, count_include_pad=False)
    assert 0 < edge_energy(blurred).item() < 0.5 * edge_energy(image).item()


def test_the_decoder_alone_learns_and_codes_keep_their_meaning(pictures: Pictures) -> None:
    torch.manual_seed(0)
    codec = Tokenizer(Layout(levels=(4, 3, 3), channels=(8, 16, 16)))
    task = CodecTask(pictures, 4, 0, torch.device("cpu"))
    objective = CodecObjective(codec, only_decoder=True)
    pixels = task.batches.pixels(task.held_out)
    with torch.no_grad():
        codes, before = codec.encode(pixels), task.evaluate(objective)
    trained = [weight for weight in objective.parameters() if weight.requires_grad]
    assert 0 < len(trained) < len(list(objective.parameters()))
    optimiser = torch.optim.AdamW(trained, 5e-3)
    for number in range(12):
        optimiser.zero_grad()
        objective(*task.batch(number, 0.0)).backward()
        optimiser.step()
    with torch.no_grad():
        after = task.evaluate(objective)
    assert after["PSNR"] > before["PSNR"] + 1 and {"edge energy", "codes used"} <= set(after)
    assert torch.equal(codes, codec.encode(pixels))
