"""Audits of a KV cache: random drafts and verdicts, and a transformer without a cache to compare with.

A target's logits after any history must equal those of a fresh pass over that history. Independent of how a target
stores its cache.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.engine.network import Network
from outrider.core.tree import Tree

Path = list[int]


def reference(network: Network, tokens: Sequence[int]) -> Tensor:
    """Logits [T, V] after every token of one sequence: keys and values repeated for each query."""
    cfg, count = network.config, len(tokens)
    x = network.embedding[torch.tensor(tokens)]
    rates = 1 / cfg.rope_theta ** (torch.arange(0, cfg.head_dim, 2).float() / cfg.head_dim)
    angles = (torch.arange(count).float()[:, None] * rates).repeat(1, 2)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    future = torch.ones(count, count).triu(1).bool()

    def norm(y: Tensor, weight: Tensor) -> Tensor:
        return y / (y.pow(2).mean(-1, keepdim=True) + cfg.norm_eps).sqrt() * weight

    def rotate(y: Tensor) -> Tensor:
        half = cfg.head_dim // 2
        return y * cos + torch.cat([-y[..., half:], y[..., :half]], -1) * sin

    for layer in network.layers:
        qkv = layer.qkv(norm(x, layer.attention_norm)).view(count, -1, cfg.head_dim).transpose(0, 1)
        qk, value = qkv[: cfg.heads + cfg.kv_heads], qkv[cfg.heads + cfg.kv_heads :]
        if layer.qk_norm is not None:
            qk = norm(qk, layer.qk_norm[:, None])
        qk = rotate(qk)
        key = qk[cfg.heads :].repeat_interleave(cfg.heads // cfg.kv_heads, 0)
        value = value.repeat_interleave(cfg.heads // cfg.kv_heads, 0)
        logits = qk[: cfg.heads] @ key.mT / math.sqrt(cfg.head_dim)
        attended = torch.softmax(logits.masked_fill(future, -math.inf), -1) @ value
        x = x + layer.out(attended.transpose(0, 1).flatten(1))
        up, gate = layer.up_gate(norm(x, layer.mlp_norm)).chunk(2, -1)
        x = x + layer.down(torch.nn.functional.silu(gate) * up)
    return norm(x, network.norm) @ network.head.weight.T


def paths(parents: Sequence[int]) -> list[Path]:
    """The nodes from the root's child down to each node."""
    paths_down: list[Path] = []
    for node, parent in enumerate(parents):
        paths_down.append([*(paths_down[parent] if parent >= 0 else []), node])
    return paths_down


def random_draft(
    rng: random.Random, rows: int, vocabulary: int, max_nodes: int, device: str = "cpu"
) -> tuple[Draft, list[list[int]]]:
    """A draft of up to `max_nodes` nodes with random tokens: a chain or a tree, of one shape for all rows or one each;
    and each row's parents."""
    size = rng.randint(0, max_nodes)
    kind = rng.choice(["chain", "tree", "forest"])
    if kind == "chain":
        parents = [list(range(-1, size - 1))] * rows
        tree = Tree.chain(size, device)
    elif kind == "tree":
        parents = [[rng.randint(-1, node - 1) for node in range(size)]] * rows
        tree = Tree.of(tuple(parents[0]), device)
    else:
        parents = [[rng.randint(-1, node - 1) for node in range(size)] for _ in range(rows)]
        tree = Tree(torch.tensor(parents, dtype=torch.long).view(rows, size).to(device))
    tokens = torch.tensor([[rng.randrange(vocabulary) for _ in range(size)] for _ in range(rows)])
    live = torch.ones(rows, size, dtype=torch.bool, device=device)
    return Draft.guess(tokens.view(rows, size).long().to(device), tree, live), parents


def random_verdict(
    rng: random.Random, draft: Draft, parents: list[list[int]], vocabulary: int
) -> tuple[Verdict, Tensor]:
    """A random accepted path and next token in each row, and how many of those tokens [B] are committed."""
    rows, depth = draft.rows, draft.tree.depth
    path = torch.full((rows, depth), -1)
    accepted, counts = [], []
    for row in range(rows):
        chosen = rng.choice([[], *paths(parents[row])])
        path[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.long)
        accepted.append(len(chosen))
        counts.append(rng.choice([len(chosen) + 1, rng.randint(0, len(chosen) + 1)]))
    token = torch.tensor([rng.randrange(vocabulary) for _ in range(rows)])
    zeros = torch.zeros(rows, draft.size)
    parts = path, torch.tensor(accepted), token, token < 0, zeros.bool(), zeros, zeros, zeros
    device = draft.tokens.device
    return Verdict.of([part.to(device) for part in parts]), torch.tensor(counts).to(device)


def emitted(draft: Draft, verdict: Verdict, row: int, count: int) -> list[int]:
    """The first `count` tokens that a verdict emits in one row."""
    chosen = [int(draft.tokens[row, node]) for node in verdict.path[row].tolist() if node >= 0]
    return [*chosen, int(verdict.token[row])][:count]
