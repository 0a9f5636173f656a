"""The loud half of the teacher: a generator of waves (iSTFTNet with styles, arXiv 2203.02395 and 2306.07691), which
takes nine tenths of its time. Where the processor multiplies 16-bit numbers, its convolutions are done in those, and
everything that bears on phases in 32: three to four times as fast as its graph in 8 bits.

Knows the teacher's graph, from which it takes its weights, and nothing of phonemes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.kernels.native import halves
from outrider.speech.conv1d import rows

_ROOT = "/decoder/decoder/generator"
FRAMES, SOURCE = "/decoder/decoder/decode.3/Div_4_output_0", f"{_ROOT}/Concat_3_output_0"  # what it is given
_STAGES = ((10, 256), (6, 128))  # how much faster, channels
_KERNELS, _DILATIONS = (3, 7, 11), (1, 3, 5)
_NOISE = ((12, 6, 3, 7), (1, 1, 0, 11))  # of a stage's source: kernel, stride, padding, then its block's kernel
_BINS, _WINDOW, _HOP = 11, 20, 5
_GAIN = 1.5  # its windows add up to so much, and it leaves them so


class KokoroVocoder:
    """What makes sound of frames [1, 512, T], a source [1, 22, N] and a style [1, 128]."""

    def __init__(self, graph: Any) -> None:
        weights = _Weights(graph)
        self._ups = [
            (weights[f"{_ROOT}/{name}_output_0"], weights.plain(f"ups.{stage}.bias"), speed)
            for stage, (name, (speed, _)) in enumerate(zip(("Mul", "Mul_1"), _STAGES, strict=True))
        ]
        self._noise = [weights.conv(f"noise_convs.{stage}") for stage in range(len(_STAGES))]
        self._noise_blocks = [_Block(weights, f"noise_res.{stage}", one[3]) for stage, one in enumerate(_NOISE)]
        self._blocks = [
            [_Block(weights, f"resblocks.{len(_KERNELS) * stage + place}", size) for place, size in enumerate(_KERNELS)]
            for stage in range(len(_STAGES))
        ]
        self._last = (weights[f"{_ROOT}/Mul_2_output_0"], weights.plain("conv_post.bias"))
        self._window = torch.hann_window(_WINDOW)

    @torch.inference_mode()
    def __call__(self, frames: np.ndarray, source: np.ndarray, style: np.ndarray) -> np.ndarray:
        x, heard, how = torch.from_numpy(frames), torch.from_numpy(source), torch.from_numpy(style.copy())
        for stage, (weight, bias, speed) in enumerate(self._ups):
            _, stride, padding, _ = _NOISE[stage]
            kernel, shift = self._noise[stage]
            more = rows(F.conv1d(heard, kernel, shift, stride=stride, padding=padding))
            more = self._noise_blocks[stage](more, how)
            x = F.conv_transpose1d(F.leaky_relu(x, 0.1), weight, bias, stride=speed, padding=speed // 2)
            if stage == len(self._ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            even = rows(x) + more
            x = sum((block(even, how) for block in self._blocks[stage]), torch.zeros(())) / len(_KERNELS)
            x = x[:, :, 0].contiguous()
        weight, bias = self._last
        out = F.conv1d(F.leaky_relu(x), weight, bias, padding=weight.shape[-1] // 2)
        loud, turn = out[:, :_BINS].exp(), out[:, _BINS:].sin()
        sound = torch.istft(torch.polar(loud, turn), _WINDOW, _HOP, _WINDOW, self._window, center=True)
        return (_GAIN * sound[0]).numpy()


class _Block:
    """Three pairs of convolutions, each after a norm that the style sets and a periodic activation."""

    def __init__(self, weights: _Weights, name: str, size: int) -> None:
        self._steps = [
            [_step(weights, name, half, place, dilation if half == 1 else 1) for half in (1, 2)]
            for place, dilation in enumerate(_DILATIONS)
        ]
        self._size = size

    def __call__(self, x: Tensor, style: Tensor) -> Tensor:
        for pair in self._steps:
            inner = x
            for matrix, shift, pitch, weight, bias, dilation in pair:
                gain, offset = ((style @ matrix + shift)[0]).chunk(2)
                even = F.batch_norm(inner, None, None, (1 + gain) * pitch, offset * pitch, True, 0.0, 1e-5)
                wave = even.sin()
                even.addcmul_(wave, wave)
                padding = (0, dilation * (self._size // 2))
                inner = F.conv2d(even.to(weight.dtype), weight, bias, padding=padding, dilation=(1, dilation)).float()
            x = inner.add_(x)
        return x


def _step(
    weights: _Weights, name: str, half: int, place: int, dilation: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """What one convolution needs. x + sin(ax)^2 / a is (ax + sin(ax)^2) / a: the norm before it multiplies by a, the
    convolution behind it divides."""
    pitch = weights.plain(f"{name}.alpha{half}.{place}")
    weight, bias = weights.conv(f"{name}.convs{half}.{place}")
    dtype = torch.bfloat16 if halves() else torch.float32
    return (
        *weights.linear(f"{name}.adain{half}.{place}.fc"),
        pitch.flatten(),
        rows(weight / pitch).to(dtype),
        bias.to(dtype),
        dilation,
    )


class _Weights:
    """The weights of the graph, out of their 8 bits."""

    def __init__(self, graph: Any) -> None:
        from onnx import numpy_helper

        self._held: Mapping[str, Any] = {one.name: one for one in graph.initializer}
        self._nodes: Mapping[str, Any] = {one.name: one for one in graph.node}
        self._read: Callable[[Any], np.ndarray] = numpy_helper.to_array

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._read(self._held[name]).copy())

    def plain(self, name: str) -> Tensor:
        return self["decoder.decoder.generator." + name]

    def _unrounded(self, node: str) -> Tensor:
        inputs = self._nodes[node].input
        weight = self[inputs[1]].float()
        if len(inputs) > 3 and inputs[3]:
            weight -= self[inputs[3]].float()
        return weight * self[inputs[1].removesuffix("_quantized") + "_scale"]

    def conv(self, name: str) -> tuple[Tensor, Tensor]:
        place = "/".join([_ROOT, name.replace(".convs", "/convs"), "Conv_quant"])
        return self._unrounded(place), self.plain(f"{name}.bias")

    def linear(self, name: str) -> tuple[Tensor, Tensor]:
        place = "/".join([_ROOT, name.replace(".adain", "/adain").removesuffix(".fc"), "fc/Gemm_MatMul_quant"])
        return self._unrounded(place), self.plain(f"{name}.bias")
