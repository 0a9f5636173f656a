"""Compiles and calls the CPU kernels (csrc/): matrix products and whole passes with 16-, 8- and 4-bit weights on CPUs
with AVX-512 BF16 or AVX2, and products of a few tokens in 32 bits.

The kernels are compiled once, with the system's C++ compiler, into the user's cache folder; without a compiler or such
a CPU, torch is used (`OUTRIDER_NATIVE=0` forces this, `avx2` limits the kernels to AVX2). The result for a token does
not depend on how many tokens share the pass, so drafting never changes the output, in 16, 8 or 4 bits. Independent of
what the weights are for.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import hashlib
import math
import mmap
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import suppress
from ctypes import c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

from outrider.core.paths import cache_folder

GROUP = 32  # inputs of a tile, and of a group that shares a scale in 4 bits
_OUTPUTS = 16  # outputs of a tile
_TILE4 = 320  # bytes of a tile of 4 bits: integers, scales and offsets
_ROOM, _ALIGNED = 1 << 25, 64  # bytes of huge pages allocated at a time; alignment of weights


class Matrix(ctypes.Structure):
    _fields_ = (
        *((name, c_void_p) for name in ("tiles", "scales", "bias")),
        *((name, c_int32) for name in ("out", "in_", "bits", "rounds")),
    )


def _processor() -> str:
    """The processor's flags, on which the compiled instructions depend."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith("flags")), "")


def _setting() -> str:
    return os.environ.get("OUTRIDER_NATIVE", "1")


def _compiler() -> str | None:
    return os.environ.get("CXX") or next(filter(None, map(shutil.which, ("g++", "c++"))), None)


def halves() -> bool:
    """Whether this processor has 16-bit products (AVX-512 BF16)."""
    return "avx512_bf16" in _processor().split()


def reads_prompts_apart() -> bool:
    """Whether prompts may be read in other numbers than drafts are verified in, with weights of 4 bits: in tiles."""
    return "amx_tile" in _processor().split() and _setting() != "avx2"


def hindrance() -> tuple[str, str] | None:
    """Why the kernels cannot be used on this machine, and a remedy (may be empty); None if nothing prevents it."""
    if _setting() == "0":
        return "switched off by OUTRIDER_NATIVE=0", ""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return "written for Linux on x86-64", ""
    if not {"avx2", "fma"} <= set(_processor().split()):
        return "this processor has no AVX2", ""
    if _compiler() is None:
        return "no C++ compiler", "install g++, with the system's package manager"
    return None


def compile_failure() -> tuple[str, str] | None:
    """Why the kernels could not be compiled, and a remedy; None if they can be."""
    try:
        _built("native", _compiler() or "c++")
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", b"") or b""
        lines = said.decode(errors="replace").strip().splitlines() or [str(error)]
        return f"the C++ compiler failed: {lines[0][:200]}", "set CXX to another compiler"
    except OSError as error:
        folder = cache_folder() / "native"
        return (
            f"{folder} can't be written ({error.strerror})",
            "free some space, or set OUTRIDER_CACHE to another folder",
        )
    return None


def _compiled(name: str, *defines: str) -> Path | None:
    """The path of the compiled library, built if necessary; None if compilation fails."""
    compiler = _compiler()
    try:
        return None if compiler is None else _built(name, compiler, *defines)
    except (OSError, subprocess.SubprocessError):
        return None


def _built(name: str, compiler: str, *defines: str) -> Path:
    """The same; raises the reason for which it fails."""
    source = Path(__file__).parent / "csrc" / f"{name}.cpp"
    text = b"".join(path.read_bytes() for path in (source, *sorted(source.parent.glob("*.h"))))
    kind = "x86-64-v3" if _setting() == "avx2" else "native"
    digest = hashlib.sha256(text + f"{kind} {_processor()} {compiler}{' '.join(defines)}".encode()).hexdigest()[:16]
    found = cache_folder() / "native" / f"{name}-{digest}.so"
    if _intact(found):
        return found
    found.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=found.parent, suffix=".partial") as scratch:
        # OpenMP is not linked: it is found in torch's copy, so that both share one team of threads
        parts = [f"{scratch}/native.o", f"{scratch}/native.so"]
        flags = ["-O3", f"-march={kind}", "-fPIC", "-fopenmp", "-w", "-c", *defines, str(source), "-o", parts[0]]
        for arguments in (flags, ["-shared", parts[0], "-o", parts[1]]):
            subprocess.run([compiler, *arguments], check=True, capture_output=True, timeout=600)
        library = Path(parts[1])
        library.write_bytes(_sealed(library.read_bytes()))
        os.replace(library, found)
    return found


def _sealed(code: bytes) -> bytes:
    """A library with its hash behind it, which the loader does not read."""
    return code + hashlib.sha256(code).digest()


def _intact(path: Path) -> bool:
    """Whether a library is there whole: one cut short would kill the process that loads it."""
    try:
        whole = path.read_bytes()
    except OSError:
        return False
    return whole == _sealed(whole[: -hashlib.sha256().digest_size])


def opened(name: str, *defines: str) -> ctypes.CDLL | None:
    """A file of `csrc` as a library, compiled with these -D flags; None if the kernels are unavailable."""
    path = None if hindrance() else _compiled(name, *defines)
    try:
        return None if path is None else ctypes.CDLL(str(path))
    except OSError:
        return None


@functools.cache
def library() -> ctypes.CDLL | None:
    """The main kernels with their argument types declared; None if unavailable."""
    found = opened("native")
    if found is None:
        return None
    found.outrider_work.restype = found.outrider_product_work.restype = found.outrider_attend_work.restype = c_int64
    found.outrider_attend_work.argtypes, found.outrider_attend.restype = [c_int32, c_int64, c_int32, c_int32], None
    found.outrider_attend.argtypes = [*([c_void_p] * 5), *([c_int64] * 3), *([c_int32] * 7), c_void_p]
    found.outrider_work.argtypes = [c_void_p, c_int32, c_int64, c_int32]
    found.outrider_product_work.argtypes = [c_void_p, c_int32, c_int32]
    found.outrider_run.argtypes = [c_void_p, c_void_p, c_void_p]
    found.outrider_run.restype = found.outrider_product.restype = found.outrider_few.restype = None
    found.outrider_normed.restype = None
    found.outrider_normed.argtypes = [c_void_p, c_void_p, c_int32, c_int32, c_float, c_void_p]
    found.outrider_few.argtypes = [*([c_void_p] * 4), *([c_int32] * 4)]
    found.outrider_largest.argtypes = [c_void_p, c_int64, c_int64, *([c_int32] * 4), c_void_p, c_void_p, c_int32]
    found.outrider_masked.argtypes, found.outrider_masked.restype = [*([c_void_p] * 3), c_int64, c_int32], None
    found.outrider_divergence.argtypes = [*([c_void_p] * 4), *([c_int32] * 3)]
    found.outrider_largest.restype = found.outrider_divergence.restype = None
    found.outrider_grow.argtypes, found.outrider_grow.restype = [c_void_p] * 4, c_int32
    found.outrider_draw.argtypes, found.outrider_draw.restype = [c_void_p] * 4, c_int32
    found.outrider_highest.argtypes, found.outrider_highest.restype = [c_void_p, c_void_p, c_int32, c_int32], None
    found.outrider_draw_tree.argtypes, found.outrider_draw_tree.restype = [c_void_p] * 5, None
    found.outrider_draw_heads.argtypes, found.outrider_draw_heads.restype = [c_void_p] * 2, None
    found.outrider_drawn.argtypes, found.outrider_drawn.restype = [*([c_void_p] * 4), c_int32, c_int32, c_float], None
    found.outrider_round.argtypes = [c_void_p, c_int64, c_void_p, c_int32, *([c_void_p] * 3), c_int32]
    found.outrider_tile.argtypes = [*([c_void_p] * 4), c_int64, c_int64, c_int32, c_int32]
    found.outrider_round.restype = found.outrider_tile.restype = None
    found.outrider_product.argtypes = [c_void_p, c_void_p, c_void_p, c_int32, c_int32, c_int32, c_void_p]
    return found if found.outrider_ready(1) else None


def build_id() -> str:
    """A short id of the kernels in use ("torch" without any); timings made with other kernels do not apply."""
    code = library()
    return "torch" if code is None else Path(code._name).stem.rpartition("-")[2][:6]


_local = threading.local()


def work(size: int) -> int:
    """The address of this thread's scratch memory of at least `size` bytes; valid until the next larger request."""
    space: Tensor | None = getattr(_local, "space", None)
    if space is None or len(space) < size:
        space = _local.space = torch.empty(size * 5 // 4, dtype=torch.uint8)
    return space.data_ptr()


def _in_huge_pages(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Uninitialised memory in huge pages, next to earlier ones, where the system supports them: a pass reads all
    weights, and huge pages save TLB misses."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=dtype)
    size = math.prod(shape) * dtype.itemsize
    room: Tensor | None = getattr(_local, "room", None)
    if room is None or len(room) < size:
        pages = mmap.mmap(-1, max(size, _ROOM), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        room = torch.frombuffer(pages, dtype=torch.uint8)
    _local.room = room[-(-size // _ALIGNED) * _ALIGNED :]
    return room[:size].view(dtype).view(*shape)


def tiles(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> bool:
    """Whether weights of this shape can be stored in tiles on this machine."""
    if dtype != torch.bfloat16 or device.type != "cpu" or shape[0] % _OUTPUTS or shape[1] % GROUP:
        return False
    return library() is not None


def streams(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `few` is available for these weights."""
    return dtype == torch.float32 and device.type == "cpu" and library() is not None


def few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [N, in] -> [N, out] in 32 bits, for N so small that reading the weights takes most of the time."""
    code, x = library(), x.contiguous()
    assert code is not None
    count, (outputs, inputs) = x.shape[0], weight.shape
    out = torch.empty(count, outputs)
    addresses = weight.data_ptr(), at(bias), x.data_ptr(), out.data_ptr()
    code.outrider_few(*addresses, count, outputs, inputs, torch.get_num_threads())
    return out


def largest(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest values of rows [A, B, size] in 32 bits and their indices, largest first, ties by index. Each
    row must be contiguous."""
    code = library()
    assert code is not None
    outer, inner, size = x.shape
    values, places = torch.empty(outer, inner, count), torch.empty(outer, inner, count, dtype=torch.long)
    where = values.data_ptr(), places.data_ptr(), torch.get_num_threads()
    if outer and inner and count:
        code.outrider_largest(x.data_ptr(), x.stride(0), x.stride(1), outer, inner, size, count, *where)
    return values, places


def masked(logits: Tensor, bits: Tensor) -> Tensor:
    """32-bit logits [..., V] with -inf where bits [..., ceil(V / 32)] are 0; a row of which nothing else would be left
    stays as it is."""
    code, logits, bits = library(), logits.contiguous(), bits.contiguous()
    assert code is not None and bits.shape == (*logits.shape[:-1], -(-logits.shape[-1] // 32))
    result, size = torch.empty_like(logits), logits.shape[-1]
    code.outrider_masked(logits.data_ptr(), bits.data_ptr(), result.data_ptr(), logits.numel() // max(size, 1), size)
    return result


def drawn(logits: Tensor, uniforms: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """Tokens [N] drawn from 32-bit logits [N, V] with uniforms [N], and their distributions [N, V]."""
    code, logits, uniforms = library(), logits.contiguous(), uniforms.double().contiguous()
    assert code is not None and logits.dtype == torch.float32
    tokens, probs = torch.empty(len(logits), dtype=torch.long), torch.empty_like(logits)
    where = logits.data_ptr(), uniforms.data_ptr(), probs.data_ptr(), tokens.data_ptr()
    code.outrider_drawn(*where, *logits.shape, temperature)
    return tokens, probs


def highest(logits: Tensor) -> Tensor:
    """The highest probability [N] of each row of 32-bit logits [N, V] at temperature 1."""
    code, logits = library(), logits.contiguous()
    assert code is not None and logits.dtype == torch.float32
    found = torch.empty(len(logits))
    code.outrider_highest(logits.data_ptr(), found.data_ptr(), *logits.shape)
    return found


def divergence(z: Tensor, log_p: Tensor) -> tuple[Tensor, Tensor]:
    """KL divergences sum p (log p - log softmax(z)) [N] for 16-bit logits z [N, V] and 32-bit log_p, V a multiple of
    16; and their gradients softmax(z) - p in 16 bits."""
    code, z, log_p = library(), z.contiguous(), log_p.contiguous()
    assert code is not None
    each, back = torch.empty(len(z)), torch.empty_like(z)
    where = z.data_ptr(), log_p.data_ptr(), each.data_ptr(), back.data_ptr()
    code.outrider_divergence(*where, *z.shape, torch.get_num_threads())
    return each, back


def rounded(weight: Tensor, shrinks: Sequence[float]) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [out, in] in bfloat16 as integers 0 to 15, and the scales and offsets [out, in / 32] of their groups:
    those with the smallest error whose range is one of these parts of the group's."""
    code, weight = library(), weight.contiguous()
    assert code is not None
    ints, tries = torch.empty(weight.shape, dtype=torch.uint8), torch.tensor(shrinks)
    scales, offsets = (torch.empty(len(weight), weight.shape[1] // GROUP, dtype=weight.dtype) for _ in range(2))
    where = ints.data_ptr(), scales.data_ptr(), offsets.data_ptr(), torch.get_num_threads()
    code.outrider_round(weight.data_ptr(), scales.numel(), tries.data_ptr(), len(tries), *where)
    return ints, scales, offsets


class Tiled:
    """A linear layer with weights in tiles (see csrc/layout.h): `numbers` in 16 bits, or integers of 8 bits with
    scales, or of 4 bits with scales and offsets. `rounds`: its inputs may be rounded, as those of 4-bit weights are."""

    def __init__(
        self,
        numbers: Tensor,
        scales: Tensor | None,
        offsets: Tensor | None,
        bias: Tensor | None,
        *,
        rounds: bool = False,
    ) -> None:
        self.bits = 16 if scales is None else 8 if offsets is None else 4
        self.rounds = rounds and self.bits == 8
        self.bias, self.shape = bias, numbers.shape
        rows, columns = self.shape
        size = columns // GROUP, *((_TILE4,) if self.bits == 4 else (GROUP // 2, _OUTPUTS, 2))
        self._tiles = _in_huge_pages((rows // _OUTPUTS, *size), torch.uint8 if self.bits == 4 else numbers.dtype)
        groups = [part.bfloat16().contiguous() for part in (scales, offsets) if part is not None and self.bits == 4]
        given, code = [numbers.contiguous(), *(groups or (None, None)), self._tiles], library()
        assert code is not None
        code.outrider_tile(*map(at, given), rows // _OUTPUTS, columns, self.bits, torch.get_num_threads())
        self._scales = scales.float().contiguous() if self.bits == 8 and scales is not None else None
        self._bias = None if bias is None else bias.float().contiguous()
        self.point()
        kept = [part for part in (self._tiles, self._scales, self._bias) if part is not None]
        self.weight_bytes = sum(part.numel() * part.element_size() for part in kept)

    def first(self, rows: int) -> Tiled:
        """The layer's first outputs, which share its weights; whole tiles of them."""
        made = copy.copy(self)
        made.shape = torch.Size((rows, self.shape[1]))
        made._tiles = self._tiles[: rows // _OUTPUTS]
        made._scales, made._bias, made.bias = (
            None if part is None else part[:rows] for part in (self._scales, self._bias, self.bias)
        )
        made.point()
        made.weight_bytes = self.weight_bytes * rows // self.shape[0]
        return made

    def point(self) -> None:
        """Set the addresses in the kernels' struct; call again after moving the weights."""
        addresses = (at(part) for part in (self._tiles, self._scales, self._bias))
        self.matrix = Matrix(*addresses, *self.shape, self.bits, self.rounds)
        self._address = ctypes.addressof(self.matrix)

    @property
    def weight(self) -> Tensor:
        rows, columns = self.shape
        blocks, depth = rows // _OUTPUTS, columns // GROUP
        numbers = self._tiles.view(blocks, depth, -1)
        scale = offset = None
        if self.bits == 4:
            both = numbers[:, :, 256:].contiguous().view(torch.bfloat16).view(blocks, depth, 2, 1, _OUTPUTS, 1)
            scale, offset = both[:, :, 0], both[:, :, 1]
            packed = numbers[:, :, :256].view(blocks, depth, GROUP // 4, 1, GROUP)
            numbers = torch.cat([packed & 15, packed >> 4], 3).bfloat16() - 8
        elif self._scales is not None:
            scale = self._scales.view(blocks, 1, 1, _OUTPUTS, 1)
        whole = numbers.reshape(blocks, depth, GROUP // 2, _OUTPUTS, 2).float()
        if scale is not None:
            whole = whole * scale + (0 if offset is None else offset.float())
        return whole.permute(0, 3, 1, 2, 4).reshape(rows, columns).bfloat16()

    def __call__(self, x: Tensor) -> Tensor:
        return self.product(x, torch.bfloat16)

    def product(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        """x [N, in] -> [N, out] in bfloat16 or float32."""
        x = x.to(torch.bfloat16).contiguous()
        out = torch.empty(len(x), self.shape[0], dtype=dtype)
        code, threads = library(), torch.get_num_threads()
        assert code is not None
        if len(x):
            space = work(code.outrider_product_work(self._address, len(x), threads))
            wide = dtype == torch.float32
            code.outrider_product(self._address, x.data_ptr(), out.data_ptr(), len(x), wide, threads, space)
        return out


def at(part: Tensor | None) -> int | None:
    """The tensor's address."""
    return None if part is None else part.data_ptr()
