"""DFlash 2: DFlash's block with a convolution within it, and a selector that joins the best candidates of adjacent
positions into one path.

"DFlash 2" (Inco AI and Z Lab, August 2026, https://inco.ai/blog/dflash2/). A path is walked from left to right: at
temperature 0 each token is the candidate with the highest score, else it is drawn from the softmax of the scores, which
is the distribution that the acceptance rule uses. Only these scores depend on drafted tokens; a draft costs one pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.draft import Draft
from outrider.core.drafters.trained.blocks.block_diffusion import DFlashBlock, Roots, all_blocks
from outrider.core.drafters.trained.head_runner import HeadRunner
from outrider.core.engine.trainable.block import AttentionMask, Block, Matrix, Norm
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Scores
from outrider.core.training.draft_head import Batch, Guess


class BlockConvolution(nn.Module):
    """A depthwise convolution of two taps over the positions of a block: k0 * x[t] + k1 * x[t - 1], with zeros before
    the first. A kernel is a learned vector plus a projection of the sublayer's input, with one value for each `group`
    channels. The same projection gives the kernels before and behind the sublayer. Starts as the identity."""

    def __init__(self, width: int, wide: int, group: int) -> None:
        super().__init__()
        self.wide, self.group = wide, group
        self.kernel = nn.Parameter(torch.tensor([1.0, 0.0]).repeat(2, 1)[..., None].repeat(1, 1, width))
        self.project = Matrix(width, 4 * (width // group), zero=True)

    def kernels(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The kernels [..., 2, D] before and behind a sublayer with the input x [..., D]."""
        shape = *x.shape[:-1], 2, 2, x.shape[-1] // self.group
        both = self.kernel.to(x.dtype) + self.project(x).view(shape).repeat_interleave(self.group, -1)
        return both[..., 0, :, :], both[..., 1, :, :]

    def forward(self, x: Tensor, kernel: Tensor) -> Tensor:
        """[B, A W, D], blocks of W positions side by side."""
        blocks = x.view(len(x), -1, self.wide, x.shape[2])
        past = F.pad(blocks[:, :, :-1], (0, 0, 1, 0)).flatten(1, 2)
        return kernel[..., 0, :] * x + kernel[..., 1, :] * past


class ConvolvedBlock(Block):
    """A layer with a convolution before and behind each sublayer."""

    def __init__(self, config: Config, *, index: int, wide: int, group: int) -> None:
        super().__init__(config, index=index)
        self.around_attention = BlockConvolution(config.hidden_size, wide, group)
        self.around_mlp = BlockConvolution(config.hidden_size, wide, group)

    def forward(self, x: Tensor, attn_mask: AttentionMask, read: Tensor | None = None) -> Tensor:
        assert self.attention_norm is not None
        entered = self.attention_norm(x)
        first, last = self.around_attention.kernels(entered)
        attended = self.attention(self.around_attention(entered, first), attn_mask)
        x = x + self.around_attention(attended, last)
        entered = self.mlp_norm(x)
        first, last = self.around_mlp.kernels(entered)
        result: Tensor = x + self.around_mlp(self.mlp(self.around_mlp(entered, first)), last)
        return result


class PathRunner(HeadRunner):
    """Runs the block once per round; then scores of any path through its candidates need no further pass."""

    def _open(self) -> None:
        waiting = self.cache.rows
        super()._open()
        head = self.draft_head
        root = (waiting.pending_count - 1)[:, None]
        self._root = waiting.pending.gather(1, root.to(waiting.pending.device))
        self._unary, self._places = head.kept(head.logits(self._states))  # [B, K, k]
        self._entered, self._gates = head.entered(self._places), head.gate(self._states)

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        if since is None or since > self.cache.scored:
            self._open()
        self.cache.scored = draft.size
        tokens = torch.cat([self._root, draft.tokens], 1)
        levels = F.pad(draft.tree.depths + 1, (1, 0)).clamp(max=self._states.shape[1] - 1).expand(draft.rows, -1)

        @torch.no_grad()
        def of_rows(rows: Tensor) -> Tensor:
            batch = torch.arange(len(rows), device=rows.device)[:, None]
            level = levels.gather(1, rows)
            places = self._places[batch, level]
            scores = self.draft_head.scored(
                self._gates[batch, level],
                tokens.gather(1, rows),
                self._unary[batch, level],
                self._entered[batch, level],
            )
            return spread_out(scores, places, self.draft_head.words.count)

        return Scores(draft, self._pipeline, self.cache.rows.committed, of_rows, {}, 0 if since is None else since + 1)


class DFlash2Block(DFlashBlock):
    """DFlash 2. Each position keeps its `candidates` likeliest tokens; a candidate b behind a token a has the score
    logit(b) + <A(a) * H(h), B(b)> for the position's state h. A and B, tables of the vocabulary in the original, are
    projections of the target's embedding to the size `rank` in ours.

    Trained with the loss of the logits plus that of the scores over the candidates, among which the next token is put
    if it is missing."""

    parallel, draft_kind, runner = False, "chain", PathRunner

    def __init__(self, target: Any, *, candidates: int = 16, rank: int = 64, group: int = 16, **options: Any) -> None:
        width = target.network.config.hidden_size
        if candidates < 1 or rank < 1:
            raise InvalidOption(f"candidates={candidates}, rank={rank}: each must be 1 or more")
        if group < 1 or width % group:
            raise InvalidOption(f"group is {group}; it must divide the hidden size {width}")
        self._group = group
        super().__init__(target, **options)
        self.config = {**self.config, "candidates": candidates, "rank": rank, "group": group}
        self.candidates = min(candidates, self.words.count)
        self.embedded = Norm(width, self.form.norm_eps)
        self.before, self.behind = Matrix(width, rank), Matrix(width, rank)
        self.gate = Matrix(width, rank, zero=True)

    def _layer(self, index: int) -> Block:
        return ConvolvedBlock(self.form, index=index, wide=self.depth + 1, group=self._group)

    def kept(self, logits: Tensor, token: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The highest logits [..., R] and their places, [..., k] each; a `token` [...] (a place, or -1) that is
        missing replaces the last."""
        best, places = logits.topk(self.candidates, -1)
        if token is None:
            return best, places
        missing = (token >= 0) & ~(places == token[..., None]).any(-1)
        last = torch.where(missing, token, places[..., -1])
        places = torch.cat([places[..., :-1], last[..., None]], -1)
        return logits.gather(-1, places), places

    def entered(self, places: Tensor) -> Tensor:
        """B of candidates, by their places [...] among the outputs -> [..., r]."""
        ids = places if self.words.vocabulary is None else self.words.vocabulary[places]
        behind: Tensor = self.behind(self.embedded(self.words.embed(ids)))
        return behind

    def scored(self, gates: Tensor, tokens: Tensor, unary: Tensor, entered: Tensor) -> Tensor:
        """The scores [..., k] of candidates with logits `unary` [..., k] and B [..., k, r] behind tokens [...], at
        positions with H [..., r]."""
        left = self.before(self.embedded(self.words.embed(tokens))) * gates
        pairs: Tensor = (entered @ left.to(entered.dtype)[..., None])[..., 0]
        return unary + pairs

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        blocks = all_blocks(self.block_states, batch)
        for k in range(self.depth):
            mask = batch.loss_mask(1 + k)
            states, tokens = blocks[mask][:, k], batch.labels(k)[mask]
            logits = self.words.logits(states)
            unary, places = self.kept(logits)
            scores = self.scored(self.gate(states), tokens, unary, self.entered(places))
            yield Guess(spread_out(scores, places, logits.shape[-1]), 1 + k, self.fade**k, self.words.vocabulary)

    def _extra_loss(self, roots: Roots, states: Tensor, logits: Tensor, teacher: Tensor) -> Tensor:
        """The loss of the selector: cross-entropy with the teacher's distribution over the candidates, half of it as
        that of the next token."""
        label = self.words.local(roots.labels)
        unary, places = self.kept(logits, label)
        scores = self.scored(self.gate(states), roots.tokens[roots.counts], unary, self.entered(places))
        log_q = scores.float().log_softmax(-1)
        soft = -(teacher.gather(-1, places).softmax(-1) * log_q).sum(-1)
        hard = -(log_q * (places == label[..., None])).sum(-1)
        return roots.mean(soft + 0.5 * hard, self.fade)


def spread_out(scores: Tensor, places: Tensor, count: int) -> Tensor:
    """Scores [..., k] of candidates at `places` as logits [..., R], -inf elsewhere."""
    return scores.new_full((*scores.shape[:-1], count), -torch.inf).scatter(-1, places, scores)
