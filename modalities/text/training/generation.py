"""Plain decoding of many prompts at once, for training data: hundreds of rows on an accelerator without a host wait per
token.

Prompts are padded on the left, so that all rows write the same column of one store; finished rows are dropped now and
then. There are no drafts, no records and no rules. Independent of tokenizers and files."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import PassLayout

_COLUMNS = 64  # columns that a pass reads are rounded up to a multiple of it
_LOOK = 16  # steps between two looks at which rows are finished
_SHRINK = 0.7  # rows are dropped when at most this share is unfinished
_PREFILL_TOKENS = 1 << 15  # prompt tokens of a pass, padding included
_LIKELIEST = 128  # tokens that are drawn from at a temperature


def draws_simply(sampling: Sampling) -> bool:
    """Whether `continue_rows` can draw so: at a temperature and within top_p."""
    return not sampling.remembers and not sampling.entropy_aware and not sampling.top_k and not sampling.min_p


@torch.no_grad()
def continue_rows(
    decoder: Decoder, prompts: Sequence[Sequence[int]], sampling: Sampling, limit: int, *, seed: int = 0
) -> list[list[int]]:
    """Continue each prompt by at most `limit` tokens, the end token included: the likeliest ones, or tokens drawn at a
    temperature (from the `_LIKELIEST` tokens, within top_p)."""
    if not prompts or limit < 1:
        return [[] for _ in prompts]
    network, device = decoder.network, decoder.device
    longest = max(map(len, prompts))
    size = -(-(longest + limit) // _COLUMNS) * _COLUMNS
    network.ensure_positions(size)
    ids = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts], device=device)
    pad = torch.tensor([longest - len(prompt) for prompt in prompts], device=device)
    cfg = network.config
    store = torch.zeros(
        cfg.layers, len(prompts), 2 * cfg.kv_heads, size, cfg.head_dim, dtype=network.dtype, device=device
    )
    ends = torch.tensor(sorted(sampling.end), device=device, dtype=torch.long)
    generator = torch.Generator(device).manual_seed(seed)
    last = _prefill(network, store, ids, pad)
    written = torch.full((len(prompts), limit), -1, device=device)
    rows = torch.arange(len(prompts), device=device)
    live = torch.ones_like(rows, dtype=torch.bool)
    for step in range(limit):
        token = _chosen(network.logits(last), sampling, generator)
        written[rows, step] = torch.where(live, token, -1)
        live = live & ~torch.isin(token, ends)
        if step + 1 == limit:
            break
        if step % _LOOK == _LOOK - 1:
            left = int(live.sum())
            if not left:
                break
            if left <= _SHRINK * len(rows):
                rows, pad, token, store = rows[live], pad[live], token[live], store[:, live]
                live = live[live]
        last = _step(network, store, token, pad, longest + step)
    return [[token for token in row if token >= 0] for row in written.tolist()]


def _prefill(network: Network, store: Tensor, ids: Tensor, pad: Tensor) -> Tensor:
    """Read the prompts; returns the normed states [B, D] of their last tokens."""
    count = ids.shape[1]
    column = torch.arange(count, device=ids.device)
    size, last = max(_PREFILL_TOKENS // count, 1), []
    for start in range(0, len(ids), size):
        rows = slice(start, start + size)
        before = pad[rows, None, None]
        mask = (column <= column[:, None]) & (column >= before) | (column == column[:, None])
        positions = (column - pad[rows, None]).clamp(min=0)
        part = store[:, rows]
        states = network.run(network.embed(ids[rows]), part, PassLayout(positions, count, mask, 0))
        ends = states.view(part.shape[1], count, -1)[:, -1].contiguous()
        last.append(network.final_norm(ends, len(ends))[:, 0])
    return torch.cat(last)


def _step(network: Network, store: Tensor, token: Tensor, pad: Tensor, place: int) -> Tensor:
    """Read one token [B] in column `place`; returns normed states [B, D]."""
    columns = -(-(place + 1) // _COLUMNS) * _COLUMNS
    column = torch.arange(columns, device=token.device)
    mask = ((column <= place) & (column >= pad[:, None]))[:, None]
    layout = PassLayout((place - pad)[:, None], columns, mask, place)
    return network.final_norm(network.run(network.embed(token[:, None]), store, layout), len(token))[:, 0]


def _chosen(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """The next tokens [B] from logits [B, V]."""
    if sampling.greedy:
        return logits.argmax(-1)
    top, tokens = logits.float().topk(min(_LIKELIEST, logits.shape[-1]))
    probs = (top / sampling.temperature).softmax(-1)
    if sampling.top_p < 1:
        probs = probs * (probs.cumsum(-1) - probs < sampling.top_p)
    return tokens.gather(1, torch.multinomial(probs, 1, generator=generator))[:, 0]
