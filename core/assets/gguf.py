"""GGUF files (llama.cpp's format) into safetensors, config.json and tokenizer files: done once, then cached.

Weights are dequantised; which blocks they came in is forgotten. Llama's and Qwen's architectures and byte-level
tokenizers are read; anything else is refused by name. Knows nothing of running a model.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from gguf import GGUFReader
    from tokenizers import Tokenizer
    from torch import Tensor

_VERSION = 1  # of what `convert` writes: a change makes everybody convert anew
_SHARD = 1 << 30  # bytes of a file, and so of what converting holds
_CONTROL, _DEFINED = 3, 4  # kinds of token: never in text, in text but whole
_STRING, _LIST = 8, 9  # kinds of value; bytes of the others:
_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_MOST_VALUES, _MOST_TENSORS, _LONGEST = 1 << 16, 10_000, 1 << 20  # of a header; entries of a list in it

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

# How text is cut before merging; a file names its way, and the expressions are those of the original tokenizers.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3 = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_SPLITS = {"qwen2": _QWEN, "deepseek-r1-qwen": _QWEN, "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3}
_PLAIN = ("default", "gpt-2")
_DIGITS = ("smollm",)  # every digit by itself


class GgufError(OutriderError):
    """A GGUF file that can't be read, or holds what our own engine does not run."""


def fingerprint(file: Path) -> str:
    """A name for what a file is converted to, without reading all of it."""
    facts = str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns, _VERSION
    return f"{file.stem[:60]}-{hashlib.sha256(repr(facts).encode()).hexdigest()[:12]}"


def convert(file: Path, folder: Path, dtype: str = "float32") -> None:
    """Write safetensors in a precision (in float32 nothing is rounded), config.json, generation_config.json,
    tokenizer.json and tokenizer_config.json."""
    from gguf import GGUFReader

    try:
        _walk(file)
        reader = GGUFReader(file)
        if sum(tensor.n_bytes for tensor in reader.tensors) > file.stat().st_size:
            raise GgufError(f"{file} is not a whole GGUF file: its tensors lie over one another")
        known = _Fields(reader)
        config = _config(known, {tensor.name for tensor in reader.tensors})
        special = {
            f"{ours}_token_id": known.get(f"tokenizer.ggml.{theirs}_token_id")
            for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))
        }
        special = {name: value for name, value in special.items() if value is not None}
        tokenizer, settings = _tokenizer(known, special)
    except GgufError:
        raise
    except Exception as error:  # whatever is wrong with it
        raise _broken(file, error) from None
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", settings)
    special.pop("unk_token_id", None)
    _write(folder / "generation_config.json", special)
    _write(folder / "config.json", config | special)
    try:
        _save(reader, config, folder, dtype)
    except (ValueError, RuntimeError, IndexError, TypeError) as error:
        raise _broken(file, error) from None


def _broken(file: Path, error: Exception) -> GgufError:
    return GgufError(f"{file} is not a whole GGUF file: {' '.join(str(error).split())[:200]}")


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False), encoding="utf-8")


def _walk(file: Path) -> None:
    """Go through the header once: what reads it afterwards believes every length, and counts to whatever is written."""
    with file.open("rb") as held:
        if held.read(4) != b"GGUF":
            raise ValueError("it begins with something else")
        order = "<" if int.from_bytes(held.read(4), "little") & 0xFFFF else ">"
        tensors, values = _number(held, order + "Q"), _number(held, order + "Q")
        if tensors > _MOST_TENSORS or values > _MOST_VALUES:
            raise ValueError(f"it says that it holds {tensors:,} tensors and {values:,} values")
        for _ in range(values):
            _skip(held, _number(held, order + "Q"))
            _pass_value(held, order, _number(held, order + "I"))
        for _ in range(tensors):
            _skip(held, _number(held, order + "Q"))
            if (sides := _number(held, order + "I")) > 4:
                raise ValueError(f"it says that a tensor has {sides:,} dimensions")
            _skip(held, 8 * sides + 12)  # how long they are, the tensor's kind and place


def _number(held: IO[bytes], form: str) -> int:
    (found,) = struct.unpack(form, held.read(struct.calcsize(form)))
    return int(found)


def _skip(held: IO[bytes], count: int) -> None:
    if count > os.fstat(held.fileno()).st_size - held.tell():
        raise ValueError(f"it ends before the {count:,} bytes that it says come")
    held.seek(count, os.SEEK_CUR)


def _pass_value(held: IO[bytes], order: str, kind: int) -> None:
    if kind in _BYTES:
        _skip(held, _BYTES[kind])
    elif kind == _STRING:
        _skip(held, _number(held, order + "Q"))
    elif kind == _LIST:
        inner, count = _number(held, order + "I"), _number(held, order + "Q")
        if count > _LONGEST:
            raise ValueError(f"it says that a list has {count:,} entries")
        if inner in _BYTES:
            _skip(held, count * _BYTES[inner])
        elif inner != _STRING:
            raise ValueError(f"it holds a list of values of kind {inner}")
        else:
            for _ in range(count):
                _pass_value(held, order, inner)
    else:
        raise ValueError(f"it holds a value of kind {kind}")


class _Fields:
    """The file's header: values by name."""

    def __init__(self, reader: GGUFReader) -> None:
        self._fields = reader.fields
        self.kind = str(self.get("general.architecture"))

    def get(self, name: str, default: Any = None) -> Any:
        field = self._fields.get(name)
        return default if field is None else field.contents()

    def of_kind(self, name: str, default: Any = None) -> Any:
        """A value that the architecture prefixes with its name."""
        return self.get(f"{self.kind}.{name}", default)

    def need(self, name: str) -> Any:
        value = self.of_kind(name)
        if value is None:
            raise GgufError(f"the GGUF file does not say its {self.kind}.{name}")
        return value


def _config(known: _Fields, tensors: set[str]) -> dict[str, Any]:
    if known.kind not in _KINDS:
        raise GgufError(
            f"the GGUF file holds the architecture '{known.kind}'; read here are {', '.join(_KINDS)}. "
            "The original weights, as safetensors, may load through transformers"
        )
    if known.of_kind("rope.scaling.type", "none") != "none" or "rope_freqs.weight" in tensors:
        raise GgufError("the GGUF file scales its rotary positions, which is not read here; take the safetensors")
    heads, width = known.need("attention.head_count"), known.need("embedding_length")
    return {
        "model_type": known.kind,
        "architectures": [_KINDS[known.kind]],
        "vocab_size": len(known.get("tokenizer.ggml.tokens", [])) or known.need("vocab_size"),
        "hidden_size": width,
        "intermediate_size": known.need("feed_forward_length"),
        "num_hidden_layers": known.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": known.of_kind("attention.head_count_kv", heads),
        "head_dim": known.of_kind("attention.key_length", width // heads),
        "max_position_embeddings": known.need("context_length"),
        "rms_norm_eps": float(f"{known.need('attention.layer_norm_rms_epsilon'):.7g}"),  # stored in 32 bits
        "rope_theta": known.of_kind("rope.freq_base", 10_000.0),
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
        "use_sliding_window": False,
        "attention_bias": known.kind == "llama" and "blk.0.attn_q.bias" in tensors,
    }


def _save(reader: GGUFReader, config: Mapping[str, Any], folder: Path, dtype: str) -> None:
    """The tensors, in as few files as their size allows."""
    import torch
    from safetensors.torch import save_file
    from tqdm import tqdm

    shards: list[dict[str, Tensor]] = [{}]
    held = 0
    where: dict[str, int] = {}
    bar = tqdm(_tensors(reader, config), "Converting", len(reader.tensors), disable=None, leave=False)
    for name, tensor in bar:
        kept = tensor.to(getattr(torch, dtype))
        if shards[-1] and held + kept.nbytes > _SHARD:
            save_file(shards[-1], folder / _shard(len(shards)), {"format": "pt"})
            shards[-1].clear()
            shards.append({})
            held = 0
        shards[-1][name] = kept
        where[name] = len(shards)
        held += kept.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", {"format": "pt"})
        return
    save_file(shards[-1], folder / _shard(len(shards)), {"format": "pt"})
    index = {"metadata": {}, "weight_map": {name: _shard(shard) for name, shard in where.items()}}
    _write(folder / "model.safetensors.index.json", index)


def _shard(number: int) -> str:
    return f"model-{number:05}.safetensors"


def _tensors(reader: GGUFReader, config: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    import torch
    from gguf.quants import dequantize

    for held in reader.tensors:
        name = _name(held.name)
        try:
            tensor = torch.from_numpy(dequantize(held.data, held.tensor_type).copy())
        except NotImplementedError as error:
            raise GgufError(f"the tensor '{held.name}' is quantised in a way that is not read here: {error}") from None
        if config["model_type"] == "llama" and ".attn_q." in held.name:
            tensor = _unpaired(tensor, config["num_attention_heads"])
        if config["model_type"] == "llama" and ".attn_k." in held.name:
            tensor = _unpaired(tensor, config["num_key_value_heads"])
        yield name, tensor


def _name(theirs: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight"""
    parts = theirs.split(".")
    if len(parts) == 2 and parts[0] in _WHOLE:
        return f"{_WHOLE[parts[0]]}.{parts[1]}"
    if len(parts) == 4 and parts[0] == "blk" and parts[2] in _PARTS:
        return f"model.layers.{int(parts[1])}.{_PARTS[parts[2]]}.{parts[3]}"
    raise GgufError(f"the GGUF file holds a tensor '{theirs}', which none of {', '.join(_KINDS)} has a place for")


def _unpaired(weight: Tensor, heads: int) -> Tensor:
    """Llama's files hold each head's rows in rotary pairs; ours and transformers' want the first halves, then the
    second."""
    return weight.view(heads, -1, 2, *weight.shape[1:]).transpose(1, 2).reshape(weight.shape).contiguous()


def _tokenizer(known: _Fields, special: Mapping[str, int]) -> tuple[Tokenizer, dict[str, Any]]:
    """A byte-level tokenizer as the file describes it, and what tokenizer_config.json says of it."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

    model, way = known.get("tokenizer.ggml.model"), known.get("tokenizer.ggml.pre", "default")
    ways = (*_PLAIN, *_DIGITS, *_SPLITS)
    if model != "gpt2" or way not in ways:
        raise GgufError(
            f"the GGUF file's tokenizer is of kind '{model}', '{way}'; read here are byte-level ones (gpt2: "
            f"{', '.join(ways)}). Give the folder of the original, which has a tokenizer.json"
        )
    tokens: list[str] = known.get("tokenizer.ggml.tokens")
    kinds: list[int] = known.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in known.get("tokenizer.ggml.merges")]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    made.add_special_tokens(
        [AddedToken(token, special=True) for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    )
    made.add_tokens(
        [AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True) if kind == _DEFINED]
    )
    if made.get_vocab_size() != len(tokens):
        raise GgufError(f"the GGUF file's {len(tokens):,} tokens make a vocabulary of {made.get_vocab_size():,}")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=way not in _SPLITS)
    if way in _DIGITS:
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), split])
    elif way in _SPLITS:
        isolated = pre_tokenizers.Split(Regex(_SPLITS[way]), behavior="isolated")
        made.pre_tokenizer = pre_tokenizers.Sequence([isolated, split])
    else:
        made.pre_tokenizer = split
    made.decoder = decoders.ByteLevel()
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": known.of_kind("context_length"),
        "chat_template": known.get("tokenizer.chat_template"),
    }
    settings |= {name.removesuffix("_id"): tokens[index] for name, index in special.items()}
    if known.get("tokenizer.ggml.add_bos_token") and "bos_token_id" in special:
        bos = settings["bos_token"]
        made.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=None, special_tokens=[(bos, special["bos_token_id"])]
        )
    return made, {name: value for name, value in settings.items() if value is not None}
