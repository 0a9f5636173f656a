"""HiFi-GAN's generator in compiled kernels (csrc/vocoder.cpp), in 16 bits with AMX tiles. Elsewhere torch is as fast.
Independent of mel frames and of sound."""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.core.kernels import native

_MARGIN = 64  # rows of zeros before and after the inputs of a stage
_GROUP = 32  # inputs and outputs of two tiles
_LAST = 32  # channels of the last stage

Convolution = tuple[Tensor, Tensor]  # weights [out, in, taps] and bias


class _Weights(ctypes.Structure):
    _fields_ = (("tiles", c_void_p), ("bias", c_void_p))


class _Stage(ctypes.Structure):
    _fields_ = (
        ("up", _Weights),
        ("wide", _Weights * 9),
        ("narrow", _Weights * 9),
        ("in_", c_void_p),
        ("out", c_void_p),
        *((name, c_int32) for name in ("ins", "width", "stride")),
    )


@functools.cache
def _library() -> ctypes.CDLL | None:
    code = native.opened("vocoder") if native.halves() else None
    if code is None or not code.outrider_vocoder_ready():
        return None
    code.outrider_vocode.argtypes = [c_void_p, c_int32, c_void_p, c_void_p, c_int32, c_void_p, c_float, c_void_p]
    code.outrider_vocode.argtypes += [c_int64, c_int32]
    code.outrider_vocode.restype = None
    return code


def usable(width: int, strides: Sequence[int]) -> bool:
    """Whether the kernels run here, and a generator that begins with `width` channels and multiplies steps by these."""
    return width >> len(strides) == _LAST and all(each % 2 == 0 for each in strides) and _library() is not None


class Generator:
    """Frames [T, bins] -> samples. `stages` have a transposed convolution [in, out, 2 stride] and, for each of three
    kernel sizes, three pairs of convolutions."""

    def __init__(
        self,
        before: Convolution,
        stages: Sequence[tuple[Convolution, Sequence[Sequence[tuple[Convolution, Convolution]]]]],
        last: Convolution,
    ) -> None:
        self._kept: list[Tensor] = []  # what the kernels point to
        self._lock = threading.Lock()  # of the rows between stages
        self._bins = -(-before[0].shape[1] // _GROUP) * _GROUP
        self._before = self._weights(before)
        self._stages = (_Stage * len(stages))()
        for stage, (up, blocks) in zip(self._stages, stages, strict=True):
            stage.ins, stage.width, taps = up[0].shape
            stage.stride = taps // 2
            stage.up = self._weights(_spread(*up))
            pairs = [pair for block in blocks for pair in block]
            for place, (wide, narrow) in enumerate(pairs):
                stage.wide[place], stage.narrow[place] = self._weights(wide), self._weights(narrow)
        self._last = last[0][0].T.to(torch.bfloat16).contiguous()  # [taps, in]
        self._last_bias = float(last[1])
        self._rows: list[Tensor] = []

    def _weights(self, convolution: Convolution) -> _Weights:
        tiles, bias = _tiled(convolution[0]), convolution[1].float().contiguous()
        self._kept += [tiles, bias]
        return _Weights(tiles.data_ptr(), bias.data_ptr())

    def __call__(self, frames: Tensor) -> Tensor:
        code, count = _library(), len(frames)
        assert code is not None
        with self._lock:
            mel = self._room(count)
            mel[_MARGIN : _MARGIN + count, : frames.shape[1]] = frames
            steps = count
            for number, stage in enumerate(self._stages):
                stage.in_ = self._rows[number + 1][_MARGIN:].data_ptr()
                steps *= stage.stride
                stage.out = self._rows[number + 2][_MARGIN:].data_ptr()
            sound = torch.empty(steps)
            where = mel[_MARGIN:].data_ptr(), self._bins, ctypes.byref(self._before), ctypes.byref(self._stages)
            how = len(self._stages), self._last.data_ptr(), self._last_bias, sound.data_ptr(), count
            code.outrider_vocode(*where, *how, torch.get_num_threads())
        return sound

    def _room(self, frames: int) -> Tensor:
        """The frames' rows, with room for this many and for all that is computed of them, and zeros around them."""
        widths = [self._bins, *(stage.ins for stage in self._stages), _LAST]
        counts = [frames, frames]
        for stage in self._stages:
            counts.append(counts[-1] * stage.stride)
        if not self._rows or len(self._rows[0]) < frames + 2 * _MARGIN:
            shapes = zip(counts, widths, strict=True)
            self._rows = [torch.zeros(rows + 2 * _MARGIN, width, dtype=torch.bfloat16) for rows, width in shapes]
        for rows, count in zip(self._rows, counts, strict=True):
            rows[_MARGIN + count : 2 * _MARGIN + count] = 0
        return self._rows[0]


def _tiled(weight: Tensor) -> Tensor:
    """Weights [out, in, taps] as tiles of sixteen pairs of inputs by sixteen outputs, [out / 32, taps, in / 32, 2]."""
    outs, ins, taps = weight.shape
    weight = torch.nn.functional.pad(weight, (0, 0, 0, -ins % _GROUP)).to(torch.bfloat16)
    parts = weight.view(outs // _GROUP, 2, _GROUP // 2, weight.shape[1] // _GROUP, _GROUP // 2, 2, taps)
    return parts.permute(0, 6, 3, 1, 4, 2, 5).contiguous()


def _spread(weight: Tensor, bias: Tensor) -> Convolution:
    """A transposed convolution [in, out, 2 stride] as one of three taps that computes `stride` steps at each."""
    ins, outs, taps = weight.shape
    stride = taps // 2
    found = weight.new_zeros(stride, outs, ins, 3)
    for phase in range(stride):
        for tap in range(3):
            place = phase + stride // 2 - (tap - 1) * stride
            if 0 <= place < taps:
                found[phase, :, :, tap] = weight[:, :, place].T
    return found.flatten(0, 1), bias.repeat(stride)
