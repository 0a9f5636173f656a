"""A GGUF file made on the spot, converted: the same weights, config and tokenizer as what it was made of."""

from __future__ import annotations

import json
import os
import runpy
import struct
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from outrider.core.assets import store
from outrider.core.assets.gguf import GgufError
from outrider.core.assets.store import Checkpoint, convert_gguf
from outrider.core.engine import checkpoints
from outrider.core.engine.loading.folder import target_of_folder
from outrider.core.engine.transformer import Decoder
from outrider.core.kernels import native

TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "text" / "tiny.py")))
KINDS = gguf.GGMLQuantizationType
NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def paired(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows as llama.cpp wants them: as its own script permutes them."""
    return weight.view(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def write(path: Path, *, kind: str = "llama", tokenizer: str = "gpt2", pre: str = "gpt-2", **extra: Any) -> Path:
    config, made = TINY.CONFIG, json.loads(TINY.tokenizer().to_str())
    writer = gguf.GGUFWriter(path, kind)
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    vocabulary = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    writer.add_tokenizer_model(tokenizer)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocabulary)
    writer.add_token_types([3 if token in TINY.SPECIAL else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])
    writer.add_eos_token_id(2)
    writer.add_bos_token_id(1)
    writer.add_chat_template(TINY.TEMPLATE)
    for name, value in extra.items():
        writer.add_string(name.replace("__", "."), value)
    for name, tensor in TINY.tensors().items():
        writer.add_tensor(*_theirs(name, tensor, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _theirs(name: str, tensor: torch.Tensor, kind: str) -> tuple[str, np.ndarray]:
    whole = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in whole:
        return whole[name], tensor.numpy()
    _, _, layer, *rest = name.split(".")
    part = NAMES[".".join(rest[:-1])]
    if kind == "llama" and part in ("attn_q", "attn_k"):
        tensor = paired(tensor, 4 if part == "attn_q" else 2)
    return f"blk.{layer}.{part}.weight", tensor.contiguous().numpy()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_weights_and_config_come_out_as_they_went_in(tmp_path: Path) -> None:
    folder = convert_gguf(write(tmp_path / "m.gguf"))
    found, wanted = Checkpoint(folder), TINY.tensors()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    ours = checkpoints.parse_config(store.read_json(folder / "config.json"))
    assert ours == checkpoints.parse_config(TINY.CONFIG)


def test_a_tokenizer_alone_needs_no_weights(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    folder, whole = convert_gguf(path, None), convert_gguf(path)
    names = {each.name for each in folder.iterdir()}
    assert names == {each.name for each in whole.iterdir() if each.suffix == ".json" and "index" not in each.name}
    assert (whole / "tokenizer.json").read_text() == (folder / "tokenizer.json").read_text()


def test_a_big_model_is_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.core.assets import gguf as ours

    monkeypatch.setattr(ours, "_SHARD", 20_000)
    folder = convert_gguf(write(tmp_path / "m.gguf"))
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    found, wanted = Checkpoint(folder), TINY.tensors()
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def write_quantised(path: Path, kinds: dict[str, gguf.GGMLQuantizationType]) -> dict[str, torch.Tensor]:
    """A file whose tensors of these parts are quantised -> their values, by their names in a checkpoint."""
    from gguf.quants import dequantize, quantize

    wanted = {}
    original = gguf.GGUFWriter.add_tensor

    def add(self: gguf.GGUFWriter, name: str, tensor: np.ndarray, **_: Any) -> None:
        _, layer, part, *_ = [*name.split("."), "", ""]
        if part not in kinds:
            return original(self, name, tensor)
        packed = quantize(tensor, kinds[part])
        ours = next(ours for ours, theirs in NAMES.items() if theirs == part)
        wanted[f"model.layers.{layer}.{ours}.weight"] = torch.from_numpy(dequantize(packed, kinds[part]))
        return original(self, name, packed, raw_dtype=kinds[part])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "add_tensor", add)
        write(path)
    return wanted


def test_quantised_blocks_are_dequantised_and_halves_rounded_once(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    wanted = write_quantised(path, {"ffn_gate": KINDS.Q4_1})
    assert wanted
    for dtype in ("float32", "bfloat16"):
        found = Checkpoint(convert_gguf(path, dtype))
        for name, tensor in wanted.items():
            assert torch.equal(found[name], tensor.to(getattr(torch, dtype)))


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
def test_integers_of_4_bits_stand_for_the_weights_of_the_blocks(kind: str) -> None:
    from gguf.quants import dequantize

    from outrider.core.assets.gguf import _levels

    chosen, halves = KINDS[kind], {"Q4_0": 1, "Q4_1": 2, "Q4_K": 2}[kind]
    elements, size = gguf.GGML_QUANT_SIZES[chosen]
    rng = np.random.default_rng(3)
    blocks = rng.integers(0, 256, (6, 512 // elements, size), np.uint8)
    blocks[..., : 2 * halves] = rng.normal(size=(*blocks.shape[:2], halves)).astype(np.float16).view(np.uint8)
    blocks = blocks.reshape(6, -1)
    levels = _levels(blocks, kind)
    assert levels is not None
    packed, scales, offsets = levels
    ints = np.stack([packed & 15, packed >> 4], -1).reshape(6, 16, 32).astype(np.float32)
    found = (ints - 8) * scales[..., None] + offsets[..., None]
    np.testing.assert_allclose(found.reshape(6, -1), dequantize(blocks, chosen), rtol=1e-5, atol=1e-5)


@pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")
def test_4_bits_keep_the_files_integers_and_5_to_8_bits_have_8(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    wanted = write_quantised(
        path, {"ffn_gate": KINDS.Q4_0, "ffn_up": KINDS.Q4_1, "attn_v": KINDS.Q4_1, "attn_output": KINDS.Q5_0}
    )
    folder = convert_gguf(path, "int4")
    tensors = checkpoints.readable(store.read_json(folder / "config.json"), Checkpoint(folder))
    assert set(tensors) == set(TINY.tensors())
    for name, tensor in wanted.items():
        assert (tensors[name].float() - tensor).abs().max() < 0.01 * tensor.abs().max()
    networks = []
    for drafting in (False, True):
        make, _ = target_of_folder(folder, "int4", torch.device("cpu"), drafting=drafting)
        networks.append(cast(Decoder, make()).network)
    for index, layers in enumerate(zip(*(network.layers for network in networks), strict=True)):
        bits = [{name: getattr(layer, name).bits for name in ("qkv", "out", "up_gate")} for layer in layers]
        assert bits == [{"qkv": 8, "out": 8, "up_gate": 4}, dict.fromkeys(bits[0], 4)]
        prefix = f"model.layers.{index}"
        joined = torch.cat([wanted[f"{prefix}.mlp.{part}_proj.weight"] for part in ("up", "gate")])
        for layer in layers:
            assert (layer.up_gate.weight.float() - joined).abs().max() < 0.02 * joined.abs().max()  # of bfloat16
        scale = wanted[f"{prefix}.self_attn.o_proj.weight"].abs().max()
        errors = [(layer.out.weight - wanted[f"{prefix}.self_attn.o_proj.weight"]).abs().max() for layer in layers]
        assert errors[0] < 0.01 * scale < errors[1]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2", "llama-bpe"])
def test_the_tokenizer_says_what_the_original_says(pre: str, tmp_path: Path) -> None:
    folder = convert_gguf(write(tmp_path / "m.gguf", pre=pre))
    ours, original = Tokenizer.from_file(str(folder / "tokenizer.json")), TINY.tokenizer()
    text = "the cat sat, on 1234 mats: don't! é 😀<|im_end|> \n x"
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ours.decode(ids, skip_special_tokens=False) == text
    if pre == "gpt-2":
        assert ids == original.encode(text, add_special_tokens=False).ids
    cut = [piece for piece, _ in ours.pre_tokenizer.pre_tokenize_str("12345")]
    assert cut == {"gpt-2": ["12345"], "llama-bpe": ["123", "45"]}.get(pre, list("12345"))
    settings = store.read_json(folder / "tokenizer_config.json")
    assert settings["chat_template"] == TINY.TEMPLATE
    assert settings["eos_token"] == "<|im_end|>"
    assert store.read_json(folder / "generation_config.json")["eos_token_id"] == 2


def test_it_is_converted_once_until_the_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.core.assets import gguf as ours

    path = write(tmp_path / "m.gguf")
    first = convert_gguf(path)
    with monkeypatch.context() as patch:
        patch.setattr(ours, "convert", lambda *_, **__: pytest.fail("converted again"))
        assert convert_gguf(path) == first
    os.utime(path, (1, 1))
    assert convert_gguf(path) != first


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"kind": "mamba"}, "architecture 'mamba'; supported are llama, qwen2, qwen3"),
        ({"tokenizer": "llama"}, "tokenizer is of kind 'llama'"),
        ({"pre": "no-such"}, "'gpt2', 'no-such'"),
        ({"llama__rope__scaling__type": "yarn"}, "scales its rotary positions"),
    ],
)
def test_what_is_not_read_is_named_and_leaves_nothing(
    changed: dict[str, str], said: str, tmp_path: Path, cache: Path
) -> None:
    with pytest.raises(GgufError, match=said):
        convert_gguf(write(tmp_path / "m.gguf", **changed))
    assert not [path for path in (cache / "converted").rglob("*") if path.is_file()]


def test_a_name_with_a_line_break_leaves_the_error_one_line(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes().replace(b"blk.0.attn_q.weight", b"blk\n0.\x1b[31m.weights", 1))
    with pytest.raises(GgufError) as error:
        convert_gguf(path, "float32")
    assert "blk 0.\\x1b" in str(error.value) and str(error.value).isprintable()


def test_a_file_that_is_cut_short_or_no_gguf_is_one_error(tmp_path: Path, cache: Path) -> None:
    whole = write(tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 20, 1000, len(whole) // 2, len(whole) - 100):
        (tmp_path / "cut.gguf").write_bytes(whole[:size])
        with pytest.raises(GgufError, match="not a whole GGUF file"):
            convert_gguf(tmp_path / "cut.gguf")
    (tmp_path / "cut.gguf").write_bytes(b"<html>" * 1000)
    with pytest.raises(GgufError, match="not a whole GGUF file"):
        convert_gguf(tmp_path / "cut.gguf")
    with pytest.raises(store.AssetError, match="no file"):
        convert_gguf(tmp_path / "gone.gguf")


def value(kind: int, content: bytes) -> bytes:
    return struct.pack("<Q", 1) + b"a" + struct.pack("<I", kind) + content


@pytest.mark.parametrize(
    ("tensors", "values", "rest"),
    [
        (0, 1 << 63, b""),
        (1 << 63, 0, b""),
        (0, 1, struct.pack("<Q", (1 << 64) - 1)),  # a name without an end
        (0, 1, value(8, struct.pack("<Q", 1 << 63))),  # a text
        (0, 1, value(9, struct.pack("<IQ", 4, 1 << 63))),  # a list of numbers
        (0, 1, value(9, struct.pack("<IQ", 8, 1 << 40))),  # of texts
        (0, 1, value(9, struct.pack("<IQ", 9, 1) * 5000)),  # of lists of lists
        (0, 1, value(9, struct.pack("<IQ", 0, 1 << 21) + bytes(1 << 21))),  # of many numbers that are there
        (0, 1, value(77, b"")),
        (1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<I", 1 << 31)),  # dimensions
        (1, 0, struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 0, 4, 0, 0)),  # a tensor without elements
    ],
)
@pytest.mark.timeout(20)
def test_what_a_header_says_of_its_size_is_not_believed(tensors: int, values: int, rest: bytes, tmp_path: Path) -> None:
    for order in "<>":
        path = tmp_path / f"m{ord(order)}.gguf"
        path.write_bytes(b"GGUF" + struct.pack(order + "IQQ", 3, tensors, values) + rest)
        with pytest.raises(GgufError, match="not a whole GGUF file"):
            convert_gguf(path)


def test_tensors_that_lie_over_one_another_are_not_written_many_times(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "ggml_pad", staticmethod(lambda size, align: 0))  # every one at the beginning
        whole = write(path).read_bytes()
    sizes = [tensor.nbytes for tensor in TINY.tensors().values()]
    path.write_bytes(whole[: len(whole) - sum(sizes) + max(sizes) + 64])
    with pytest.raises(GgufError, match="over one another"):
        convert_gguf(path)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
@pytest.mark.parametrize("part", ["attn_norm", "ffn_gate", "ffn_up"])
def test_weights_that_are_not_finite_are_an_error(part: str, dtype: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_quantised(path, {"ffn_gate": KINDS.Q4_1, "ffn_up": KINDS.Q8_0})
    convert_gguf(path, dtype)
    tensors = {tensor.name: tensor.data for tensor in gguf.GGUFReader(path, "r+").tensors}
    tensors[f"blk.0.{part}.weight"].view(np.uint8).flat[:4] = 255  # NaN, as a number or as a scale
    with pytest.raises(GgufError, match="not finite"):
        convert_gguf(path, dtype)
