"""Quantized checkpoints of the published layouts: each is read as its reference formula, written here element by
element, dequantises it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.checkpoints import CheckpointError, Tensors, load, parse_config
from outrider.core.engine.quantization.published import Dequantized, readable
from outrider.core.engine.quantization.quantize import Int4, quantize_linear
from outrider.core.methods import make_rule

OUT, IN = 24, 64
FP8 = torch.float8_e4m3fn
LAYER = "model.layers.0.mlp.up_proj"
SHAPE: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "tie_word_embeddings": True,
}


def nibbles(words: Tensor, bits: int = 4) -> list[list[list[int]]]:
    """Of each 32-bit word the numbers in it, lowest bits first."""
    mask = (1 << bits) - 1
    return [[[(word >> shift) & mask for shift in range(0, 32, bits)] for word in row] for row in words.tolist()]


def words(rows: int, columns: int) -> Tensor:
    return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)


def fp8(out: int, into: int, scale: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    return torch.randn(out, into).to(FP8), torch.rand(scale) * 0.1 + 0.01


def awq(out: int, into: int, group: int) -> tuple[dict[str, Tensor], Tensor]:
    """The tensors of a layer and its weight."""
    parts = {"qweight": words(into, out // 8), "qzeros": words(into // group, out // 8)}
    parts["scales"] = (torch.rand(into // group, out) * 0.1).half()
    place = [0, 4, 1, 5, 2, 6, 3, 7]
    numbers, zeros, weight = nibbles(parts["qweight"]), nibbles(parts["qzeros"]), torch.zeros(out, into)
    for o in range(out):
        for i in range(into):
            q, z = numbers[i][o // 8][place[o % 8]], zeros[i // group][o // 8][place[o % 8]]
            weight[o, i] = (q - z) * parts["scales"][i // group, o].float()
    return parts, weight


def gptq(out: int, into: int, group: int, bits: int, v2: bool, shuffled: bool) -> tuple[dict[str, Tensor], Tensor]:
    per = 32 // bits
    parts = {"qweight": words(into // per, out), "qzeros": words(into // group, out // per)}
    parts["scales"] = (torch.rand(into // group, out) * 0.1).half()
    order = torch.randperm(into) if shuffled else torch.arange(into)
    parts["g_idx"] = (order // group).int()
    numbers, zeros, weight = nibbles(parts["qweight"], bits), nibbles(parts["qzeros"], bits), torch.zeros(out, into)
    for o in range(out):
        for i in range(into):
            g = int(parts["g_idx"][i])
            z = zeros[g][o // per][o % per]
            z = z if v2 else (z + 1) % (1 << bits)
            weight[o, i] = (numbers[i // per][o][i % per] - z) * parts["scales"][g, o].float()
    return parts, weight


def packed(out: int, into: int, group: int, zeros: bool) -> tuple[dict[str, Tensor], Tensor]:
    parts = {"weight_packed": words(out, into // 8), "weight_shape": torch.tensor([out, into])}
    parts["weight_scale"] = (torch.rand(out, into // group) * 0.1).bfloat16()
    points = nibbles(words(out // 8, into // group)) if not zeros else []
    if zeros:
        parts["weight_zero_point"] = words(out // 8, into // group)
        points = nibbles(parts["weight_zero_point"])
    numbers, weight = nibbles(parts["weight_packed"]), torch.zeros(out, into)
    for o in range(out):
        for i in range(into):
            z = points[o // 8][i // group][o % 8] - 8 if zeros else 0
            weight[o, i] = (numbers[o][i // 8][i % 8] - 8 - z) * parts["weight_scale"][o, i // group].float()
    return parts, weight


def test_fp8() -> None:
    torch.manual_seed(0)
    compressed = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    for config, shape, name in [
        ({"quant_method": "fbgemm_fp8"}, (OUT, 1), "weight_scale"),
        ({"quant_method": "fp8"}, (), "weight_scale"),
        (compressed, (OUT, 1), "weight_scale"),
        (compressed, (1,), "weight_scale"),
    ]:
        weight, scale = fp8(OUT, IN, shape)
        tensors = {f"{LAYER}.weight": weight, f"{LAYER}.{name}": scale, f"{LAYER}.input_scale": torch.ones(1)}
        read = readable({"quantization_config": config}, tensors)
        assert list(read) == [f"{LAYER}.weight"]
        torch.testing.assert_close(read[f"{LAYER}.weight"], weight.float() * scale, atol=0, rtol=0)


@pytest.mark.parametrize("size", [(128, 128), (16, 32)])
def test_fp8_in_blocks(size: tuple[int, int]) -> None:
    """DeepSeek's and Qwen3's layout, with rows and columns that do not fill the last block."""
    torch.manual_seed(1)
    rows, columns = 200, 300
    weight, scale = fp8(rows, columns, (-(-rows // size[0]), -(-columns // size[1])))
    config = {"quant_method": "fp8", "weight_block_size": list(size)}
    tensors = {f"{LAYER}.weight": weight, f"{LAYER}.weight_scale_inv": scale}
    wanted = torch.stack(
        [
            torch.stack([weight[i, j].float() * scale[i // size[0], j // size[1]] for j in range(0, columns, 7)])
            for i in range(0, rows, 11)
        ]
    )
    read = readable({"quantization_config": config}, tensors)[f"{LAYER}.weight"]
    torch.testing.assert_close(read[::11, ::7], wanted, atol=0, rtol=0)
    del tensors[f"{LAYER}.weight_scale_inv"]
    tensors[f"{LAYER}.weight_scale_inv"] = scale[:1, :1].expand(7, 3)
    with pytest.raises(CheckpointError, match="expected one per block of"):
        readable({"quantization_config": config}, tensors)[f"{LAYER}.weight"]


def compared(config: dict[str, Any], parts: dict[str, Tensor], weight: Tensor) -> None:
    tensors = {f"{LAYER}.{name}": part for name, part in parts.items()} | {"model.norm.weight": torch.ones(3)}
    read = readable({"quantization_config": config}, tensors)
    assert sorted(read) == [f"{LAYER}.weight", "model.norm.weight"]
    torch.testing.assert_close(read[f"{LAYER}.weight"], weight, atol=0, rtol=0)


def test_awq() -> None:
    torch.manual_seed(2)
    compared({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, *awq(OUT, IN, 32))


@pytest.mark.parametrize(
    ("bits", "v2", "shuffled"), [(4, False, False), (4, False, True), (4, True, False), (8, False, True)]
)
def test_gptq(bits: int, v2: bool, shuffled: bool) -> None:
    torch.manual_seed(3)
    config = {"quant_method": "gptq", "bits": bits, "checkpoint_format": "gptq_v2" if v2 else "gptq"}
    compared(config, *gptq(OUT, IN, 16, bits, v2, shuffled))


@pytest.mark.parametrize("zeros", [False, True])
def test_compressed_tensors(zeros: bool) -> None:
    torch.manual_seed(4)
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": not zeros}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }
    compared(config, *packed(OUT, IN, 16, zeros))
    numbers, scale = torch.randint(-127, 128, (OUT, IN), dtype=torch.int8), torch.rand(OUT, 1)
    config = {"quant_method": "compressed-tensors", "format": "int-quantized"}
    compared(config, {"weight": numbers, "weight_scale": scale}, numbers.float() * scale)


def plain(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator) / 8

    tensors = {"model.embed_tokens.weight": draw(40, 64) * 8, "model.norm.weight": torch.ones(64)}
    for index in range(2):
        at = f"model.layers.{index}"
        tensors |= {f"{at}.{name}.weight": torch.ones(64) for name in ("input_layernorm", "post_attention_layernorm")}
        tensors |= {f"{at}.self_attn.{one}_norm.weight": torch.ones(16) for one in "qk"}
        sizes = {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "self_attn.v_proj": (32, 64)}
        sizes |= {"self_attn.o_proj": (64, 64), "mlp.up_proj": (24, 64), "mlp.gate_proj": (24, 64)}
        sizes |= {"mlp.down_proj": (64, 24)}
        tensors |= {f"{at}.{name}.weight": draw(*size) for name, size in sizes.items()}
    return tensors


@pytest.mark.parametrize("method", ["fp8", "awq", "gptq"])
def test_a_model_runs_on_dequantised_weights(method: str) -> None:
    """The same tokens as with plain weights of the same values, in 16 bits."""
    torch.manual_seed(5)
    stored, wanted = dict[str, Tensor](), plain()
    for name, tensor in plain().items():
        if not name.endswith("_proj.weight"):
            stored[name] = tensor
            continue
        layer, (out, into) = name.removesuffix(".weight"), tensor.shape
        if method == "fp8":
            scale = tensor.abs().amax(1, keepdim=True) / 448
            parts = {"weight": (tensor / scale).to(FP8), "weight_scale": scale}
            wanted[name] = parts["weight"].float() * scale
        else:
            parts, wanted[name] = awq(out, into, 8) if method == "awq" else gptq(out, into, 8, 4, False, True)
        stored |= {f"{layer}.{part}": value for part, value in parts.items()}
    config = {"quant_method": method, "bits": 4}
    outputs = []
    for described, tensors in ((SHAPE | {"quantization_config": config}, stored), (SHAPE, wanted)):
        target = load(described, tensors, dtype=torch.bfloat16)
        steps = decode(target, None, make_rule(), [[1, 2, 3]], sampling=Sampling(temperature=0), max_new_tokens=20)
        outputs.append([token for step in steps for token in step.emitted])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("method", ["awq", "gptq", "compressed-tensors"])
def test_int4_keeps_the_integers(method: str) -> None:
    """In groups of 32 or more; with scales of 16 bits that fit, without any loss."""
    torch.manual_seed(6)
    exact, tensors = method == "compressed-tensors", dict[str, Tensor]()
    make = {
        "awq": awq,
        "gptq": lambda *size: gptq(*size, 4, False, False),
        "compressed-tensors": lambda *size: packed(*size, False),
    }
    halves = [make[method](OUT, IN, 32) for _ in range(2)]
    tensors = {
        f"{name}.{key}": part for name, (parts, _) in zip("ab", halves, strict=True) for key, part in parts.items()
    }
    config = {"quant_method": method, "format": "pack-quantized", "bits": 4}
    take = Tensors(
        readable({"quantization_config": config}, tensors), torch.bfloat16, "cpu", lambda linear: linear, True
    )
    order = torch.randperm(2 * OUT)
    linear, wanted = (
        take.linear(["a", "b"], [OUT] * 2, IN, False, order),
        torch.cat([half[1] for half in halves])[order],
    )
    assert isinstance(linear, Int4) and quantize_linear(linear, 4, 2).weight_bytes < wanted.numel()
    if exact:
        torch.testing.assert_close(linear.weight, wanted.bfloat16(), atol=0, rtol=0)
    again = Int4(wanted.bfloat16()).weight
    error, worse = ((given.float() - wanted).abs().max() for given in (linear.weight, again))
    assert error < 0.02 * wanted.abs().max() and error < 0.5 * worse, "better than to quantize again"
    shuffled, _ = gptq(OUT, IN, 32, 4, False, True)
    read = readable(
        {"quantization_config": {"quant_method": "gptq", "bits": 4}}, {f"{LAYER}.{k}": v for k, v in shuffled.items()}
    )
    assert isinstance(read, Dequantized) and read.levels(f"{LAYER}.weight") is None


def test_biases_of_zero_are_not_counted() -> None:
    """AutoGPTQ writes them for layers that have none."""
    parts, _ = gptq(OUT, IN, 16, 4, False, False)
    tensors = {f"{LAYER}.{name}": part for name, part in parts.items()} | {f"{LAYER}.bias": torch.zeros(OUT)}
    read = readable({"quantization_config": {"quant_method": "gptq", "bits": 4}}, tensors)
    assert list(read) == [f"{LAYER}.weight"] and not read[f"{LAYER}.bias"].any()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "by 'bitsandbytes' and our decoder does not read this way"),
        ({"quant_method": "awq", "version": "gemv"}, "its layout 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "3 bits"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "its format 'nvfp4-pack-quantized'"),
        ({"quant_method": "mxfp4"}, "through transformers"),
    ],
)
def test_other_ways_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        parse_config(SHAPE | {"quantization_config": config})


def test_a_missing_part_is_named() -> None:
    config = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    with pytest.raises(CheckpointError, match=r"has no tensor 'model.layers.0.mlp.up_proj.scales'"):
        readable(config, {f"{LAYER}.qweight": words(8, 24)})[f"{LAYER}.weight"]
