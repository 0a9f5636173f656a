"""Converts GGUF files (llama.cpp's format) to safetensors, config.json and tokenizer files.

Weights are dequantised by the `gguf` package. Llama and Qwen architectures and byte-level tokenizers are supported;
others are refused by name. The header is parsed here, with every length checked against the file before it is used.
Independent of running a model.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType
    from tokenizers import Tokenizer
    from torch import Tensor

_FORMAT = 1  # version of the output of `convert`; a change makes every file be converted again
_SHARD = 1 << 30  # bytes per output file, which bounds the memory of the conversion
_AT_ONCE = 1 << 20  # bytes that are dequantised at a time
_SCALES = ("scales", "offsets")  # of weights in 4 bits
_CONTROL, _DEFINED = 3, 4  # token types: special tokens, and user-defined tokens that are never split
_STRING, _LIST = 8, 9  # value types; all others are numbers, with these formats:
_NUMBERS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_MAX_VALUES, _MAX_TENSORS, _MAX_ENTRIES = 1 << 16, 10_000, 1 << 20  # of a header; of a list in it

_KINDS = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_PARTS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

# pre-tokenization by the name in the file, with the expressions of the original tokenizers
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_SPLITS = {"qwen2": _QWEN, "deepseek-r1-qwen": _QWEN, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3}
_PLAIN = ("default", "gpt-2")
_DIGITS = ("smollm",)  # every digit by itself


class GgufError(OutriderError):
    """A GGUF file is malformed, or holds a model that our decoder does not support."""


def fingerprint(file: Path) -> str:
    """A name for a file's conversion from its path, size and modification time, without reading the file."""
    facts = str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns, _FORMAT
    return f"{file.stem[:60]}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def convert(file: Path, folder: Path, dtype: str | None = "float32") -> None:
    """Write configs, tokenizer and, unless `dtype` is None, safetensors in it (float32 is lossless) to a folder. "int4"
    keeps the integers of layers' weights of 4 bits; the rest is in bfloat16 (see engine.quantization.published)."""
    try:
        header = _Header(file)
        config = _config(header) | ({"quantization_config": {"quant_method": "gguf"}} if dtype == "int4" else {})
        special = {
            f"{ours}_token_id": header.get(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        }
        special = {name: value for name, value in special.items() if value is not None}
        tokenizer, settings = _tokenizer(header, special)
    except GgufError:
        raise
    except Exception as error:  # malformed files raise many kinds of errors
        raise _malformed(file, error) from None
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", settings)
    special.pop("unk_token_id", None)
    _write(folder / "generation_config.json", special)
    _write(folder / "config.json", config | special)
    try:
        if dtype is not None:
            _save(file, header, config, folder, dtype)
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        raise _malformed(file, error) from None


def _malformed(file: Path, error: Exception) -> GgufError:
    return GgufError(f"{file} is not a whole GGUF file: {' '.join(str(error).split())[:200]}")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


@dataclass(frozen=True)
class _TensorInfo:
    shape: tuple[int, ...]  # of bytes
    kind: GGMLQuantizationType
    start: int  # in the file

    @property
    def size(self) -> int:
        return math.prod(self.shape)


class _Header:
    """The values and tensor descriptions of a file. Raises ValueError for lengths that exceed the file."""

    def __init__(self, file: Path) -> None:
        self._values: dict[str, Any] = {}
        self.tensors: dict[str, _TensorInfo] = {}
        with file.open("rb") as stream:
            self._read(stream)
        self.architecture = str(self.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        return self._values.get(name, default)

    def of_architecture(self, name: str, default: Any = None) -> Any:
        """A value whose name has the architecture as its prefix."""
        return self.get(f"{self.architecture}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.of_architecture(name)
        if value is None:
            raise GgufError(f"the GGUF file does not say its {self.architecture}.{name}")
        return value

    def _read(self, stream: IO[bytes]) -> None:
        if stream.read(4) != b"GGUF":
            raise ValueError("it begins with something else")
        version = _number(stream, "<u4")
        if version not in (2, 3):
            raise ValueError(f"it is big-endian or of version {version}; versions 2 and 3 are read")
        tensors, values = _number(stream, "<u8"), _number(stream, "<u8")
        if tensors > _MAX_TENSORS or values > _MAX_VALUES:
            raise ValueError(f"it says that it holds {tensors:,} tensors and {values:,} values")
        for _ in range(values):
            name = _string(stream)
            if name in self._values:
                raise ValueError(f"it holds '{name}' twice")
            self._values[name] = _value(stream, _number(stream, "<u4"))
        entries = [self._tensor_entry(stream) for _ in range(tensors)]
        align = self.get("general.alignment", 32)
        if not isinstance(align, int) or align < 1 or align & (align - 1):
            raise ValueError(f"its alignment is {align}, which is not a power of two")
        start, end = -(-stream.tell() // align) * align, os.fstat(stream.fileno()).st_size
        for name, shape, kind, offset in entries:
            info = self.tensors[name] = _TensorInfo(shape, kind, start + offset)
            if not info.size:
                raise ValueError(f"its tensor '{name}' has no elements")
            if info.start + info.size > end:
                raise ValueError(f"it ends before its tensor '{name}'")
        if len(self.tensors) < tensors:
            raise ValueError("it holds a tensor twice")
        if sum(info.size for info in self.tensors.values()) > end:
            raise ValueError("its tensors lie over one another")

    def _tensor_entry(self, stream: IO[bytes]) -> tuple[str, tuple[int, ...], GGMLQuantizationType, int]:
        from gguf import GGMLQuantizationType
        from gguf.quants import quant_shape_to_byte_shape

        name, dimensions = _string(stream), _number(stream, "<u4")
        if dimensions > 4:
            raise ValueError(f"it says that a tensor has {dimensions:,} dimensions")
        shape = tuple(_number(stream, "<u8") for _ in range(dimensions))[::-1]
        kind = GGMLQuantizationType(_number(stream, "<u4"))
        return name, quant_shape_to_byte_shape(shape, kind), kind, _number(stream, "<u8")


def _take(stream: IO[bytes], count: int) -> bytes:
    if count > os.fstat(stream.fileno()).st_size - stream.tell():
        raise ValueError(f"it ends before the {count:,} bytes that it says come")
    return stream.read(count)


def _number(stream: IO[bytes], form: str) -> Any:
    dtype = np.dtype(form)
    return np.frombuffer(_take(stream, dtype.itemsize), dtype)[0].item()


def _string(stream: IO[bytes]) -> str:
    return _take(stream, _number(stream, "<u8")).decode("utf-8")


def _value(stream: IO[bytes], kind: int) -> Any:
    if kind in _NUMBERS:
        return _number(stream, _NUMBERS[kind])
    if kind == _STRING:
        return _string(stream)
    if kind != _LIST:
        raise ValueError(f"it holds a value of type {kind}")
    inner, count = _number(stream, "<u4"), _number(stream, "<u8")
    if count > _MAX_ENTRIES:
        raise ValueError(f"it says that a list has {count:,} entries")
    if inner in _NUMBERS:
        dtype = np.dtype(_NUMBERS[inner])
        return np.frombuffer(_take(stream, count * dtype.itemsize), dtype).tolist()
    if inner == _STRING:
        return [_string(stream) for _ in range(count)]
    raise ValueError(f"it holds a list of values of type {inner}")


def _config(header: _Header) -> dict[str, Any]:
    if header.architecture not in _KINDS:
        raise GgufError(
            f"the GGUF file holds the architecture '{header.architecture}'; supported are {', '.join(_KINDS)}. "
            "The original weights, as safetensors, may load through transformers"
        )
    if header.of_architecture("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in header.tensors:
        raise GgufError("the GGUF file scales its rotary positions, which is not supported; use the safetensors")
    heads, width = header.need("attention.head_count"), header.need("embedding_length")
    return {
        "model_type": header.architecture,
        "architectures": [_KINDS[header.architecture]],
        "vocab_size": len(header.get("tokenizer.ggml.tokens", [])) or header.need("vocab_size"),
        "hidden_size": width,
        "intermediate_size": header.need("feed_forward_length"),
        "num_hidden_layers": header.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": header.of_architecture("attention.head_count_kv", heads),
        "head_dim": header.of_architecture("attention.key_length", width // heads),
        "max_position_embeddings": header.need("context_length"),
        "rms_norm_eps": float(f"{header.need('attention.layer_norm_rms_epsilon'):.7g}"),  # stored in 32 bits
        "rope_theta": header.of_architecture("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": header.architecture == "llama" and "blk.0.attn_q.bias" in header.tensors,
    }


def _save(file: Path, header: _Header, config: Mapping[str, Any], folder: Path, dtype: str) -> None:
    """Write the tensors in files of up to `_SHARD` bytes."""
    from safetensors.torch import save_file
    from tqdm import tqdm

    shards: list[dict[str, Tensor]] = [{}]
    shard_bytes = 0
    shard_of: dict[str, int] = {}
    bar = tqdm(_tensors(file, header, config, dtype), "Converting", len(header.tensors), disable=None, leave=False)
    for name, tensor in bar:
        if shards[-1] and shard_bytes + tensor.nbytes > _SHARD:
            save_file(shards[-1], folder / _shard(len(shards)), {"format": "pt"})
            shards[-1].clear()
            shards.append({})
            shard_bytes = 0
        shards[-1][name] = tensor
        shard_of[name] = len(shards)
        shard_bytes += tensor.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return
    save_file(shards[-1], folder / _shard(len(shards)), {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: _shard(shard) for name, shard in shard_of.items()}}
    _write(folder / "model.safetensors.index.json", index)


def _shard(number: int) -> str:
    return f"model-{number:05}.safetensors"


def _tensors(file: Path, header: _Header, config: Mapping[str, Any], dtype: str) -> Iterator[tuple[str, Tensor]]:
    data = np.memmap(file, mode="r")
    for gguf_name, info in header.tensors.items():
        name = _name(gguf_name)
        blocks = data[info.start : info.start + info.size].reshape(info.shape)
        try:
            with np.errstate(invalid="ignore", over="ignore"):
                parts = _parts(blocks, info.kind, dtype, keep=gguf_name.startswith("blk."))
        except NotImplementedError as error:
            raise GgufError(f"the quantization of tensor '{gguf_name}' is not supported: {error}") from None
        for part, tensor in parts.items():
            if config["model_type"] == "llama" and ".attn_q." in gguf_name:
                tensor = _split_rotary_pairs(tensor, config["num_attention_heads"])
            if config["model_type"] == "llama" and ".attn_k." in gguf_name:
                tensor = _split_rotary_pairs(tensor, config["num_key_value_heads"])
            yield name + part, tensor


def _parts(blocks: np.ndarray, kind: GGMLQuantizationType, dtype: str, keep: bool) -> dict[str, Tensor]:
    """What is written of a tensor: {"": its values}; for "int4" and with `keep` its integers of 4 bits, scales and
    offsets, if it has them."""
    import torch
    from gguf.quants import dequantize

    precision = torch.bfloat16 if dtype == "int4" else getattr(torch, dtype)
    if dtype == "int4" and keep and (levels := _levels(blocks, kind.name)) is not None:
        scales = {f"_{name}": _finite(part).to(precision) for name, part in zip(_SCALES, levels[1:], strict=True)}
        return {"_levels": torch.from_numpy(levels[0])} | scales
    rows = len(blocks) if blocks.ndim == 1 else max(1, _AT_ONCE // blocks[:1].size)  # some at a time fit into a cache
    starts = range(0, len(blocks), rows)
    values = (dequantize(blocks[start : start + rows], kind) for start in starts)
    return {"": torch.cat([_finite(part).to(precision) for part in values])}


def _finite(numbers: np.ndarray) -> Tensor:
    import torch

    if not np.isfinite(numbers).all():
        raise ValueError("a tensor holds numbers that are not finite")
    return torch.from_numpy(numbers.copy())


def _levels(blocks: np.ndarray, kind: str) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Weights that are stored in 4 bits as integers, two neighbours in a byte [out, in / 2], and scales and offsets
    [out, in / 32]: w = (n - 8) scale + offset. None for other types."""
    from gguf.quants import Q4_K

    sizes = {"Q4_0": (2, 16), "Q4_1": (4, 16), "Q4_K": (16, 128)}  # bytes of scales, and of integers, of a block
    if kind not in sizes:
        return None
    rows, (before, after) = len(blocks), sizes[kind]
    flat = blocks.reshape(-1, before + after)
    halves = flat[:, : min(before, 4)].copy().view(np.float16).astype(np.float32)  # a scale, and a minimum
    scales, lowest = halves[:, :1], -8 * halves[:, :1] if kind == "Q4_0" else halves[:, -1:]
    if kind == "Q4_K":
        of_scales, of_minima = Q4_K.get_scale_min(flat[:, 4:before])
        scales, lowest = scales * of_scales, -lowest * of_minima
    packed = flat[:, before:].reshape(-1, 1, min(after, 32))  # the low bits, then the high
    ints = np.concatenate([packed & 15, packed >> 4], 1).reshape(rows, -1)
    return ints[:, ::2] | ints[:, 1::2] << 4, scales.reshape(rows, -1), (lowest + 8 * scales).reshape(rows, -1)


def _name(gguf_name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = gguf_name.split(".")
    if len(parts) == 2 and parts[0] in _WHOLE:
        return f"{_WHOLE[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PARTS:
        return f"model.layers.{int(parts[1])}.{_PARTS[parts[2]]}.{parts[3]}"
    raise GgufError(f"the GGUF file holds a tensor '{gguf_name}', which none of {', '.join(_KINDS)} has")


def _split_rotary_pairs(weight: Tensor, heads: int) -> Tensor:
    """Reorder each head's rows: Llama GGUF files interleave rotary pairs; transformers has all first elements, then all
    second ones."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def _tokenizer(header: _Header, special: Mapping[str, int]) -> tuple[Tokenizer, dict[str, Any]]:
    """The byte-level tokenizer that the file describes, and the content of tokenizer_config.json."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    model, split_name = header.get("tokenizer.ggml.model"), header.get("tokenizer.ggml.pre", "default")
    known = (*_PLAIN, *_DIGITS, *_SPLITS)
    if model != "gpt2" or split_name not in known:
        raise GgufError(
            f"the GGUF file's tokenizer is of kind '{model}', '{split_name}'; supported are byte-level ones (gpt2: "
            f"{', '.join(known)}). Give the folder of the original model, which has a tokenizer.json"
        )
    tokens: list[str] = header.get("tokenizer.ggml.tokens")
    kinds: list[int] = header.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in header.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _DEFINED]
    )
    if tokenizer.get_vocab_size() != len(tokens):
        raise GgufError(f"the GGUF file's {len(tokens):,} tokens make a vocabulary of {tokenizer.get_vocab_size():,}")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split_name not in _SPLITS)
    if split_name in _DIGITS:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    elif split_name in _SPLITS:
        isolated = pre_tokenizers.Split(Regex(_SPLITS[split_name]), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([isolated, split])
    else:
        tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": header.of_architecture("context_length"),
        "chat_template": header.get("tokenizer.chat_template"),
    }
    settings |= {name.removesuffix("_id"): tokens[index] for name, index in special.items()}
    if header.get("tokenizer.ggml.add_bos_token") and "bos_token_id" in special:
        bos = settings["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, special["bos_token_id"])]
        )
    return tokenizer, {name: value for name, value in settings.items() if value is not None}
