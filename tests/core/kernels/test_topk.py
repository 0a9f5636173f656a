"""The largest of many numbers are the same as torch's, whoever finds them."""

import pytest
import torch

from outrider.core.kernels import native
from outrider.core.kernels.topk import argmax, largest


@pytest.mark.parametrize("code", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 7, 64, 65, 300])
def test_values_and_places_are_torchs(code, dtype, count, monkeypatch):
    if not code:
        monkeypatch.setattr(native, "library", lambda: None)
    generator = torch.Generator().manual_seed(count)
    for shape in ((1, 3000), (2, 5, 1024), (3, 1, 1091), (4, 40), (2, 1030)):
        size = min(count, shape[-1])
        values = torch.rand(shape, generator=generator).to(dtype)
        best, places = largest(values, size)
        assert torch.equal(best, values.topk(size).values)
        assert torch.equal(values.gather(-1, places), best)
        assert all(len(set(row)) == size for row in places.reshape(-1, size).tolist())
        assert torch.equal(argmax(values), (values == values.amax(-1, keepdim=True)).int().argmax(-1))


def test_of_equals_the_first_and_what_is_ruled_out_comes_last():
    values = torch.full((2, 3, 2048), -torch.inf)
    values[..., [5, 900, 2047]] = 1.0
    best, places = largest(values, 5)
    assert places[..., :3].eq(torch.tensor([5, 900, 2047])).all()
    assert best[..., 3:].eq(-torch.inf).all()
    assert argmax(torch.zeros(3, 2000)).eq(0).all()


def test_rows_may_be_part_of_something_larger():
    values = torch.randn(2, 9, 1500, generator=torch.Generator().manual_seed(0))
    for part in (
        values[:, :4],
        values[1:, 2:5],
        values[:, ::2],
        values.transpose(0, 1),
        values[..., ::2],
        values[0, 3],
    ):
        best, places = largest(part, 6)
        assert torch.equal(best, part.topk(6).values)
        assert torch.equal(places, part.topk(6).indices)
