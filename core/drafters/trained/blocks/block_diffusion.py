"""Small decoders that fill in a block of mask tokens: several positions in one pass (DFlash, SpecDec).

Their guesses are independent of the tokens drafted before them; those of the other modules here are not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.eagle import shaped, spread
from outrider.core.drafters.trained.heads import PrefixCache, before, causal
from outrider.core.drafters.trained.lora import adapted
from outrider.core.drafters.trained.parallel_heads import ParallelHeads
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding
from outrider.core.errors import InvalidOption, unknown
from outrider.core.training.draft_head import Batch, Guess, agreement
from outrider.core.training.losses import Loss


@dataclass(frozen=True, eq=False)
class Roots:
    """Random positions of a batch after which blocks are trained. Guess k after a root is about the token after
    position `root + first - 1 + k`; N guesses count."""

    batch: Batch
    places: Tensor  # [B, A] the roots, in order
    tokens: Tensor  # [B, A, K] the token before each guess
    counts: Tensor  # [B, A, K] bool: whether the guess counts
    row: Tensor  # [N]
    column: Tensor  # [N] the position before the guessed token

    @classmethod
    def drawn(cls, batch: Batch, anchors: int, first: int, depth: int) -> Roots:
        """`anchors` roots per row, drawn anew at each call."""
        priority = torch.rand(batch.answer.shape, device=batch.tokens.device) * batch.answer
        places = priority.topk(min(anchors, priority.shape[1]), 1).indices.sort(1).values
        ahead = places[..., None] + torch.arange(first - 1, first - 1 + depth, device=places.device)  # [B, A, K]
        inside = ahead.clamp(max=batch.tokens.shape[1] - 1)
        row = torch.arange(len(places), device=places.device)[:, None, None].expand_as(ahead)
        counts = batch.answer[row, inside] & (ahead == inside) & batch.answer.gather(1, places)[..., None]
        return cls(batch, places, batch.tokens[row, inside], counts, row[counts], inside[counts])

    @property
    def labels(self) -> Tensor:
        """[N] the tokens to be guessed."""
        return self.batch.labels()[self.row, self.column]

    def teacher(self, words: SharedEmbedding) -> Tensor:
        """[N, R] the teacher's log-probabilities."""
        answer = self.batch.answer
        order = (answer.flatten().cumsum(0) - 1).view_as(answer)[self.row, self.column]
        return self.batch.teacher_log_probs(answer, words.vocabulary).index_select(0, order)

    def mean(self, each: Tensor, fade: float) -> Tensor:
        """The mean of losses [N] per guess, times K; guess k has the weight fade^k."""
        depth = self.counts.shape[2]
        place = torch.arange(depth, device=each.device).expand_as(self.counts)[self.counts]
        return (each * fade**place).sum() / max(len(each), 1) * depth


def all_blocks(block_states: Callable[[Batch, Tensor], Tensor], batch: Batch) -> Tensor:
    """The states [B, T, K, D] of the blocks after every position, 32 positions at a time."""
    count, device = batch.tokens.shape[1], batch.tokens.device
    starts = (torch.arange(start, min(start + 32, count), device=device) for start in range(0, count, 32))
    return torch.cat([block_states(batch, roots.expand(len(batch.tokens), -1)) for roots in starts], 1)


def block_mask(
    angles: Angles,
    roots: Tensor,
    positions: Tensor,
    seen: AttentionMask,
    context: Sequence[tuple[Tensor, Tensor]],
    *,
    ordered: bool = False,
) -> AttentionMask:
    """The attention mask of blocks at positions [B, A, W] after roots [B, A]: the context that the root attends to, and
    the block itself; `ordered`: only its positions up to each."""
    rows, count, wide = positions.shape
    block = torch.arange(count, device=roots.device).repeat_interleave(wide)
    own = block == block[:, None]
    own = (own.tril() if ordered else own).expand(rows, -1, -1)
    assert seen.mask is not None
    back = seen.mask.expand(rows, -1, -1).gather(1, roots[..., None].expand(-1, -1, seen.mask.shape[2]))
    mask = torch.cat([back.repeat_interleave(wide, 1), own], 2)
    cos, sin = angles(positions.flatten(1), seen.mask.shape[2] + wide, context[0][0].dtype)
    return AttentionMask(cos, sin, mask, context=context, queries=positions.flatten(1))


class Anchored(ParallelHeads):
    """Base of parallel heads that are trained from a random sample of positions per row: `anchors` roots, drawn for
    each batch."""

    anchors: int

    @property
    def guesses_per_pass(self) -> int:
        """Number of positions guessed after a root in one pass."""
        return self.depth

    def block_states(self, batch: Batch, roots: Tensor) -> Tensor:
        """The states [B, A, K, D] of the K positions after each root [B, A]."""
        raise TypeError(f"{type(self).__name__} must implement block_states()")

    def _corrected(self, states: Tensor, tokens: Tensor) -> Tensor:
        """States [..., K, D] after a correction by the token before each position [..., K]; here none."""
        return states

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        tokens = torch.stack([batch.labels(self.first - 1 + k) for k in range(self.guesses_per_pass)], -1)
        states = self._corrected(all_blocks(self.block_states, batch), tokens)
        for k in range(self.guesses_per_pass):
            logits = self.words.logits(states[batch.loss_mask(self.first + k)][:, k])
            yield Guess(logits, self.first + k, self.fade**k, self.words.vocabulary)

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """The loss of blocks after random roots."""
        roots = Roots.drawn(batch, self.anchors, self.first, self.guesses_per_pass)
        plain = self.block_states(batch, roots.places)
        states = self._corrected(plain, roots.tokens)[roots.counts]
        teacher, token = roots.teacher(self.words), self.words.local(roots.labels)
        logits = self.words.logits(states)
        total = roots.mean(loss(logits, teacher, token), self.fade)
        return total + self._extra_loss(roots, states, logits, teacher)

    def _extra_loss(self, roots: Roots, states: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """An additional loss of the states [N, D] and logits [N, R] of the guesses that count."""
        return logits.new_zeros(())

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return agreement(list(self.guesses(batch)), batch, depth)


class DFlashBlock(Anchored):
    """DFlash (arXiv 2602.06036): a block of mask tokens after the last token is filled in by layers with bidirectional
    attention within the block, which also attend to keys and values computed from the target's tapped states. Later
    positions have less weight in the loss. Ours starts from copies of the target's last layers, or uses them with LoRA
    corrections of rank `lora`. A layer may have a window (`windows`, in tokens, its own included), which in imported
    heads may be that of its block's first token (`anchored`: the tokens before it), and a causal block (`causal`)."""

    draft_kind, first = "dynamic", 1

    def __init__(
        self,
        target: Any,
        *,
        block: int = 7,
        layers: int = 1,
        taps: Sequence[str] = (),
        hidden: int = 0,
        form: Mapping[str, Any] | None = None,
        normed_taps: bool = True,
        block_offset: int = 0,
        own: bool = False,
        lora: int = 0,
        windows: Sequence[int | None] = (),
        causal: Sequence[bool] = (),
        anchored: bool = False,
        anchors: int = 24,
        vocabulary: PrefixCache = 0,
        fade: float = 0.85,
    ) -> None:
        super().__init__()
        for name, given in (("windows", windows), ("causal", causal)):
            if given and len(given) != layers:
                raise InvalidOption(f"{name} has {len(given)} values; it must have one for each of {layers} layers")
        network = target.network
        self._begin(network, vocabulary, fade, block=block, layers=layers, anchors=anchors)
        if own:
            self.words = SharedEmbedding(network, vocabulary, own=True)
        self.taps = tuple(taps) or spread(network.config.layers)
        for tap in self.taps:
            if tap not in target.taps:
                raise unknown("hidden tap", tap, target.taps)
        self.needs = frozenset(self.taps)
        self.config = {**self.config, "taps": list(self.taps), "hidden": hidden, "lora": lora, "form": dict(form or {})}
        self.config |= {"normed_taps": normed_taps, "block_offset": block_offset, "own": own}
        self.config |= {"windows": list(windows), "causal": list(causal), "anchored": anchored}
        self.windows = tuple(windows) or (None,) * layers
        self.causal, self.anchored = tuple(causal) or (False,) * layers, anchored
        self.form, self.block_offset = shaped(network.config, hidden, form), block_offset
        self.angles = Angles(self.form)
        self.depth, self.cached_layers, self.anchors = block, layers, anchors
        width, eps = self.form.hidden_size, self.form.norm_eps
        self.tap_norms: Any = nn.ModuleList(Norm(width, eps) for _ in self.taps if normed_taps)
        self.fuse = Matrix(len(self.taps) * width, width)
        self.context_norm = Norm(width, eps)
        self.mask = nn.Parameter(torch.randn(1, width) * float(network.embedding.float().std()))
        blocks = [self._layer(index) for index in range(layers)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = Norm(width, eps)
        with torch.no_grad():
            self.fuse.weight.mul_(0.1)
            self.fuse.weight[:, -width:] += torch.eye(width)
            self.norm.weight.copy_(network.norm)
        for one, layer in zip(reversed(blocks), reversed(network.layers), strict=False):
            one.copy(layer)
            adapted(one, lora, known=width, changed=bool(hidden or form))

    def _layer(self, index: int) -> Block:
        return Block(self.form, index=index)

    def _normed(self, features: Tensor) -> Tensor:
        """The taps' states [B, Q, F], each with its norm."""
        if not self.tap_norms:
            return features
        parts = features.chunk(len(self.taps), -1)
        return torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], -1)

    def _context(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Sequence[Tensor]:
        """For each layer the states [B, Q, D] of committed tokens that blocks attend to."""
        return [self.context_norm(self.fuse(self._normed(features)))] * len(self.blocks)

    def _block(self, roots: Tensor) -> Tensor:
        """The inputs of a block: the roots [..., D] and K mask embeddings -> [..., 1 + K, D]."""
        masks = self.mask.expand(*roots.shape[:-1], self.depth, -1).to(roots.dtype)
        return torch.cat([roots[..., None, :], masks], -2)

    def _filled(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        for block, window, ordered in zip(self.blocks, self.windows, self.causal, strict=True):
            x = block(x, self._narrowed(attn_mask, window, ordered) if window or ordered else attn_mask)
        filled: Tensor = self.norm(x)
        return filled

    def _narrowed(self, attn_mask: AttentionMask, window: int | None, ordered: bool) -> AttentionMask:
        """The mask of a layer with a window or a causal block."""
        mask, (at, key) = attn_mask.mask, attn_mask.positions()
        assert mask is not None
        keys, queries = key[:, None], at[..., None]
        mask = mask & (keys <= queries) if ordered else mask
        if window is not None and self.anchored:
            before = queries - torch.arange(at.shape[1], device=at.device)[:, None] % (self.depth + 1)
            mask = mask & (keys >= before - window)
        elif window is not None:
            mask = mask & ((keys - queries).abs() < window)
        return attn_mask.narrowed(mask)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        for block, context in zip(self.blocks, self._context(features, tokens, attn_mask), strict=True):
            block.attention.read(context, attn_mask)
        return self.words.embed(tokens)

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self._block(state)
        count = x.shape[1]
        if any(self.windows) or any(self.causal):
            root, seen = attn_mask.root()
            attn_mask.queries = (root + self.block_offset + torch.arange(count, device=x.device)).expand(len(x), -1)
            attn_mask.mask = seen
        if attn_mask.mask is not None:
            attn_mask.mask = F.pad(attn_mask.mask, (0, count), value=True).expand(-1, count, -1)
        return self._filled(x, attn_mask)[:, 1:]

    def block_states(self, batch: Batch, roots: Tensor) -> Tensor:
        dtype = self.mask.dtype
        features = torch.cat([before(batch.taps[tap]) for tap in self.taps], -1).to(dtype)
        seen = causal(self.angles, batch, features)
        contexts = self._context(features, batch.tokens, seen)
        read = [block.attention.read(context, seen) for block, context in zip(self.blocks, contexts, strict=True)]
        rows, count = roots.shape
        x = self._block(self.words.embed(batch.tokens.gather(1, roots)).to(dtype)).flatten(1, 2)
        wide = x.shape[1] // count
        positions = roots[..., None] + self.block_offset + torch.arange(wide, device=roots.device)
        filled = self._filled(x, block_mask(self.angles, roots, positions, seen, read))
        return filled.view(rows, count, wide, -1)[:, :, wide - self.depth :]


class SpecDecBlock(DFlashBlock):
    """SpecDec (arXiv 2203.16487): an independent drafter with a deep encoder and a shallow decoder that fills in all
    positions at once, with one learned query each. The paper encodes the source text of a translation; ours, for
    decoder-only targets, encodes the committed tokens causally."""

    draft_kind = "chain"

    def __init__(self, target: Any, *, encoder: int = 2, **options: Any) -> None:
        super().__init__(target, taps=("embedding",), **{key: value for key, value in options.items() if key != "taps"})
        if encoder < 1:
            raise InvalidOption(f"encoder is {encoder}; it must have 1 layer or more")
        del self.tap_norms, self.fuse
        self.config = {key: value for key, value in self.config.items() if key != "taps"} | {"encoder": encoder}
        shallow = self.cached_layers
        self.cached_layers = shallow + encoder
        deep = [Block(self.form, index=shallow + index) for index in range(encoder)]
        self.encoder: Any = nn.ModuleList(deep)
        for block, layer in zip(deep, target.network.layers, strict=False):
            block.copy(layer)
            adapted(block, self.config["lora"], known=self.form.hidden_size, changed=bool(self.config["hidden"]))
        self.mask = nn.Parameter(self.mask.detach().repeat(self.depth, 1) + torch.randn(self.depth, 1) * 0.01)

    def _context(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Sequence[Tensor]:
        x = self.words.embed(tokens).to(self.mask.dtype)
        for block in self.encoder:
            x = block(x, attn_mask)
        return [self.context_norm(x)] * len(self.blocks)
