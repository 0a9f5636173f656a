"""Forward passes through the layers of a network in one call of the compiled kernels (core/kernels/csrc/native.cpp)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.core.engine.types import Config, Layer, PassLayout
from outrider.core.kernels import native


class _Layer(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("attention_norm", "mlp_norm", "qk_norm")),
        *((name, native.Matrix) for name in ("qkv", "out", "up_gate", "down")),
        *((name, c_int32) for name in ("use_attention", "use_mlp")),
    )


class _Shape(ctypes.Structure):
    _fields_ = (
        *((name, c_int32) for name in ("hidden_size", "heads", "kv_heads", "head_dim", "intermediate_size", "into")),
        ("eps", c_float),
    )


class _Pass(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("x", "store")),
        *((name, c_int64) for name in ("layer_stride", "row_stride", "head_stride", "slot_stride")),
        *((name, c_void_p) for name in ("cosine", "sine", "positions", "slots", "mask", "work", "read", "taps")),
        *((name, c_int64) for name in ("position_stride", "mask_stride", "start")),
        *((name, c_int32) for name in ("rows", "count", "columns", "reach", "first", "last", "threads", "small")),
    )


class Passes:
    """All layers of a network in one call."""

    def __init__(self, config: Config, layers: Sequence[Layer]) -> None:
        into = {layer.qkv.matrix.in_ for layer in layers}  # type: ignore[attr-defined]
        sizes = config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.intermediate_size, max(into)
        self._shape = _Shape(*sizes, config.norm_eps)
        self._layers, self.layers = (_Layer * len(layers))(), len(layers)
        self._kept: list[object] = [layers]
        for into, layer in zip(self._layers, layers, strict=True):
            into.use_attention, into.use_mlp = layer.use_attention, layer.use_mlp
            for name in ("attention_norm", "mlp_norm", "qk_norm"):
                weight = getattr(layer, name)
                self._kept.append(weight := None if weight is None else weight.float().contiguous())
                setattr(into, name, native.at(weight))
            for name in ("qkv", "out", "up_gate", "down"):
                setattr(into, name, getattr(layer, name).matrix)
        self._angles = torch.zeros(2, 0)

    def reach(self, cosine: Tensor, sine: Tensor) -> None:
        """Angles [positions, d / 2] in 32 bits."""
        self._angles = torch.stack([cosine, sine])

    def run(
        self,
        x: Tensor,
        store: Tensor,
        places: PassLayout,
        first: int,
        last: int,
        read: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> None:
        """States x [N, D] in 32 bits, changed in place; keys and values are written to the store. Attention reads
        `read` [N, into], if given, instead of the normed states; behind some layers these are noted in `taps`."""
        code = native.library()
        assert code is not None
        given, _kept = self.given(x, store, places, first, last, read)
        if taps:
            noted = (c_void_p * last)(*(native.at(taps.get(index)) for index in range(last)))
            given.taps = ctypes.addressof(noted)
        code.outrider_run(*self.addresses, ctypes.addressof(given))

    @property
    def addresses(self) -> tuple[int, int]:
        """Of the shape and of the layers."""
        return ctypes.addressof(self._shape), ctypes.addressof(self._layers)

    def work(self, tokens: int, columns: int) -> int:
        """The bytes of scratch space that a run of so many tokens needs."""
        code = native.library()
        assert code is not None
        size: int = code.outrider_work(ctypes.addressof(self._shape), tokens, columns, torch.get_num_threads())
        return size

    def given(
        self, x: Tensor, store: Tensor, places: PassLayout, first: int, last: int, read: Tensor | None = None
    ) -> tuple[_Pass, object]:
        """What a run is told, and what has to be kept until it is over."""
        code, threads = native.library(), torch.get_num_threads()
        assert code is not None
        positions = places.positions.contiguous()
        mask = None if places.mask is None else places.mask.contiguous()
        slots = None if places.slots is None else places.slots.contiguous()
        angles = self._angles  # which another thread may exchange for longer ones meanwhile
        rows, count, reach = store.shape[1], positions.shape[1], angles.shape[1]
        space = native.work(self.work(len(x), places.columns))
        strides = [store.stride(axis) * store.element_size() for axis in range(4)]
        told = _Pass(
            *(x.data_ptr(), store.data_ptr(), *strides),
            *(
                native.at(angles[0]),
                native.at(angles[1]),
                native.at(positions),
                native.at(slots),
                native.at(mask),
                space,
                native.at(read),
                None,
            ),
            *(count if len(positions) > 1 else 0, 0 if mask is None or len(mask) == 1 else count * places.columns),
            *(places.start or 0, rows, count, places.columns, reach, first, last, threads, store.dtype == torch.int8),
        )
        return told, (positions, mask, slots, angles)

    def normed(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of states x [N, D] in 32 bits, in 16 bits."""
        code, out = native.library(), torch.empty(x.shape, dtype=torch.bfloat16)
        assert code is not None
        where = x.data_ptr(), weight.data_ptr()
        code.outrider_normed(*where, *x.shape, self._shape.eps, out.data_ptr())
        return out


def passes(config: Config, layers: Sequence[Layer], dtype: torch.dtype) -> Passes | None:
    """Whole passes, where the network's numbers fit; else None."""
    products = [one for layer in layers for one in (layer.qkv, layer.out, layer.up_gate, layer.down)]
    if dtype != torch.bfloat16 or config.head_dim % 32 or not all(isinstance(one, native.Tiled) for one in products):
        return None
    return Passes(config, layers) if products else None
