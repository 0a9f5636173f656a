"""Forward passes through the layers of a network in one call of the compiled kernels (core/kernels/csrc/native.cpp).

Independent of tokens and drafts. The structures mirror csrc/layout.h.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from outrider.core.engine.rotary import Factors
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
        *(
            (name, c_void_p)
            for name in ("cosine", "sine", "positions", "slots", "mask", "work", "read", "taps", "firsts")
        ),
        *((name, c_int64) for name in ("position_stride", "mask_stride", "start")),
        *(
            (name, c_int32)
            for name in ("rows", "count", "columns", "reach", "first", "last", "threads", "small", "reading")
        ),
    )


class NativePass:
    """The layers of a network, described to the compiled kernels."""

    def __init__(self, config: Config, layers: Sequence[Layer]) -> None:
        input_size = max(layer.qkv.matrix.in_ for layer in layers)  # type: ignore[attr-defined]
        sizes = config.hidden_size, config.heads, config.kv_heads, config.head_dim, config.intermediate_size, input_size
        self._shape = _Shape(*sizes, config.norm_eps)
        self._layers, self.layers = (_Layer * len(layers))(), len(layers)
        self._references: list[object] = [layers]  # keeps the memory behind the addresses alive
        for struct, layer in zip(self._layers, layers, strict=True):
            struct.use_attention, struct.use_mlp = layer.use_attention, layer.use_mlp
            for name in ("attention_norm", "mlp_norm", "qk_norm"):
                weight = getattr(layer, name)
                self._references.append(weight := None if weight is None else weight.float().contiguous())
                setattr(struct, name, native.at(weight))
            for name in ("qkv", "out", "up_gate", "down"):
                setattr(struct, name, getattr(layer, name).matrix)
        matrices = (getattr(struct, name) for struct in self._layers for name in ("qkv", "out", "up_gate", "down"))
        integers = any(matrix.bits == 4 or matrix.rounds for matrix in matrices)
        # whether a token has other keys and values in a prompt than in a draft
        self.reads_apart = integers and native.reads_prompts_apart()
        self.factors = Factors()
        self._angles = {False: torch.zeros(2, 0)}

    def set_angles(self, cosine: Tensor, sine: Tensor) -> None:
        """Set the rotary tables, [positions, d / 2] each, in 32 bits, of the factors in use."""
        self._angles[self.factors.long] = torch.stack([cosine, sine])

    def run(
        self,
        x: Tensor,
        store: Tensor,
        layout: PassLayout,
        first: int,
        last: int,
        read: Tensor | None = None,
        taps: Mapping[int, Tensor] | None = None,
    ) -> None:
        """Run layers `first` to `last` - 1 on states x [N, D] in 32 bits, in place, and write keys and values to the
        store. Attention reads `read` [N, input size] instead of the normed states if given. The output states of the
        layers in `taps` are copied to its tensors. Tokens that are not live are left out; their states become 0."""
        index, firsts, some, tapped = None, None, x, taps
        if layout.live is not None and read is None:
            index, layout, firsts = _packed(layout, store.shape[1])
            some, tapped = x.index_select(0, index), {tap: to[: len(index)] for tap, to in (taps or {}).items()}
        code = native.library()
        assert code is not None
        arguments, _references = self.arguments(some, store, layout, first, last, read, firsts)
        if tapped:
            addresses = (c_void_p * last)(*(native.at(tapped.get(layer)) for layer in range(last)))
            arguments.taps = ctypes.addressof(addresses)
        code.outrider_run(*self.addresses, ctypes.addressof(arguments))
        if index is not None:
            for whole, part in ((x, some), *((to, to[: len(index)].clone()) for to in (taps or {}).values())):
                whole.zero_().index_copy_(0, index, part)

    @property
    def addresses(self) -> tuple[int, int]:
        """The addresses of the shape and of the layers."""
        return ctypes.addressof(self._shape), ctypes.addressof(self._layers)

    def workspace_size(self, tokens: int, columns: int) -> int:
        """The bytes of scratch memory that a pass over this many tokens needs."""
        code = native.library()
        assert code is not None
        size: int = code.outrider_work(ctypes.addressof(self._shape), tokens, columns, torch.get_num_threads())
        return size

    def arguments(
        self,
        x: Tensor,
        store: Tensor,
        layout: PassLayout,
        first: int,
        last: int,
        read: Tensor | None = None,
        firsts: Tensor | None = None,
    ) -> tuple[_Pass, object]:
        """The arguments of one pass, and references that must be kept until it has run. `firsts` [B + 1]: the layout is
        that of one row with the tokens of all rows, whose first ones these are."""
        threads = torch.get_num_threads()
        positions = layout.positions.contiguous()
        mask = None if layout.mask is None else layout.mask.contiguous()
        slots = None if layout.slots is None else layout.slots.contiguous()
        angles = self._angles[self.factors.long]  # another thread may replace them meanwhile
        rows, reach = store.shape[1], angles.shape[1]
        count = positions.shape[1] if firsts is None else int(firsts.diff().max())
        workspace = native.work(self.workspace_size(len(x), layout.columns))
        strides = [store.stride(axis) * store.element_size() for axis in range(4)]
        arguments = _Pass(
            *(x.data_ptr(), store.data_ptr(), *strides),
            *(
                native.at(angles[0]),
                native.at(angles[1]),
                native.at(positions),
                native.at(slots),
                native.at(mask),
                workspace,
                native.at(read),
                None,
                native.at(firsts),
            ),
            *(count if len(positions) > 1 else 0, 0 if mask is None or len(mask) == 1 else count * layout.columns),
            *(layout.start or 0, rows, count, layout.columns, reach, first, last, threads, store.dtype == torch.int8),
            layout.reading,
        )
        return arguments, (positions, mask, slots, angles, firsts)

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of states x [N, D] in 32 bits -> 16 bits."""
        code, out = native.library(), torch.empty(x.shape, dtype=torch.bfloat16)
        assert code is not None
        code.outrider_normed(x.data_ptr(), weight.data_ptr(), *x.shape, self._shape.eps, out.data_ptr())
        return out


def _packed(layout: PassLayout, rows: int) -> tuple[Tensor, PassLayout, Tensor]:
    """The live tokens among those of all rows [N], their layout as one row, and the first token of each row [B + 1]."""
    live, count = layout.live, layout.positions.shape[1]
    assert live is not None
    index = live.flatten().nonzero()[:, 0]
    slots = layout.slots
    if slots is None:
        assert layout.start is not None
        slots = torch.arange(layout.start, layout.start + count)
    mask = layout.mask
    if mask is not None:
        mask = mask[0, index % count][None] if len(mask) == 1 else mask.flatten(0, 1).index_select(0, index)[None]

    def of_index(part: Tensor) -> Tensor:
        return part.expand(rows, -1).flatten().index_select(0, index)[None]

    packed = PassLayout(of_index(layout.positions), layout.columns, mask, None, of_index(slots))
    return index, packed, torch.nn.functional.pad(live.sum(1).cumsum(0), (1, 0)).int()


def native_pass(config: Config, layers: Sequence[Layer], dtype: torch.dtype) -> NativePass | None:
    """The layers for the compiled kernels; None unless they are in bfloat16, tiled, built as Llama's, and heads have a
    multiple of 32."""
    linears = [linear for layer in layers for linear in (layer.qkv, layer.out, layer.up_gate, layer.down)]
    if dtype != torch.bfloat16 or config.head_dim % 32 or not config.like_llama:
        return None
    if not linears or not all(isinstance(linear, native.Tiled) for linear in linears):
        return None
    return NativePass(config, layers)
