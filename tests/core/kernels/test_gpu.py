"""The kernels in Triton compute what torch does, over random sizes and types: in Triton's interpreter, or on a GPU.

`make shadow` draws 500 sizes a kernel, the suite 20, a GPU 40: it needs seconds to compile each new size."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from tests.core.kernels.gpu_cases import CASES, TOLERANCE, Draw, worst

ALL = os.environ.get("OUTRIDER_SHADOW") == "all"
DEVICE, FEW, MANY = ("cuda", 2, 40) if torch.cuda.is_available() else ("cpu", 2, 500 if ALL else 20)


def check(name: str, dtype: torch.dtype, seeds: range) -> None:
    for seed in seeds:
        error = worst(name, CASES[name](Draw(seed, dtype, DEVICE)), dtype)
        assert error <= 1, f"seed {seed}: {error:.2f} times the tolerance"


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_a_kernel_computes_what_torch_does(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, range(FEW))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_many_shapes(name: str, dtype: torch.dtype) -> None:
    check(name, dtype, range(FEW, MANY))


@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_use_the_products_where_triton_is(bits: int) -> None:
    """The layer of our own format gives what its dequantised weight gives, by one kernel."""
    from outrider.core.engine.quantization.quantize import Int4, Int8
    from outrider.core.kernels.gpu import functions

    draw = Draw(bits, torch.float32, DEVICE)
    layer = (Int8 if bits == 8 else Int4)(draw.normal(24, 64), draw.normal(24))
    layer._triton = functions
    x = draw.normal(3, 64)
    torch.testing.assert_close(layer(x), torch.nn.functional.linear(x, layer.weight, layer.bias), rtol=1e-5, atol=1e-5)
