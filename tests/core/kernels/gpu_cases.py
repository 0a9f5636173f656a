"""Random cases of the kernels in Triton, each with what torch computes in 64 bits from the same numbers."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from torch import Tensor

from outrider.core.engine.kv_cache.page_tables import gathered
from outrider.core.kernels.gpu.norm import add_norm_
from outrider.core.kernels.gpu.products import int4_product, int8_product, swiglu, swiglu_product
from outrider.core.kernels.gpu.rotary import rotate_and_write_
from outrider.core.kernels.gpu.sampling import top_k, top_p
from outrider.core.kernels.gpu.tree_attention import counters, tree_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
Pairs = list[tuple[Tensor, Tensor]]  # results and what they should be
Case = Callable[["Draw"], Pairs]


class Draw:
    """Random sizes and numbers of one case."""

    def __init__(self, seed: int, dtype: torch.dtype, device: str = "cpu", large: bool = False) -> None:
        self.random, self.dtype, self.device, self.large = random.Random(seed), dtype, device, large
        self.generator = torch.Generator(device).manual_seed(seed)

    def size(self, most: int, least: int = 1) -> int:
        return self.random.randint(least, most * 16 if self.large else most)

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.randn(*shape, generator=self.generator, device=self.device)
        return made.to(dtype or self.dtype)


def in_pages(draw: Draw, store: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """A layer's store in pages of this many slots in random order, some of them of nobody, and the table of pages."""
    rows, heads, columns, dim = store.shape
    count = -(-columns // size)
    pages = draw.normal(rows * count + 2, heads, size, dim)
    table = torch.randperm(len(pages), generator=draw.generator, device=draw.device)[: rows * count].view(rows, count)
    whole = torch.nn.functional.pad(store, (0, 0, 0, count * size - columns)).unflatten(2, (count, size))
    pages[table] = whole.transpose(1, 2)
    return pages, table.to(torch.int32)


def norm_case(draw: Draw, rows: int | None = None, size: int | None = None) -> Pairs:
    rows, size = rows or draw.size(4), size or draw.size(300)
    wide = torch.float32 if draw.random.random() < 0.5 else draw.dtype
    x, weight = draw.normal(rows, size, dtype=wide), draw.normal(size, dtype=wide)
    delta = draw.normal(rows, size) if draw.random.random() < 0.7 else None
    expected = x.double() + (0 if delta is None else delta.double())
    out = torch.empty(rows, size, dtype=draw.dtype, device=draw.device)
    add_norm_(x, delta, weight, 1e-5, out)
    normed = expected * (expected.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    return [(x, expected), (out, normed)]


def rotary_case(draw: Draw, heads: int | None = None, kv: int | None = None, dim: int | None = None) -> Pairs:
    rows, count, kv = draw.size(2), draw.size(3), kv or draw.random.randint(1, 2)
    heads, dim = heads or kv * draw.random.randint(1, 3), dim or 2 * draw.random.randint(4, 128)
    columns, known = count + draw.size(9), 40
    qkv, angle = draw.normal(rows * count, (heads + 2 * kv) * dim), draw.normal(known, dim // 2, dtype=torch.float32)
    cos, sin = (
        part.to(draw.dtype) for part in (torch.cat([angle.cos()] * 2, 1), torch.cat([-angle.sin(), angle.sin()], 1))
    )
    norm = draw.normal(heads + kv, dim) if draw.random.random() < 0.5 else None
    store = torch.zeros(rows, 2 * kv, columns, dim, dtype=draw.dtype, device=draw.device)
    positions = torch.tensor(
        [[draw.random.randrange(known + 3) for _ in range(count)] for _ in range(rows)], device=draw.device
    )
    first = draw.random.randint(0, columns - count)
    slots = torch.stack(
        [torch.randperm(columns, generator=draw.generator, device=draw.device)[:count] for _ in range(rows)]
    )
    fixed = draw.random.random() < 0.5
    split = qkv.double().view(rows, count, heads + 2 * kv, dim)
    turned = split[:, :, : heads + kv]
    if norm is not None:
        turned = turned * (turned.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * norm.double()
    at = positions.clamp(max=known - 1)
    turned = turned * cos.double()[at][:, :, None] + turned.roll(dim // 2, -1) * sin.double()[at][:, :, None]
    paged = draw.random.random() < 0.5
    pages, table = in_pages(draw, store, 4) if paged else (store, None)
    result = rotate_and_write_(qkv, pages, cos, sin, positions, first if fixed else slots, norm, 1e-6, table)
    if table is not None:
        store = gathered(pages[None], table)[0, :, :, :columns]
    into = torch.zeros(store.shape, dtype=torch.float64, device=draw.device)
    places = torch.arange(first, first + count, device=draw.device).expand(rows, -1) if fixed else slots
    new = torch.cat([turned[:, :, heads:], split[:, :, heads + kv :]], 2)
    into[torch.arange(rows, device=draw.device)[:, None], :, places] = new
    queries = result.view(rows, count, -1, dim)[:, :, :heads]
    return [(queries, turned[:, :, :heads]), (store, into)]


def attention_case(
    draw: Draw, heads: int | None = None, kv: int | None = None, dim: int | None = None, columns: int | None = None
) -> Pairs:
    rows, count, kv = draw.random.randint(1, 2), draw.size(5), kv or draw.random.randint(1, 2)
    heads, dim = heads or kv * draw.random.randint(1, 4), dim or 2 * draw.random.randint(4, 128)
    columns = columns or count + draw.size(150)
    qkv = draw.normal(rows * count, (heads + 2 * kv) * dim)
    store = draw.normal(2, rows, 2 * kv, columns + 3, dim)[1]
    done = counters(torch.device(draw.device))
    kind = draw.random.choice(["none", "dense", "tree"])
    seen = torch.ones(rows, count, columns, dtype=torch.bool, device=draw.device)
    mask = entries = None
    if kind == "dense":
        seen = torch.rand(rows, count, columns, generator=draw.generator, device=draw.device) < 0.6
        seen[:, :, 0] = True
        mask = seen
    elif kind == "tree":
        size = draw.random.randint(count, min(columns, count + 3))
        mask = torch.rand(rows, count, size, generator=draw.generator, device=draw.device) < 0.5
        mask[:, range(count), range(count)] = True
        entries = torch.tensor([draw.random.randint(0, columns - size) for _ in range(rows)], device=draw.device)
        slot = torch.arange(columns, device=draw.device)
        after = (slot - entries[:, None])[:, None].expand(rows, count, -1)
        inside = (after >= 0) & (after < size)
        seen = (after < 0) | (inside & mask.gather(2, after.clamp(0, size - 1)))
    splits = draw.random.choice([None, 1, 2, 4, 8])
    pages, table = in_pages(draw, store, 64) if draw.random.random() < 0.5 else (store, None)
    out = tree_attention(qkv, pages, done, columns, mask, entries, table, None, splits)
    again = tree_attention(qkv, pages, done, columns, mask, entries, table, None, splits)  # the counters are 0 again
    query = qkv.double().view(rows, count, -1, dim)[:, :, :heads].transpose(1, 2)
    key, value = store[:, :, :columns].double().repeat_interleave(heads // kv, 1).split(heads, 1)
    scores = (query @ key.transpose(2, 3) / math.sqrt(dim)).masked_fill(~seen[:, None], -math.inf)
    expected = (scores.softmax(-1) @ value).transpose(1, 2).reshape(len(qkv), -1)
    return [(out, expected), (again, expected)]


def swiglu_case(draw: Draw, rows: int | None = None, middle: int | None = None) -> Pairs:
    up, gate = (draw.normal(rows or draw.size(4), middle or draw.size(300)) for _ in range(2))
    up = draw.normal(*gate.shape)
    expected = up.double() * torch.nn.functional.silu(gate.double())
    return [(swiglu(torch.cat([up, gate], 1)), expected)]


def gated_case(draw: Draw, rows: int | None = None, middle: int | None = None, size: int | None = None) -> Pairs:
    rows, middle, size = rows or draw.random.randint(1, 64), middle or draw.size(60), size or draw.size(200)
    x, weight = draw.normal(rows, size), (draw.normal(2 * middle, size, dtype=torch.float32) / size**0.5).to(draw.dtype)
    bias = draw.normal(2 * middle) if draw.random.random() < 0.5 else None
    up, gate = torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double()).chunk(
        2, 1
    )
    return [(swiglu_product(x, weight, bias), up * torch.nn.functional.silu(gate))]


def int8_case(draw: Draw, rows: int | None = None, outputs: int | None = None, size: int | None = None) -> Pairs:
    rows, outputs, size = rows or draw.random.randint(1, 64), outputs or draw.size(60), size or draw.size(200)
    x, bias = draw.normal(rows, size), draw.normal(outputs) if draw.random.random() < 0.5 else None
    ints = torch.randint(-127, 128, (outputs, size), generator=draw.generator, device=draw.device).to(torch.int8)
    scales = (draw.normal(outputs, dtype=torch.float32).abs() / (73 * size**0.5)).to(draw.dtype)
    expected = x.double() @ (ints.double() * scales.double()[:, None]).T + (0 if bias is None else bias.double())
    return [(int8_product(x, ints, scales, bias), expected)]


def int4_case(draw: Draw, rows: int | None = None, outputs: int | None = None, groups: int | None = None) -> Pairs:
    rows, outputs, groups = rows or draw.random.randint(1, 64), outputs or draw.size(60), groups or draw.size(6)
    group = draw.random.choice([16, 32])
    size = groups * group
    x, bias = draw.normal(rows, size), draw.normal(outputs) if draw.random.random() < 0.5 else None
    ints = torch.randint(0, 16, (outputs, size), generator=draw.generator, device=draw.device).to(torch.uint8)
    scales, offsets = (
        (draw.normal(outputs, groups, dtype=torch.float32) / (4 * size**0.5)).to(draw.dtype) for _ in range(2)
    )
    weight = (ints.double() - 8) * scales.double().repeat_interleave(group, 1) + offsets.double().repeat_interleave(
        group, 1
    )
    expected = x.double() @ weight.T + (0 if bias is None else bias.double())
    nibbles = ints[:, ::2] | ints[:, 1::2] << 4
    return [(int4_product(x, nibbles, scales, offsets, bias), expected)]


def top_k_case(draw: Draw, rows: int | None = None, size: int | None = None) -> Pairs:
    rows, size = rows or draw.size(3), size or draw.size(3000, 2)
    logits = draw.normal(rows, size) * 3
    count = draw.random.randint(1, min(size, 300))
    order = logits.double().sort(dim=-1, descending=True, stable=True).indices[:, :count]
    kept = torch.zeros(rows, size, dtype=torch.bool, device=draw.device).scatter(1, order, True)
    found = top_k(logits, count)
    return [((found > -torch.inf).double(), kept.double()), (found.where(kept, 0), logits.double().where(kept, 0))]


def top_p_case(draw: Draw, rows: int | None = None, size: int | None = None) -> Pairs:
    rows, size = rows or draw.size(3), size or draw.size(3000, 2)
    probs = (draw.normal(rows, size, dtype=torch.float32) * draw.random.choice([0.0, 1.0, 3.0])).softmax(-1)
    share = draw.random.choice([0.1, 0.5, 0.9, 0.95, 0.99])
    ordered, order = probs.double().sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1) - ordered
    found = top_p(probs, share)
    taken = found.gather(1, order) > 0
    clear = (before - share).abs() > 1e-5  # rounding decides the others
    return [
        (torch.where(clear, taken, False).double(), (clear & (before < share)).double()),
        (torch.where(taken, found.gather(1, order), 0), torch.where(taken, ordered, 0)),
        (taken.int().diff(dim=1).clamp(min=0).double(), torch.zeros_like(before[:, 1:])),  # a prefix of the order
    ]


CASES: dict[str, Case] = {
    "norm": norm_case,
    "rotary": rotary_case,
    "attention": attention_case,
    "swiglu": swiglu_case,
    "gated product": gated_case,
    "int8 product": int8_case,
    "int4 product": int4_case,
    "top-k": top_k_case,
    "top-p": top_p_case,
}


def worst(name: str, pairs: Pairs, dtype: torch.dtype) -> float:
    """The largest error, as a multiple of the tolerance of its value."""
    tolerance, result = TOLERANCE[dtype], 0.0
    for found, expected in pairs:
        assert found.shape == expected.shape, name
        error = (found.double() - expected).abs() / (tolerance * (1 + expected.abs()))
        assert not error.isnan().any(), name
        result = max(result, float(error.max()) if error.numel() else 0.0)
    return result
