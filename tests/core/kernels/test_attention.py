"""Attention in the compiled kernels: what torch computes, and the same for a row in any batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.kernels import native
from outrider.core.kernels.attention import attention, batch_invariant

needs_code = pytest.mark.skipif(native.library() is None, reason="no compiler, or no AVX2")


def attended(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    found = batch_invariant(query, key, value, mask)
    assert found is not None
    return found


@needs_code
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("rows", "heads", "tokens", "group", "dim", "columns"),
    [(3, 3, 4, 3, 64, 17), (2, 2, 20, 1, 32, 100), (2, 1, 5, 20, 64, 70), (4, 3, 16, 3, 64, 300), (2, 2, 1, 4, 128, 5)],
)
def test_a_row_is_the_same_in_any_batch_and_behind_any_padding(
    ways: str, rows: int, heads: int, tokens: int, group: int, dim: int, columns: int, masked: bool
) -> None:
    torch.manual_seed(0)
    query = torch.randn(rows, heads, tokens * group, dim).bfloat16()
    store = torch.randn(rows, 2 * heads, columns + 9, dim).bfloat16()[:, :, :columns]
    key, value = store[:, :heads], store[:, heads:]
    mask = torch.rand(rows, tokens, columns) < 0.7 if masked else None
    if mask is not None:
        mask[:, :, 0] = True
    found = attended(query, key, value, mask)
    bias = None if mask is None else mask.repeat_interleave(group, 1)[:, None]
    wanted = attention(query.float(), key.float(), value.float(), bias)
    assert (found - wanted).abs().max() < 0.02
    everything = torch.ones(1, tokens, columns, dtype=torch.bool)
    for row in range(rows):
        own = slice(row, row + 1)
        alone = query[own], key[own], value[own]
        seen = everything if mask is None else mask[own]
        assert torch.equal(attended(*alone, None if mask is None else seen)[0], found[row])
        more = [torch.cat([part, torch.randn(1, heads, 13, dim).bfloat16()], 2) for part in alone[1:]]
        assert torch.equal(attended(query[own], *more, F.pad(seen, (0, 13)))[0], found[row])


def test_it_is_left_to_torch_where_the_kernels_cant() -> None:
    for dtype, dim in ((torch.float32, 32), (torch.bfloat16, 48)):
        parts = [torch.zeros(1, 1, 2, dim, dtype=dtype)] * 3
        assert batch_invariant(*parts, None) is None
