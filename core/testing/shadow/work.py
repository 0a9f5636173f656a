"""The bytes that a kernel reads and writes at least, and its operations in products, from the torch call that launches
it. Lower bounds: a kernel that reads its inputs twice counts once."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from outrider.core.testing.shadow.runtime import tensors_in

_PICKING = frozenset(["__getitem__", "index_select", "gather", "embedding"])  # read as much as they write
_PLACING = frozenset(["__setitem__", "index_put_", "scatter_", "index_copy_"])  # write as much as they read
_PRODUCTS = frozenset(["matmul", "__matmul__", "mm", "bmm", "addmm", "baddbmm"])


class Work(NamedTuple):
    """Of a kernel, or of several."""

    bytes: int = 0
    flops: int = 0

    def and_also(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.flops + other.flops)


def work_of(name: str, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """The work of a call by its name, from its arguments and result."""
    given, made = tensors_in((args, kwargs)), tensors_in(out)
    if name in _PICKING:
        return Work(2 * sum(map(_size, made)))
    if name in _PLACING:
        return Work(2 * _size(given[-1]))
    known = {id(each) for each in given}
    moved = sum(map(_size, given)) + sum(_size(each) for each in made if id(each) not in known)
    return Work(moved, _flops(name, given, made))


def _size(tensor: Tensor) -> int:
    """The bytes of a tensor; repeated ones count once."""
    return min(tensor.nbytes, tensor.untyped_storage().nbytes())


def _flops(name: str, given: list[Tensor], made: list[Tensor]) -> int:
    if name == "linear":
        return 2 * given[0].numel() * given[1].shape[0]
    if name == "scaled_dot_product_attention":
        return 4 * given[0].numel() * given[1].shape[-2]
    if name in _PRODUCTS:
        return 2 * made[0].numel() * given[-2 if len(given) > 1 else 0].shape[-1]
    return 0
