"""Drafting by connectionist temporal classification (CTC): more frames than tokens, from which blanks and repeats are
removed.

CTC drafting (arXiv 2412.00061): a small layer emits all frames at once and is trained with the CTC loss, which does not
fix the positions of tokens. Frames are collapsed into fixed guesses before verification, so every exact rule works at
any temperature (the paper's verification is greedy).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import TopKTree
from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, causal, kept
from outrider.core.drafters.trained.lora import adapted
from outrider.core.drafters.tree_shapes import parallel
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import InvalidOption
from outrider.core.rng import CounterRNG
from outrider.core.training.draft_head import Batch, DraftHead
from outrider.core.training.losses import Loss
from outrider.core.tree import Tree


def collapse(frames: Tensor, blank: int, length: int) -> Tensor:
    """Frames [..., F] -> tokens [..., length] without repeats and blanks, padded with -1."""
    starts = (frames != blank) & (frames != F.pad(frames, (1, 0), value=blank)[..., :-1])
    index = torch.where(starts, starts.cumsum(-1) - 1, length).clamp(max=length)
    tokens = torch.full((*frames.shape[:-1], length + 1), -1, dtype=frames.dtype, device=frames.device)
    return tokens.scatter_(-1, index, frames)[..., :length]


class CollapsedTree(TopKTree):
    """Parallel chains: the likeliest frames, and the best alternatives that differ in one frame."""

    def __init__(self, model: Any, *, nodes: int, depth: int, sampling: Sampling | None) -> None:
        self.chains, self.length = max(nodes // depth, 1), depth
        super().__init__(model, tree=parallel(self.chains, depth), sampling=sampling)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        longest = max(min(self.length, int(room.max())), 0)
        if not longest:
            return Draft.empty(len(room), rng.device)
        runner: Any = self.model
        self.bytes_read += runner.weight_bytes
        tokens, belief = runner.draft_head.chains(runner.future_logits(), self.chains, longest)  # [B, M, L], [B, M]
        rows = len(room)
        tree = Tree.of(self.parents[: longest * self.chains], rng.device)
        same = (tokens[:, :, None] == tokens[:, None]).all(-1).tril(-1).any(-1)  # [B, M] equal to an earlier chain
        fits = (tokens >= 0) & ~same[..., None] & (torch.arange(longest, device=tokens.device) < left[:, None, None])
        live = fits.cumprod(-1).bool().transpose(1, 2).reshape(rows, -1)
        flat = tokens.clamp(min=0).transpose(1, 2).reshape(rows, -1)
        return Draft.guess(flat, tree, live, belief.repeat(1, longest))


class CtcFrames(DraftHead):
    """A layer over the committed tokens, started as a copy of the target's last (or that layer with LoRA corrections of
    rank `lora`), then `frames` residual heads that attend to one another in both directions, in a layer with an MLP of
    width `hidden`. A frame is a token or the blank."""

    parallel, cached_layers, draft_kind, taps, drafter_class = True, 1, "tree", ("last",), CollapsedTree
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        frames: int = 8,
        length: int = 5,
        hidden: int = 0,
        lora: int = 0,
        vocabulary: PrefixCache = 0,
    ) -> None:
        super().__init__()
        if not 1 <= length <= frames:
            raise InvalidOption(f"frames={frames}, length={length}: length must be from 1 to frames")
        network = target.network
        self.words = SharedEmbedding(network, vocabulary)
        self.form, self.depth, self.frames = network.config, length, frames
        self.config = {
            "frames": frames,
            "length": length,
            "hidden": hidden,
            "lora": lora,
            "vocabulary": kept(self.words),
        }
        width, eps = self.form.hidden_size, self.form.norm_eps
        self.embedded, self.norm = Norm(width, eps), Norm(width, eps)
        self.fuse = Matrix(2 * width, width)
        self.block = Block(self.form)
        self.block.copy(network.layers[-1])
        adapted(self.block, lora, known=width)
        self.heads = Matrix(width, frames * width, bias=True)
        self.place = nn.Parameter(torch.zeros(frames, width))
        self.mixer = Block(replace(self.form, intermediate_size=hidden or self.form.intermediate_size))
        self.blank = Matrix(width, 1, bias=True)
        self.angles = Angles(self.form)
        with torch.no_grad():
            self.fuse.weight[:, width:] = torch.eye(width)
            self.mixer.attention.out.weight.mul_(0.1)
            self.norm.weight.copy_(network.norm)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        read = torch.cat([self.embedded(self.words.embed(tokens)).to(features.dtype), features], -1)
        states: Tensor = self.block(self.fuse(read), attn_mask)
        return states

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        """[N, D] -> [N, F, D]."""
        states = state[:, None] + F.silu(self.heads(state)).view(len(state), self.frames, -1) + self.place
        order = torch.arange(self.frames, device=state.device)[None]
        mixed: Tensor = self.norm(
            self.mixer(states, AttentionMask(*self.angles(order, self.frames, states.dtype), None))
        )
        return mixed

    def logits(self, states: Tensor) -> Tensor:
        """[..., D] -> [..., R + 1], the blank last."""
        return torch.cat([self.words.logits(states), self.blank(states)], -1)

    def _frame_logits(self, batch: Batch, where: Tensor) -> Tensor:
        """The frames' logits [N, F, R + 1] after the positions `where` [B, T] bool."""
        x = before(batch.taps["last"].to(self.embedded.weight.dtype))
        attn_mask = causal(self.angles, batch, x)
        return self.logits(self.future_states(self.open(x, batch.tokens, attn_mask)[where], attn_mask))

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """The CTC loss of the next tokens, up to the first outside the vocabulary."""
        logs = self._frame_logits(batch, batch.answer).float().log_softmax(-1).transpose(0, 1)
        rows, places = batch.answer.nonzero(as_tuple=True)
        steps = places[:, None] + torch.arange(self.depth, device=places.device)
        clamped = steps.clamp(max=batch.tokens.shape[1] - 1)
        tokens = self.words.local(batch.labels()[rows[:, None], clamped])
        known = batch.answer[rows[:, None], clamped] & (steps == clamped) & (tokens >= 0)
        lengths = known.cumprod(1).sum(1)
        size = torch.full_like(lengths, self.frames)
        losses = F.ctc_loss(
            logs, tokens.clamp(min=0), size, lengths, blank=self.words.count, reduction="none", zero_infinity=True
        )
        return losses.mean() / self.depth if len(losses) else logs.sum() * 0

    def chains(self, logits: Tensor, count: int, length: int) -> tuple[Tensor, Tensor]:
        """The likeliest collapsed chains [B, count, length] of frame logits [B, F, R + 1], padded with -1, and the
        probability of each one's frames [B, count]."""
        values, ids = logits.double().log_softmax(-1).topk(2, -1)  # [B, F, 2]
        best = values[..., 0].sum(1, keepdim=True)
        order = (values[..., 1] - values[..., 0]).topk(min(count - 1, self.frames), 1)
        swap = F.one_hot(order.indices, self.frames).bool()  # [B, M - 1, F]
        other = torch.where(swap, ids[:, None, :, 1], ids[:, None, :, 0])
        every = torch.cat([ids[:, None, :, 0], other], 1)
        value = torch.cat([best, best + order.values], 1).exp()
        if (short := count - every.shape[1]) > 0:
            every, value = F.pad(every, (0, 0, 0, short), value=self.words.count), F.pad(value, (0, short))
        tokens = collapse(every, self.words.count, length)
        ids_ = self.words.vocabulary
        return (tokens if ids_ is None else torch.where(tokens < 0, -1, ids_[tokens.clamp(min=0)])), value

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        hits = torch.zeros(*batch.answer.shape, min(depth, self.depth), dtype=torch.bool, device=batch.tokens.device)
        tokens = self.chains(self._frame_logits(batch, batch.answer), 1, hits.shape[2])[0][:, 0]
        labels = torch.stack([batch.labels(offset + 1) for offset in range(hits.shape[2])], -1)
        hits[batch.answer] = tokens == labels[batch.answer]
        return hits

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)
