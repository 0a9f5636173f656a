"""Products of the compiled kernels are what the weights say, and the same for a row whoever shares the product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from outrider.core.engine.linear import Dense, fastest
from outrider.core.engine.quantization.quantize import Int4, Int8
from outrider.core.kernels import native

KINDS = (None, Int8, Int4)

needs_code = pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def rounded(x: Tensor) -> Tensor:
    """To 127 steps of the largest of 32 numbers."""
    groups = x.float().unflatten(-1, (-1, native.GROUP))
    most = groups.abs().amax(-1, keepdim=True)
    return ((groups * (127 / most)).round().double() * (most / 127).double()).flatten(-2)


def tiled(kind: type[Int8] | type[Int4] | None, weight: Tensor, bias: Tensor | None = None) -> native.Tiled:
    return native.Tiled(weight, None, None, bias) if kind is None else kind(weight, bias).tiled()


@pytest.mark.slow
@needs_code
@pytest.mark.parametrize("kind", KINDS)
def test_products_are_what_the_weights_say(ways: str, kind: type[Int8] | type[Int4] | None) -> None:
    weight, bias = noise(80, 128), noise(80, seed=1)
    made = tiled(kind, weight, bias)
    plain = weight if kind is None else kind(weight).weight
    torch.testing.assert_close(made.weight, plain, atol=0.02, rtol=0.01)
    if kind is None:
        assert torch.equal(made.weight, weight)
    for rows in (1, 2, 7, 11, 12, 16, 17, 40, 64, 100, 300):
        x = noise(rows, 128, seed=rows)
        found = made.product(x, torch.float32)
        read = rounded(x) if kind is Int4 else x.double()
        wanted = read @ plain.double().T + bias.double()
        assert (found - wanted).abs().max() < {None: 1e-4, Int8: 0.15, Int4: 0.3}[kind]  # `plain` is itself rounded
        assert torch.equal(made(x), found.bfloat16())
        alone = torch.cat([made.product(x[row : row + 1], torch.float32) for row in range(rows)])
        assert torch.equal(found, alone), "a row's numbers depend on how many rows there are"


@needs_code
def test_inputs_of_weights_of_eight_bits_are_rounded_where_they_may_be(ways: str) -> None:
    weights = Int8(noise(80, 128))
    exact, made = weights.tiled(), weights.tiled(rounds=True)
    for rows in (1, 2, 7, 12, 13, 40):
        x = noise(rows, 128, seed=rows)
        found = made.product(x, torch.float32)
        if ways != "avx2":
            wanted = rounded(x) @ (weights.ints.double() * weights.scales.double()[:, None]).T
            assert ((found - wanted).abs() < 1e-4).double().mean() > 0.4  # all but rows with a tie
            assert not torch.isclose(found, exact.product(x, torch.float32), atol=1e-4).all(1).any()
        else:
            assert torch.equal(found, exact.product(x, torch.float32))
        alone = torch.cat([made.product(x[row : row + 1], torch.float32) for row in range(rows)])
        assert torch.equal(found, alone), "a row's numbers depend on how many rows there are"


@needs_code
def test_integers_are_summed_alike_with_tiles_and_without() -> None:
    code = native.library()
    assert code is not None
    if code.outrider_ready(1) != 2:
        pytest.skip("this processor has no tile unit")
    for made in (Int4(noise(80, 160)).tiled(), Int8(noise(80, 160)).tiled(rounds=True)):
        for rows in (1, 12, 13, 16, 17, 33, 64, 300):
            x, found = noise(rows, 160, seed=rows), list[Tensor]()
            for tiles in (0, 1):
                code.outrider_ready(tiles)
                found.append(made.product(x, torch.float32))
            assert torch.equal(*found)


@needs_code
def test_a_few_tokens_in_32_bits_are_what_the_weights_say() -> None:
    weight, bias = noise(83, 100).float(), noise(83, seed=1).float()
    laid = fastest(Dense(weight, bias))
    for rows in (1, 3, 4, 7, 12, 13, 40):
        x = noise(rows, 100, seed=rows).float()
        found = laid(x)
        assert (found - (x.double() @ weight.double().T + bias.double())).abs().max() < 1e-4
        alone = torch.cat([laid(x[row : row + 1]) for row in range(rows)])
        assert torch.equal(found, alone) or rows > 12, "a row's numbers depend on how many rows there are"
    assert laid(noise(0, 100).float()).shape == (0, 83)


@needs_code
def test_threads_share_the_work_and_change_nothing(ways: str) -> None:
    made, x = tiled(Int4, noise(7 * 16, 96)), noise(5, 96, seed=2)
    alone = made(x)
    before = torch.get_num_threads()
    try:
        for threads in (2, 3, 9):
            torch.set_num_threads(threads)
            assert torch.equal(made(x), alone)
    finally:
        torch.set_num_threads(before)
