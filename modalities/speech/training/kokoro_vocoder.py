"""Kokoro's vocoder in torch: iSTFTNet (arXiv 2203.02395) with style conditioning (StyleTTS 2, arXiv 2306.07691).

It takes nine tenths of the teacher's time. On processors with 16-bit products its convolutions run in bfloat16 and
everything that affects phases in float32, three to four times as fast as the 8-bit graph. Reads its weights from the
graph; independent of phonemes.
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
FRAMES, SOURCE = "/decoder/decoder/decode.3/Div_4_output_0", f"{_ROOT}/Concat_3_output_0"  # its input tensors
_STAGES = ((10, 256), (6, 128))  # upsampling factor, channels
_KERNELS, _DILATIONS = (3, 7, 11), (1, 3, 5)
_NOISE = ((12, 6, 3, 7), (1, 1, 0, 11))  # of each stage's source: kernel, stride, padding, kernel of its block
_BINS, _WINDOW, _HOP = 11, 20, 5
_GAIN = 1.5  # the sum of overlapping windows, by which Kokoro does not divide


class KokoroVocoder:
    """Frames [1, 512, T], a source [1, 22, N] and a style [1, 128] -> samples at 24 kHz."""

    def __init__(self, graph: Any) -> None:
        weights = _Weights(graph)
        self._ups = [
            (weights[f"{_ROOT}/{name}_output_0"], weights.plain(f"ups.{stage}.bias"), factor)
            for stage, (name, (factor, _)) in enumerate(zip(("Mul", "Mul_1"), _STAGES, strict=True))
        ]
        self._noise = [weights.conv(f"noise_convs.{stage}") for stage in range(len(_STAGES))]
        self._noise_blocks = [_Block(weights, f"noise_res.{stage}", sizes[3]) for stage, sizes in enumerate(_NOISE)]
        self._blocks = [
            [_Block(weights, f"resblocks.{len(_KERNELS) * stage + index}", size) for index, size in enumerate(_KERNELS)]
            for stage in range(len(_STAGES))
        ]
        self._last = (weights[f"{_ROOT}/Mul_2_output_0"], weights.plain("conv_post.bias"))
        self._window = torch.hann_window(_WINDOW)

    @torch.inference_mode()
    def __call__(self, frames: np.ndarray, source: np.ndarray, style: np.ndarray) -> np.ndarray:
        x, excitation, styles = torch.from_numpy(frames), torch.from_numpy(source), torch.from_numpy(style.copy())
        for stage, (weight, bias, factor) in enumerate(self._ups):
            _, stride, padding, _ = _NOISE[stage]
            kernel, noise_bias = self._noise[stage]
            noise = rows(F.conv1d(excitation, kernel, noise_bias, stride=stride, padding=padding))
            noise = self._noise_blocks[stage](noise, styles)
            x = F.conv_transpose1d(F.leaky_relu(x, 0.1), weight, bias, stride=factor, padding=factor // 2)
            if stage == len(self._ups) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            mixed = rows(x) + noise
            x = sum((block(mixed, styles) for block in self._blocks[stage]), torch.zeros(())) / len(_KERNELS)
            x = x[:, :, 0].contiguous()
        weight, bias = self._last
        out = F.conv1d(F.leaky_relu(x), weight, bias, padding=weight.shape[-1] // 2)
        magnitude, phase = out[:, :_BINS].exp(), out[:, _BINS:].sin()
        sound = torch.istft(torch.polar(magnitude, phase), _WINDOW, _HOP, _WINDOW, self._window, center=True)
        return (_GAIN * sound[0]).numpy()


class _Block:
    """Three pairs of convolutions, each after adaptive instance normalisation by the style and a Snake activation."""

    def __init__(self, weights: _Weights, name: str, size: int) -> None:
        self._steps = [
            [_step(weights, name, half, index, dilation if half == 1 else 1) for half in (1, 2)]
            for index, dilation in enumerate(_DILATIONS)
        ]
        self._size = size

    def __call__(self, x: Tensor, style: Tensor) -> Tensor:
        for pair in self._steps:
            inner = x
            for matrix, shift, alpha, weight, bias, dilation in pair:
                gain, offset = ((style @ matrix + shift)[0]).chunk(2)
                normed = F.batch_norm(inner, None, None, (1 + gain) * alpha, offset * alpha, True, 0.0, 1e-5)
                sine = normed.sin()
                normed.addcmul_(sine, sine)
                padding = (0, dilation * (self._size // 2))
                inner = F.conv2d(normed.to(weight.dtype), weight, bias, padding=padding, dilation=(1, dilation)).float()
            x = inner.add_(x)
        return x


def _step(
    weights: _Weights, name: str, half: int, index: int, dilation: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, int]:
    """The weights of one normalisation, activation and convolution. The Snake activation x + sin(ax)^2 / a equals
    (ax + sin(ax)^2) / a, so the normalisation multiplies by a and the convolution's weight is divided by it."""
    alpha = weights.plain(f"{name}.alpha{half}.{index}")
    weight, bias = weights.conv(f"{name}.convs{half}.{index}")
    dtype = torch.bfloat16 if halves() else torch.float32
    return (
        *weights.linear(f"{name}.adain{half}.{index}.fc"),
        alpha.flatten(),
        rows(weight / alpha).to(dtype),
        bias.to(dtype),
        dilation,
    )


class _Weights:
    """The graph's weights in float32; 8-bit weights are dequantised."""

    def __init__(self, graph: Any) -> None:
        from onnx import numpy_helper

        self._tensors: Mapping[str, Any] = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes: Mapping[str, Any] = {node.name: node for node in graph.node}
        self._read: Callable[[Any], np.ndarray] = numpy_helper.to_array

    def __getitem__(self, name: str) -> Tensor:
        return torch.from_numpy(self._read(self._tensors[name]).copy())

    def plain(self, name: str) -> Tensor:
        return self["decoder.decoder.generator." + name]

    def _dequantise(self, node: str) -> Tensor:
        inputs = self._nodes[node].input
        weight = self[inputs[1]].float()
        if len(inputs) > 3 and inputs[3]:
            weight -= self[inputs[3]].float()
        return weight * self[inputs[1].removesuffix("_quantized") + "_scale"]

    def conv(self, name: str) -> tuple[Tensor, Tensor]:
        node = "/".join([_ROOT, name.replace(".convs", "/convs"), "Conv_quant"])
        return self._dequantise(node), self.plain(f"{name}.bias")

    def linear(self, name: str) -> tuple[Tensor, Tensor]:
        node = "/".join([_ROOT, name.replace(".adain", "/adain").removesuffix(".fc"), "fc/Gemm_MatMul_quant"])
        return self._dequantise(node), self.plain(f"{name}.bias")
