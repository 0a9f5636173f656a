"""Early exits: the target's first layers read each token, and a small trained part predicts from there what the last
layers would.

The layers are the target's own, over its own cache, without copies. Independent of distributions.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.trained.head_runner import HeadRunner, carried, ready, reduced
from outrider.core.drafters.trained.heads import PrefixCache, kept
from outrider.core.engine.self_draft_views import position_bound
from outrider.core.engine.trainable.block import Angles, Attention, AttentionMask, Mlp, Norm
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, View
from outrider.core.training.draft_head import Batch, DraftHead, Guess

_PIECE = 512  # prompt tokens per pass


class Early(HeadRunner):
    """Runs tokens through the target's first layers; the draft head reads each token's own state there, not that of the
    token before."""

    view: View | None = None  # of the target's first layers, once begun

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if self.self_draftable is None:
            raise Incompatible(
                "this drafter runs the target's first layers alone, and this target (a transformers model, or a row of "
                "a continuous batch) has no such view; use generate() with a model that our own decoder runs (Llama, "
                "Qwen, Mistral, Gemma, ...), or another drafter"
            )
        self._pipeline = reduced(sampling, prompts, self.vocabulary, self.device, self.draft_head.words.vocabulary)
        view = self.self_draftable.view(exit=self.draft_head.exit)
        view.mute = True
        view.begin(prompts, sampling, frozenset())
        self.view = view
        self.weight_bytes = self.draft_head.pass_bytes + view.layer_bytes
        self.cache.begin(prompts)
        if self.draft_head.cached_layers:
            features, longest = self._features(), max(map(len, prompts))
            for start in range(0, longest - 1, _PIECE):
                stop = min(start + _PIECE, longest - 1)
                ids, places = self.cache.prompt_chunk(start, stop)
                self.draft_head.open(features[:, start:stop], ids, self._attn_mask(places, longest))
        self.cache.set_prefilled(prompts)
        width = self.draft_head.words.hidden_size
        self._pending = torch.zeros(len(prompts), 1, width, dtype=self.dtype, device=self.device)
        self._states = self._pending[:, :0]
        return Prefill()

    def _early_states(self, draft: Draft, since: int | None) -> Tensor:
        """The first layers' output for the root (`since` None), or for the nodes from `since` on."""
        assert self.view is not None
        return self.view.score(draft, since).hidden[self.draft_head.tap].to(self.dtype)

    def _open(self) -> None:
        root = (self.cache.rows.pending_count - 1)[:, None, None].expand(-1, 1, self._pending.shape[2])
        states = self._early_states(Draft.empty(len(root), self.device), None)
        self._pending = self._pending.scatter(1, root, states)
        super()._open()

    def _extend(self, draft: Draft, since: int, level: int) -> None:
        states = self._early_states(draft, since)
        ids, places = self.cache.plan(draft, since)
        grown = self._captured(
            "open", self.draft_head.open, (states, ids), self._attn_mask(places, position_bound(self.cache, draft))
        )
        self._states = torch.cat([self._states, grown], 1)
        self.cache.scored = draft.size

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        """Take the accepted tokens' states from the target's pass; the new root's is computed next."""
        before = self.cache.rows
        self.cache.scored = min(self.cache.scored, 0)
        self._pipeline.commit(self.cache.keep(draft, verdict, count), verdict.known(count))
        assert self.view is not None
        self.view.keep(draft, verdict, count)
        rows = F.pad(verdict.path + 1, (0, 1)).clamp(min=0)
        if self.draft_head.cached_layers:
            features = self._features()
            root = (before.pending_count - 1)[:, None, None].expand(-1, 1, features.shape[2])
            pending = self._pending.scatter(1, root, features[:, :1])
            fresh = features.gather(1, rows[..., None].expand(-1, -1, features.shape[2]))
        else:  # the head has no cache, so earlier states are not needed
            pending, fresh = self._pending, self._pending.new_zeros(*rows.shape, self._pending.shape[2])
        self._pending = carried(before, self.cache.rows, torch.cat([pending, fresh], 1))

    def carry(self) -> object:
        return self.view.carry() if self.view is not None and self._states.numel() else None

    def end(self) -> None:
        super().end()
        if self.view is not None:
            self.view.end()


class ExitHead(DraftHead):
    """LayerSkip's drafting (arXiv 2404.16710): the first `exit` layers and the output layer draft, and verification
    continues from their states. The paper trains the whole target for early exits; ours trains only a small residual
    MLP before the output rows."""

    parallel, cached_layers, draft_kind, depth, runner = False, 0, "chain", None, Early
    drafting_needs = frozenset[str]()  # the view runs the layers that the tap is on

    def __init__(self, target: Any, *, exit: int = 0, hidden: int = 256, vocabulary: PrefixCache = 0) -> None:
        super().__init__()
        network = target.network
        self.exit = _exit(exit, network.config.layers, 0.35)
        self.tap = f"layer.{self.exit - 1}"
        self.taps: tuple[str, ...] = (self.tap,)
        self.needs = frozenset(self.taps)
        self.words = SharedEmbedding(network, vocabulary)
        self.form = replace(network.config, intermediate_size=hidden)
        self.config = {"exit": self.exit, "hidden": hidden, "vocabulary": kept(self.words)}
        self.inner, self.norm = (Norm(self.form.hidden_size, self.form.norm_eps) for _ in range(2))
        self.mlp = Mlp(self.form)
        with torch.no_grad():
            self.mlp.down.weight.zero_()
            self.norm.weight.copy_(network.norm)

    def advance(self, x: Tensor) -> Tensor:
        result: Tensor = self.norm(x + self.mlp(self.inner(x)))
        return result

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        x = batch.taps[self.tap][batch.loss_mask()].to(self.norm.weight.dtype)
        yield Guess(self.words.logits(self.advance(x)), 1, vocabulary=self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.advance(features)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


class KangarooHead(DraftHead):
    """Kangaroo (arXiv 2404.18911): after a very early exit, an adapter of one attention and two norms is trained on the
    target's distributions. Drafting exits a second time, behind the first token whose distribution has no
    probability of 0.6 or more (policy "confidence"); the paper compares the drawn token's, which at temperature 0 is
    the same. The attention starts as a copy of the target's last.
    The paper exits after 2 of 32 layers, ours by default after a sixth of them, for small targets."""

    parallel, cached_layers, draft_kind, depth, runner = False, 1, "chain", None, Early
    policy, threshold = "confidence", 0.6

    def __init__(self, target: Any, *, exit: int = 0, vocabulary: PrefixCache = 0) -> None:
        super().__init__()
        network = target.network
        self.exit = _exit(exit, network.config.layers, 1 / 6)
        self.tap = f"layer.{self.exit - 1}"
        self.taps: tuple[str, ...] = (self.tap,)
        self.needs = frozenset(self.taps)
        self.words = SharedEmbedding(network, vocabulary)
        self.form = network.config
        self.config = {"exit": self.exit, "vocabulary": kept(self.words)}
        self.entered, self.norm = (Norm(self.form.hidden_size, self.form.norm_eps) for _ in range(2))
        self.attention = Attention(self.form)
        self.angles = Angles(self.form)
        last = network.layers[-1]
        with torch.no_grad():
            self.attention.qkv.weight.copy_(last.qkv.weight)
            self.attention.out.weight.copy_(last.out.weight)
            self.entered.weight.copy_(last.attention_norm)
            self.norm.weight.copy_(network.norm)

    def advance(self, x: Tensor, attn_mask: AttentionMask) -> Tensor:
        result: Tensor = self.norm(x + self.attention(self.entered(x), attn_mask))
        return result

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        x = batch.taps[self.tap].to(self.norm.weight.dtype)
        place = batch.positions[0]
        cos, sin = self.angles(batch.positions, len(place), x.dtype)
        states = self.advance(x, AttentionMask(cos, sin, (place <= place[:, None])[None]))
        yield Guess(self.words.logits(states[batch.loss_mask()]), 1, vocabulary=self.words.vocabulary)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.advance(features, attn_mask)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


def _exit(exit: int, layers: int, share: float) -> int:
    """The number of layers to run: `exit`, or if that is 0 a share of them."""
    chosen = exit or max(round(layers * share), 1)
    if not 1 <= chosen <= layers:
        raise InvalidOption(f"exit is {exit}; it must be from 1 to {layers}, the target's number of layers")
    return chosen
