"""Writes a decoder as one ONNX graph and a file of weights in 4 bits, for runtimes in a browser.

One pass scores any tree of tokens: positions and the attention mask are inputs, and the pass returns the keys and
values of its own tokens only, so that the caller appends the rows of the accepted path and has nothing to roll back.
Weights are codes of 4 bits, those of the embedding and the output layer of 8. The graph multiplies in 32 bits: its
matrices are external data, which whoever loads it dequantises, once. In WebAssembly a pass then takes half or less of
the time of onnxruntime's `MatMulNBits`, which dequantises in every pass; folding constants in the graph takes 4 GB.
Independent of tokenizers and of what runs the graph. Needs the extra `live` (onnx).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.engine.linear import Dense, Linear
from outrider.core.engine.network import Network
from outrider.core.engine.rotary import rope_table
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible, OutriderError, install_command

OPSET = 23  # Attention, RotaryEmbedding and RMSNormalization
_BLOCKS = {4: 32, 8: 64}  # bits of a weight -> weights that share a scale
_STEPS = 16  # of an offset in one level
_ROWS = 4096  # quantized at once
_LINEARS = ("qkv", "out", "up_gate", "down")
_BYTES = {"FLOAT": 4, "FLOAT16": 2, "UINT8": 1}


class ExportError(OutriderError):
    """onnx is missing."""


@dataclass(frozen=True)
class Blocks:
    """A matrix in 4 or 8 bits, in blocks along its rows. A weight is scale (code - offset)."""

    bits: int
    codes: Tensor  # [out, blocks, block] bytes; in 4 bits two codes a byte, the earlier weight in the lower half
    scales: Tensor  # [out, blocks, 1] in 16 bits
    offsets: Tensor | None  # [out, blocks, 1] bytes, in sixteenths; None: the middle, 128

    @classmethod
    def of(cls, weight: Tensor, bits: int) -> Blocks:
        """The nearest codes: in 4 bits between the least and the greatest weight of each block, so that weights that
        were in Q4_1 of llama.cpp keep their codes, in 8 bits between the greatest and its negative."""
        weight = weight.detach().float()
        parts = [cls._of(weight[start : start + _ROWS], bits) for start in range(0, len(weight), _ROWS)]
        codes, scales = (torch.cat([getattr(part, name) for part in parts]) for name in ("codes", "scales"))
        offsets = [part.offsets for part in parts if part.offsets is not None]
        return cls(bits, codes, scales, torch.cat(offsets) if offsets else None)

    @classmethod
    def _of(cls, weight: Tensor, bits: int) -> Blocks:
        block = _BLOCKS[bits] if weight.shape[1] % _BLOCKS[bits] == 0 else weight.shape[1]
        blocks = weight.reshape(len(weight), -1, block)
        if bits == 8:
            scale = (blocks.abs().amax(2, keepdim=True) / 127).clamp_min(1e-7).half()
            return cls(bits, (blocks / scale.float() + 128).round().clamp(0, 255).to(torch.uint8), scale, None)
        low, high = blocks.amin(2, keepdim=True).clamp_max(0), blocks.amax(2, keepdim=True).clamp_min(0)
        scale = ((high - low) / 15).clamp_min(1e-7).half()
        offset = (-low / scale.float() * _STEPS).round().clamp(0, 255)
        codes = (blocks / scale.float() + offset / _STEPS).round().clamp(0, 15).to(torch.uint8)
        return cls(bits, codes[..., ::2] | codes[..., 1::2] << 4, scale, offset.to(torch.uint8))

    @property
    def content(self) -> bytes:
        """Codes, scales and offsets as they are in the file."""
        parts = [part for part in (self.codes, self.scales, self.offsets) if part is not None]
        return b"".join(part.contiguous().numpy().tobytes() for part in parts)

    def described(self, name: str) -> dict[str, Any]:
        """What a reader of the file needs to know."""
        rows, blocks, size = self.codes.shape
        block = size * 8 // self.bits
        return {"name": name, "rows": rows, "columns": blocks * block, "bits": self.bits, "block": block}

    def weight(self) -> Tensor:
        """The matrix [out, in] in 32 bits, as the graph computes with it."""
        if self.offsets is None:
            return ((self.codes.float() - 128) * self.scales.float()).flatten(1)
        codes = torch.stack([self.codes & 15, self.codes >> 4], 3).flatten(2).float()
        return ((codes - self.offsets.float() / _STEPS) * self.scales.float()).flatten(1)


def rounded(network: Network) -> Network:
    """The network with the weights that its graph has, to compare with."""

    def change(linear: Linear) -> Linear:
        return Dense(Blocks.of(linear.weight, 4).weight())

    layers = network.map_linears(change).layers
    embedding = Blocks.of(network.embedding, 8).weight()
    head = embedding if network.config.tied else Blocks.of(network.head.weight, 8).weight()
    return Network(network.config, embedding, layers, network.norm, Dense(head))


def require() -> Any:
    """The package onnx."""
    try:
        import onnx
    except ImportError:
        raise ExportError(f"an ONNX graph needs onnx: {install_command('live')}") from None
    return onnx


def check(config: Config) -> None:
    """Raise Incompatible unless the layers are like Llama's: the graph has no other parts."""
    plain = config.like_llama and not (config.attention_bias or config.out_bias or config.mlp_bias or config.qk_norm)
    if not plain or config.rope_scaling is not None:
        raise Incompatible(
            f"the graph has Llama's layers, without biases or scaled positions; a model of the type "
            f"'{config.architecture}' with other parts can't be written"
        )


def matrices(network: Network) -> Iterator[tuple[str, Blocks]]:
    """The quantized matrices by the names under which the graph has them, in the order of the file of weights. The
    embedding of tied models is also the output layer, "head"."""
    yield "embedding", Blocks.of(network.embedding, 8)
    if not network.config.tied:
        yield "head", Blocks.of(network.head.weight, 8)
    for index, layer in enumerate(network.layers):
        for name, linear in zip(_LINEARS, layer.linears, strict=True):
            yield f"{index}.{name}", Blocks.of(linear.weight, 4)


def write(network: Network, graph_file: Path, weights_file: Path, *, positions: int = 2048) -> list[dict[str, Any]]:
    """Write the graph of texts of up to `positions` tokens, and the weights; describes the matrices in the second file.

    Inputs: `ids` [N], `positions` [N], `mask` [N, T + N] (true where attended), `past` [T, L, 2 K d] and `wanted` [W],
    the tokens whose logits are returned. Outputs: `logits` [W, V] and `new` [N, L, 2 K d], rows for `past`. External
    data, each in a location of its name: matrices [in, out] in 32 bits, `embedding.codes` and `embedding.scales`."""
    onnx = require()
    check(network.config)
    graph = _Graph(onnx)
    _decoder(graph, network, min(positions, network.config.context))
    onnx.save_model(graph.model(), str(graph_file))
    found = []
    with weights_file.open("wb") as file:
        for name, blocks in matrices(network):
            file.write(blocks.content)
            found.append(blocks.described(name))
    return found


@dataclass
class _Graph:
    """Nodes and initial values of a graph that grows."""

    onnx: Any
    nodes: list[Any] = field(default_factory=list)
    values: list[Any] = field(default_factory=list)
    numbers: set[str] = field(default_factory=set)  # the names of small constants
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def value(self, name: str, tensor: Tensor) -> str:
        """A constant."""
        self.values.append(self.onnx.numpy_helper.from_array(tensor.contiguous().numpy(), name))
        return name

    def op(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> Any:
        """The names of an operation's outputs; of a single one its name."""
        names = [f"{kind.lower()}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(self.onnx.helper.make_node(kind, list(inputs), names, **attributes))
        return names[0] if outputs == 1 else names

    def result(self, name: str, value: str, kind: int, shape: list[Any]) -> None:
        self.nodes.append(self.onnx.helper.make_node("Identity", [value], [name]))
        self.outputs.append(self.onnx.helper.make_tensor_value_info(name, kind, shape))

    def entry(self, name: str, kind: int, shape: list[Any]) -> str:
        self.inputs.append(self.onnx.helper.make_tensor_value_info(name, kind, shape))
        return name

    def external(self, name: str, kind: int, shape: list[int]) -> str:
        """A constant that whoever loads the graph provides."""
        tensor = self.onnx.TensorProto(name=name, data_type=kind, dims=shape)
        tensor.data_location = self.onnx.TensorProto.EXTERNAL
        length = math.prod(shape) * _BYTES[self.onnx.TensorProto.DataType.Name(kind)]
        for key, entry in (("location", name), ("offset", "0"), ("length", str(length))):
            tensor.external_data.add(key=key, value=entry)
        self.values.append(tensor)
        return name

    def product(self, x: str, name: str, weight: Tensor) -> str:
        """x [..., in] -> [..., out] for a matrix [out, in]."""
        matrix = self.external(name, self.onnx.TensorProto.FLOAT, list(weight.shape[::-1]))
        made: str = self.op("MatMul", x, matrix)
        return made

    def number(self, name: str, number: float | list[int], dtype: torch.dtype | None = None) -> str:
        """A small constant, written once."""
        if name not in self.numbers:
            self.numbers.add(name)
            self.value(name, torch.tensor(number, dtype=dtype))
        return name

    def model(self) -> Any:
        helper = self.onnx.helper
        graph = helper.make_graph(self.nodes, "decoder", self.inputs, self.outputs, self.values)
        opsets = [helper.make_opsetid("", OPSET)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def _decoder(graph: _Graph, network: Network, positions: int) -> None:
    config, kinds = network.config, graph.onnx.TensorProto
    width = 2 * config.kv_heads * config.head_dim
    ids, at = graph.entry("ids", kinds.INT64, ["N"]), graph.entry("positions", kinds.INT64, ["N"])
    mask = graph.entry("mask", kinds.BOOL, ["N", "C"])
    past = graph.entry("past", kinds.FLOAT, ["T", config.layers, width])
    wanted = graph.entry("wanted", kinds.INT64, ["W"])
    batch = graph.number("batch_axis", [0])
    x = _embedded(graph, network.embedding, ids, batch)
    cos, sin = rope_table(config, positions, torch.float32, torch.device("cpu"))
    half = config.head_dim // 2
    angles = graph.value("cos", cos[:, :half]), graph.value("sin", sin[:, half:]), graph.op("Unsqueeze", at, batch)
    heads = graph.number("cache_shape", [0, 2 * config.layers, config.kv_heads, config.head_dim])
    stored = graph.op("Transpose", graph.op("Reshape", past, heads), perm=[1, 2, 0, 3])  # [2 L, K, T, d]
    caches = graph.op("Split", stored, outputs=2 * config.layers, axis=0, num_outputs=2 * config.layers)
    new = []
    for index, layer in enumerate(network.layers):
        normed = _normed(graph, f"{index}.attention_norm", x, layer.attention_norm, config.norm_eps)
        qkv = graph.product(normed, f"{index}.qkv", layer.qkv.weight)
        attended, written = _attention(graph, config, qkv, mask, angles, caches[2 * index : 2 * index + 2])
        new.append(written)
        x = graph.op("Add", x, graph.product(attended, f"{index}.out", layer.out.weight))
        normed = _normed(graph, f"{index}.mlp_norm", x, layer.mlp_norm, config.norm_eps)
        both = graph.product(normed, f"{index}.up_gate", layer.up_gate.weight)
        up, gate = graph.op("Split", both, outputs=2, axis=-1, num_outputs=2)
        inner = graph.op("Mul", up, graph.op("Mul", gate, graph.op("Sigmoid", gate)))
        x = graph.op("Add", x, graph.product(inner, f"{index}.down", layer.down.weight))
    normed = _normed(graph, "norm", graph.op("Gather", x, wanted, axis=1), network.norm, config.norm_eps)
    logits = graph.product(normed, "head", network.head.weight)
    graph.result("logits", graph.op("Squeeze", logits, batch), kinds.FLOAT, ["W", config.vocabulary])
    joined = graph.op("Reshape", graph.op("Concat", *new, axis=-1), graph.number("rows", [-1, config.layers, width]))
    graph.result("new", joined, kinds.FLOAT, ["N", config.layers, width])


def _embedded(graph: _Graph, weight: Tensor, ids: str, batch: str) -> str:
    """The embeddings [1, N, D] of tokens. Their codes stay codes, since a pass reads few of them."""
    kinds, shape = graph.onnx.TensorProto, list(Blocks.of(weight[:1], 8).codes.shape[1:])
    codes = graph.external("embedding.codes", kinds.UINT8, [len(weight), *shape])
    scales = graph.external("embedding.scales", kinds.FLOAT16, [len(weight), shape[0], 1])
    codes, scales = (
        graph.op("Cast", graph.op("Gather", part, ids, axis=0), to=kinds.FLOAT) for part in (codes, scales)
    )
    centred = graph.op("Sub", codes, graph.number("middle", 128.0))
    rows = graph.op("Reshape", graph.op("Mul", centred, scales), graph.number("states", [0, -1]))
    made: str = graph.op("Unsqueeze", rows, batch)
    return made


def _normed(graph: _Graph, name: str, x: str, weight: Tensor, epsilon: float) -> str:
    made: str = graph.op("RMSNormalization", x, graph.value(name, weight.float()), axis=-1, epsilon=epsilon)
    return made


def _attention(
    graph: _Graph, config: Config, qkv: str, mask: str, angles: tuple[str, str, str], cache: list[str]
) -> tuple[str, str]:
    """The attention's output [1, N, H d] of `qkv` [1, N, (H + 2 K) d], and the new keys and values [1, N, 2 K d]."""
    sizes = graph.number("head_sizes", [n * config.head_dim for n in (config.heads, config.kv_heads, config.kv_heads)])
    query, key, value = graph.op("Split", qkv, sizes, outputs=3, axis=-1)
    query = graph.op("RotaryEmbedding", query, *angles, num_heads=config.heads)
    key = graph.op("RotaryEmbedding", key, *angles, num_heads=config.kv_heads)
    heads = {"q_num_heads": config.heads, "kv_num_heads": config.kv_heads}
    attended, _, _ = graph.op("Attention", query, key, value, mask, *cache, outputs=3, **heads)
    return attended, graph.op("Concat", key, value, axis=-1)
