"""Small decoders that fill in blocks of masks: several places guessed in one pass, as those of `parallel` are.

DSpark's alone looks at the tokens drafted before, through a correction of low rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.trained.eagle import spread
from outrider.core.drafters.trained.heads import PrefixCache, before, causal
from outrider.core.drafters.trained.lora import adapted
from outrider.core.drafters.trained.parallel_heads import ParallelHeads
from outrider.core.engine.trainable.block import AttentionMask, Block, Matrix, Norm
from outrider.core.errors import InvalidOption, unknown
from outrider.core.training.draft_head import Batch, Guess, agreement
from outrider.core.training.losses import Loss


class Anchored(ParallelHeads):
    """Draft heads that guess behind some of a row's places at a time: `anchors` drawn anew for each batch."""

    anchors: int

    @property
    def wide(self) -> int:
        """How many places are guessed behind one."""
        return self.depth

    def places(self, batch: Batch, roots: Tensor) -> Tensor:
        """The states [B, A, K, D] of the places ahead of roots [B, A], all rows at once."""
        raise TypeError(f"{type(self).__name__} says nothing")

    def around(
        self, roots: Tensor, stands: Tensor, seen: AttentionMask, context: Sequence[tuple[Tensor, Tensor]]
    ) -> AttentionMask:
        """What blocks behind roots [B, A] look at, standing at [B, A, W]: what their root sees of the context, and
        themselves."""
        rows, count, wide = stands.shape
        whose = torch.arange(count, device=roots.device).repeat_interleave(wide)
        own = (whose == whose[:, None]).expand(rows, -1, -1)
        assert seen.mask is not None
        back = seen.mask.expand(rows, -1, -1).gather(1, roots[..., None].expand(-1, -1, seen.mask.shape[2]))
        mask = torch.cat([back.repeat_interleave(wide, 1), own], 2)
        cos, sin = self.angles(stands.flatten(1), seen.mask.shape[2] + wide, context[0][0].dtype)
        return AttentionMask(cos, sin, mask, context=context)

    def _corrected(self, places: Tensor, tokens: Tensor) -> Tensor:
        """States [..., K, D] given the tokens before each place [..., K]: the same."""
        return places

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        places = []
        for start in range(0, batch.tokens.shape[1], 32):
            some = torch.arange(start, min(start + 32, batch.tokens.shape[1]), device=batch.tokens.device)
            places.append(self.places(batch, some.expand(len(batch.tokens), -1)))
        tokens = torch.stack([batch.labels(self.first - 1 + k) for k in range(self.wide)], -1)
        said = self._corrected(torch.cat(places, 1), tokens)
        for k in range(self.wide):
            logits = self.words.logits(said[batch.loss_mask(self.first + k)][:, k])
            yield Guess(logits, self.first + k, self.fade**k, self.words.vocabulary)

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        """Of blocks behind some positions, drawn anew for each batch."""
        chance = torch.rand(batch.answer.shape, device=batch.tokens.device) * batch.answer
        roots = chance.topk(min(self.anchors, chance.shape[1]), 1).indices.sort(1).values
        places = torch.arange(self.first - 1, self.first - 1 + self.wide, device=roots.device)
        ahead = roots[..., None] + places  # [B, A, K] behind which guesses are
        inside = ahead.clamp(max=batch.tokens.shape[1] - 1)
        row = torch.arange(len(roots), device=roots.device)[:, None, None].expand_as(ahead)
        counts = batch.answer[row, inside] & (ahead == inside) & batch.answer.gather(1, roots)[..., None]
        said = self._corrected(self.places(batch, roots), batch.tokens[row, inside])[counts]
        order = (batch.answer.flatten().cumsum(0) - 1).view_as(batch.answer)[row, inside][counts]
        taught = batch.teacher_log_probs(batch.answer, self.words.vocabulary).index_select(0, order)
        token = self.words.local(batch.labels()[row, inside][counts])
        place = torch.arange(self.wide, device=roots.device).expand_as(counts)[counts]
        logits = self.words.logits(said)
        weight = self.fade**place
        total = (loss(logits, taught, token) * weight).sum() / max(len(logits), 1) * self.wide
        return total + self._besides(batch, (row[counts], inside[counts]), said, logits, taught)

    def _besides(
        self, batch: Batch, where: tuple[Tensor, Tensor], said: Tensor, logits: Tensor, taught: Tensor
    ) -> Tensor:
        """What else is to be minimised, of states [N, D] said behind places of the batch (rows [N], columns [N])."""
        return logits.new_zeros(())

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return agreement(list(self.guesses(batch)), batch, depth)


class DFlashBlock(Anchored):
    """DFlash (arXiv 2602.06036): a block of masks behind the last token is filled in by layers that look at one another
    both ways, and at the target's tapped states, which every layer reads as keys and values of its own. Trained from
    `anchors` drawn in each row; of the block, later places count less. Ours begins as copies of the target's last
    layers, or is those, corrected to a rank of `lora`."""

    draft_kind, first = "dynamic", 1

    def __init__(
        self,
        target: Any,
        *,
        block: int = 7,
        layers: int = 1,
        taps: Sequence[str] = (),
        hidden: int = 0,
        lora: int = 0,
        anchors: int = 24,
        vocabulary: PrefixCache = 0,
        fade: float = 0.85,
    ) -> None:
        super().__init__()
        network = target.network
        self._begin(network, vocabulary, fade, block=block, layers=layers, anchors=anchors)
        self.taps = tuple(taps) or spread(network.config.layers)
        for tap in self.taps:
            if tap not in target.taps:
                raise unknown("hidden tap", tap, target.taps)
        self.needs = frozenset(self.taps)
        self.config = {**self.config, "taps": list(self.taps), "hidden": hidden, "lora": lora}
        self.form = replace(self.form, intermediate_size=hidden or self.form.intermediate_size)
        self.depth, self.cached_layers, self.anchors = block, layers, anchors
        width, eps = self.form.hidden_size, self.form.norm_eps
        self.tap_norms: Any = nn.ModuleList(Norm(width, eps) for _ in self.taps)
        self.fuse = Matrix(len(self.taps) * width, width)
        self.context_norm = Norm(width, eps)
        self.mask = nn.Parameter(torch.randn(1, width) * float(network.embedding.float().std()))
        blocks = [Block(self.form, index=index) for index in range(layers)]
        self.blocks: Any = nn.ModuleList(blocks)
        self.norm = Norm(width, eps)
        with torch.no_grad():
            self.fuse.weight.mul_(0.1)
            self.fuse.weight[:, -width:] += torch.eye(width)
            self.norm.weight.copy_(network.norm)
        for one, layer in zip(reversed(blocks), reversed(network.layers), strict=False):
            one.copy(layer)
            adapted(one, lora, known=width, changed=bool(hidden))

    def _context(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        """What the block looks at [B, Q, D], of each committed token."""
        parts = features.chunk(len(self.taps), -1)
        x = torch.cat([norm(part) for norm, part in zip(self.tap_norms, parts, strict=True)], -1)
        context: Tensor = self.context_norm(self.fuse(x))
        return context

    def _block(self, roots: Tensor) -> Tensor:
        """The block's own tokens behind roots [..., D] -> [..., 1 + K, D]."""
        masks = self.mask.expand(*roots.shape[:-1], self.depth, -1).to(roots.dtype)
        return torch.cat([roots[..., None, :], masks], -2)

    def _filled(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        for one in self.blocks:
            x = one(x, attn_mask)
        filled: Tensor = self.norm(x)
        return filled

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        context = self._context(features, tokens, attn_mask)
        for one in self.blocks:
            one.attention.read(context, attn_mask)
        return self.words.embed(tokens)

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self._block(state)
        count = x.shape[1]
        if attn_mask.mask is not None:
            attn_mask.mask = F.pad(attn_mask.mask, (0, count), value=True).expand(-1, count, -1)
        return self._filled(x, attn_mask)[:, 1:]

    def places(self, batch: Batch, roots: Tensor) -> Tensor:
        dtype = self.mask.dtype
        features = torch.cat([before(batch.taps[tap]) for tap in self.taps], -1).to(dtype)
        seen = causal(self.angles, batch, features)
        context = self._context(features, batch.tokens, seen)
        read = [one.attention.read(context, seen) for one in self.blocks]
        rows, count = roots.shape
        x = self._block(self.words.embed(batch.tokens.gather(1, roots)).to(dtype)).flatten(1, 2)
        wide = x.shape[1] // count
        stands = roots[..., None] + torch.arange(wide, device=roots.device)
        filled = self._filled(x, self.around(roots, stands, seen, read))
        return filled.view(rows, count, wide, -1)[:, :, wide - self.depth :]


class DSparkBlock(DFlashBlock):
    """DSpark (arXiv 2607.05147): DFlash's block, whose places are then spoken from left to right: the token before each
    corrects it, through a bias of low `rank`. A confidence head, trained towards the chance of acceptance, can end a
    chain (policy "confident"). In the paper the bias has a table of its own; ours reads the target's embedding and
    speaks through its output rows."""

    parallel, draft_kind = False, "dynamic"

    def __init__(self, target: Any, *, rank: int = 128, **options: Any) -> None:
        super().__init__(target, **options)
        if rank < 1:
            raise InvalidOption(f"rank is {rank}; it must be 1 or more")
        self.config = {**self.config, "rank": rank}
        width = self.form.hidden_size
        self.embedded = Norm(width, self.form.norm_eps)
        self.into, self.out = Matrix(width, rank), Matrix(rank, width, zero=True)
        self.confidence = Matrix(width, 1, bias=True, zero=True)

    def _corrected(self, places: Tensor, tokens: Tensor) -> Tensor:
        result: Tensor = places + self.out(self.into(self.embedded(self.words.embed(tokens))))
        return result

    def _besides(
        self, batch: Batch, where: tuple[Tensor, Tensor], said: Tensor, logits: Tensor, taught: Tensor
    ) -> Tensor:
        """How far the confidence is from the chance that a drawn token is accepted."""
        with torch.no_grad():
            chance = torch.minimum(logits.float().softmax(-1), taught.float().softmax(-1)).sum(-1).clamp(0, 1)
        return F.binary_cross_entropy_with_logits(self.confidence(said.detach())[..., 0].float(), chance)

    def acceptance(self, states: Tensor) -> Tensor:
        chance: Tensor = self.confidence(states[..., -self.words.hidden_size :])[..., 0].sigmoid()
        return chance

    def future_states(self, state: Tensor, attn_mask: AttentionMask) -> Tensor:
        places = super().future_states(state, attn_mask)
        said = places[:, 0] + self.out(self.into(self.embedded(state)))
        return torch.cat([places.flatten(1), said], -1)[:, None]

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        width = self.words.hidden_size
        at = min(level + 1, self.depth - 1) * width
        said = self._corrected(states[..., at : at + width], tokens)
        return torch.cat([states[..., :-width], said], -1)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states[..., -self.words.hidden_size :])


class SpecDecBlock(DFlashBlock):
    """SpecDec (arXiv 2203.16487): an independent drafter, a deep encoder over the tokens and a shallow decoder with one
    learned query for each of the places, all of which it fills in at once. The paper's encodes the source text of a
    translation; ours, with the decoder-only targets of today, encodes all that was committed, causally."""

    draft_kind = "chain"

    def __init__(self, target: Any, *, encoder: int = 2, **options: Any) -> None:
        super().__init__(target, taps=("embedding",), **{key: one for key, one in options.items() if key != "taps"})
        if encoder < 1:
            raise InvalidOption(f"encoder is {encoder}; it must have 1 layer or more")
        del self.tap_norms, self.fuse
        self.config = {key: one for key, one in self.config.items() if key != "taps"} | {"encoder": encoder}
        shallow = self.cached_layers
        self.cached_layers = shallow + encoder
        deep = [Block(self.form, index=shallow + index) for index in range(encoder)]
        self.encoder: Any = nn.ModuleList(deep)
        for one, layer in zip(deep, target.network.layers, strict=False):
            one.copy(layer)
            adapted(one, self.config["lora"], known=self.form.hidden_size, changed=bool(self.config["hidden"]))
        self.mask = nn.Parameter(self.mask.detach().repeat(self.depth, 1) + torch.randn(self.depth, 1) * 0.01)

    def _context(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        x = self.words.embed(tokens).to(self.mask.dtype)
        for one in self.encoder:
            x = one(x, attn_mask)
        context: Tensor = self.context_norm(x)
        return context
