"""torchao's 8-bit weights agree with ours; on a GPU a decoder runs on its 8- and 4-bit weights."""

from __future__ import annotations

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.drafters.lookup.prompt_lookup import PromptLookup
from outrider.core.engine.network import random_network
from outrider.core.engine.quantization import torchao_linear
from outrider.core.engine.quantization.quantize import Int8, quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import make_rule

pytest.importorskip("torchao", reason="pip install outrider[cuda]")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("biased", [False, True])
def test_int8_agrees_with_our_own(biased: bool) -> None:
    torch.manual_seed(0)
    weight, x = torch.randn(48, 64, dtype=torch.bfloat16), torch.randn(5, 64, dtype=torch.bfloat16)
    bias = torch.randn(48, dtype=torch.bfloat16) if biased else None
    theirs, ours = torchao_linear.TorchaoLinear(weight, bias, 8), Int8(weight, bias)
    step = weight.float().abs().amax(1, keepdim=True) / 127
    assert ((theirs.weight.float() - weight.float()).abs() <= 0.55 * step + 0.01).all()
    torch.testing.assert_close(theirs(x), ours(x), rtol=0.05, atol=0.1)
    assert theirs.weight_bytes < weight.nbytes * 0.6


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_quantized_decoder_runs_on_a_gpu(bits: int) -> None:
    config = Config(
        vocabulary=512, hidden_size=1024, layers=2, heads=8, kv_heads=4, head_dim=64, intermediate_size=2048
    )
    network = random_network(config, 1, dtype=torch.bfloat16, device="cuda")
    quantized = quantize(network, bits)
    assert isinstance(quantized.layers[0].qkv, torchao_linear.TorchaoLinear)
    assert quantized.weight_bytes < network.weight_bytes * {8: 0.6, 4: 0.45}[bits]
    x = torch.randn(4, 1024, dtype=torch.bfloat16, device="cuda")
    product = quantized.layers[0].qkv
    torch.testing.assert_close(product(x).float(), (x @ product.weight.T).float(), rtol=0.05, atol=0.2)
    steps = decode(
        Decoder(quantized),
        PromptLookup(),
        make_rule("exact"),
        [[5, 6, 5, 6]],
        sampling=Sampling(temperature=0),
        max_new_tokens=20,
    )
    assert sum(len(step.emitted) for step in steps) == 20
