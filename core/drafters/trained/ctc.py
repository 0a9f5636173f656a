"""Drafting by connectionist temporal classification (CTC): more frames than tokens, from which blanks and repeats are
removed.

CTC drafting (arXiv 2412.00061): a small layer emits all frames at once and is trained with the CTC loss, which does not
fix the positions of tokens. A prefix beam search sums the frames that collapse into the same tokens; the most probable
prefixes are verified as a tree. They are fixed guesses, so every exact rule works at any temperature (the paper's
verification is greedy).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.model import TopKTree
from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, causal, kept
from outrider.core.drafters.trained.lora import adapted
from outrider.core.drafters.trained.parallel_heads import FutureStates, mixing_form
from outrider.core.drafters.tree_shapes import parallel, rerank
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import InvalidOption
from outrider.core.rng import CounterRNG
from outrider.core.training.draft_head import Batch, DraftHead
from outrider.core.training.losses import Loss
from outrider.core.tree import Tree

_BEAMS, _BEAM_ROWS = 8, 2048  # of the search while validating


def collapse(frames: Tensor, blank: int, length: int) -> Tensor:
    """Frames [..., F] -> tokens [..., length] without repeats and blanks, padded with -1."""
    starts = (frames != blank) & (frames != F.pad(frames, (1, 0), value=blank)[..., :-1])
    index = torch.where(starts, starts.cumsum(-1) - 1, length).clamp(max=length)
    tokens = torch.full((*frames.shape[:-1], length + 1), -1, dtype=frames.dtype, device=frames.device)
    return tokens.scatter_(-1, index, frames)[..., :length]


def prefix_beams(logits: Tensor, length: int, width: int, choices: int = 8) -> tuple[Tensor, Tensor]:
    """The CTC prefix beam search (arXiv 1408.2873): logits of frames [B, F, R + 1], the blank last -> the most probable
    token sequences [B, width, length] that frames collapse into, padded with -1, and their probabilities [B, width] in
    double precision. Each frame is one of its `choices` likeliest tokens, the last token or the blank. Sequences are
    cut at `length`: what follows does not matter."""
    rows, frames, size = logits.shape
    probs = logits.double().softmax(-1)
    chosen = min(choices, size - 1)
    top, ids = probs[..., :-1].topk(chosen, -1)  # [B, F, C]
    device = logits.device
    tokens = torch.full((rows, width, length), -1, dtype=torch.long, device=device)
    count = torch.zeros(rows, width, dtype=torch.long, device=device)
    after_blank, after_token = (torch.zeros(rows, width, dtype=torch.double, device=device) for _ in range(2))
    after_blank[:, 0] = 1.0  # the empty sequence; beams without probability are unused
    places = torch.arange(length, device=device)
    for frame in range(frames):
        both, full = after_blank + after_token, count == length
        last = tokens.gather(2, (count - 1).clamp(min=0)[..., None])[..., 0]
        repeat = torch.where(count > 0, probs[:, frame].gather(1, last.clamp(min=0)), 0.0)
        same = ids[:, frame, None] == last[..., None]  # [B, W, C]
        grown = torch.where(same, after_blank[..., None], both[..., None]) * top[:, frame, None]
        grown = torch.where(full[..., None], 0.0, grown)
        longer = torch.where(
            (places == count[..., None])[:, :, None], ids[:, frame, None, :, None], tokens[:, :, None]
        )  # [B, W, C, L]
        stays = torch.where(full, both, both * probs[:, frame, -1:])
        repeats = torch.where(full, 0.0, after_token * repeat)
        equal = (longer[:, :, :, None] == tokens[:, None, None]).all(-1) & (both > 0)[:, None, None]  # [B, W, C, W]
        repeats = repeats + (grown[..., None] * equal).sum((1, 2))
        grown = torch.where(equal.any(-1), 0.0, grown).flatten(1)
        value = torch.cat([stays + repeats, grown], 1)
        best = value.topk(width, 1).indices
        nothing = torch.zeros_like(grown)
        after_blank = torch.cat([stays, nothing], 1).gather(1, best)
        after_token = torch.cat([repeats, grown], 1).gather(1, best)
        every = torch.cat([tokens, longer.flatten(1, 2)], 1)
        tokens = every.gather(1, best[..., None].expand(-1, -1, length))
        count = (tokens >= 0).sum(-1)
    value, order = (after_blank + after_token).sort(1, descending=True)
    tokens = tokens.gather(1, order[..., None].expand(-1, -1, length))
    return torch.where(value[..., None] > 0, tokens, -1), value


def prefix_tree(tokens: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Token sequences [B, W, L] and their probabilities -> the tree of their prefixes, level by level: tokens, parents
    and probabilities [B, L W], and which nodes are prefixes of their own [B, L W]; others repeat an earlier one."""
    rows, width, length = tokens.shape
    levels = []
    shared = torch.ones(rows, width, width, dtype=torch.bool, device=tokens.device)
    first = torch.full((rows, width), -1, device=tokens.device)
    own = torch.arange(width, device=tokens.device)
    for level in range(length):
        at = tokens[:, :, level]
        parents = first if level == 0 else first + (level - 1) * width
        shared = shared & (at[:, :, None] == at[:, None])
        first = shared.int().argmax(-1)
        live = (at >= 0) & (first == own)
        levels.append((at, parents, (shared * value[:, None]).sum(-1), live))
    at, parents, mass, live = (torch.cat(parts, 1) for parts in zip(*levels, strict=True))
    return at, parents, mass, live


class CollapsedTree(TopKTree):
    """The `nodes` most probable prefixes of what the frames collapse into."""

    def __init__(self, model: Any, *, nodes: int, depth: int, sampling: Sampling | None) -> None:
        self.nodes, self.length = nodes, depth
        super().__init__(model, tree=parallel(nodes, depth), sampling=sampling)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        left = self._start(room, rng)
        if int(room.max()) < 1:
            return Draft.empty(len(room), rng.device)
        runner: Any = self.model
        self.bytes_read += runner.weight_bytes
        # searched to the same length whatever the room, which another row's would otherwise decide: [B, W, L], [B, W]
        sequences, value = runner.draft_head.chains(runner.future_logits(), self.nodes, self.length)
        tokens, parents, mass, live = prefix_tree(sequences, value)
        level = torch.arange(tokens.shape[1], device=tokens.device) // sequences.shape[1]
        live = live & (level < left[:, None])
        kept, shape = rerank(torch.where(live, mass, -torch.inf), parents, self.nodes)
        best = Tree(shape, self.length, self.nodes)
        tokens = tokens.gather(1, kept).clamp(min=0)
        return Draft.guess(tokens, best, live.gather(1, kept), mass.gather(1, kept))


class CtcFrames(DraftHead):
    """A layer over the committed tokens, started as a copy of the target's last (or that layer with LoRA corrections of
    rank `lora`), then `frames` residual heads (of rank `rank`; 0: full) that attend to one another in both directions,
    in a layer of `mixing` heads (0: the target's number) with an MLP of width `hidden`. A frame is a token or the
    blank. Training draws up to `anchors` positions of each row."""

    parallel, cached_layers, draft_kind, taps, drafter_class = True, 1, "tree", ("last",), CollapsedTree
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        frames: int = 8,
        length: int = 5,
        hidden: int = 0,
        rank: int = 0,
        mixing: int = 0,
        lora: int = 0,
        anchors: int = 24,
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
            "rank": rank,
            "mixing": mixing,
            "lora": lora,
            "anchors": anchors,
            "vocabulary": kept(self.words),
        }
        width, eps = self.form.hidden_size, self.form.norm_eps
        self.embedded, self.norm = Norm(width, eps), Norm(width, eps)
        self.fuse = Matrix(2 * width, width)
        self.block = Block(self.form)
        self.block.copy(network.layers[-1])
        adapted(self.block, lora, known=width)
        self.heads, self.anchors = FutureStates(width, frames, rank), anchors
        self.mixer_form = mixing_form(self.form, mixing, hidden)
        self.mixer = Block(self.mixer_form)
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
        states = self.heads(state)
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
        priority = torch.rand(batch.answer.shape, device=batch.tokens.device) * batch.answer
        drawn = priority.topk(min(self.anchors, priority.shape[1]), 1).indices
        where = torch.zeros_like(batch.answer).scatter_(1, drawn, value=True) & batch.answer
        logs = self._frame_logits(batch, where).float().log_softmax(-1).transpose(0, 1)
        rows, places = where.nonzero(as_tuple=True)
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
        """The likeliest collapsed chains [B, count, length] of frame logits [B, F, R + 1], padded with -1, and their
        probabilities [B, count]."""
        tokens, value = prefix_beams(logits, length, count)
        ids_ = self.words.vocabulary
        return (tokens if ids_ is None else torch.where(tokens < 0, -1, ids_[tokens.clamp(min=0)])), value

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        hits = torch.zeros(*batch.answer.shape, min(depth, self.depth), dtype=torch.bool, device=batch.tokens.device)
        logits = torch.split(self._frame_logits(batch, batch.answer), _BEAM_ROWS)
        tokens = torch.cat([self.chains(part, _BEAMS, hits.shape[2])[0][:, 0] for part in logits])
        labels = torch.stack([batch.labels(offset + 1) for offset in range(hits.shape[2])], -1)
        hits[batch.answer] = tokens == labels[batch.answer]
        return hits

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)
