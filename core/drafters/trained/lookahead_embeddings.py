"""The target drafts in the pass that verifies: learned embeddings take the place of unknown tokens, and the target's
distributions after them are the next draft.

PaSS: Parallel Speculative Sampling (arXiv 2311.13581). The target is unchanged; only a few embeddings are learned.
Independent of what a token means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.device import upload
from outrider.core.distribution import Distribution, Sampling, to_distribution
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.trained.blocks.block_diffusion import Anchored
from outrider.core.drafters.trained.drafter import shallow
from outrider.core.drafters.trained.heads import PrefixCache
from outrider.core.drafters.tree_shapes import chain, validate
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import AttentionMask, Block
from outrider.core.engine.types import PassLayout
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.training.draft_head import Batch
from outrider.core.tree import Tree

Context = list[tuple[Tensor, Tensor]]  # keys and values [B, K, T, d] of each layer


class LookaheadEmbeddings(Anchored):
    """PaSS's look-ahead embeddings: embedding l is l positions after the last known token, and the frozen target
    predicts the token after it. They are trained after `anchors` random positions per row: the row is read once without
    a gradient, and the embeddings attend to it and to those before them. The paper inserts them at one random position
    of a text and learns its tokens; ours learns the target's distributions (of a reduced vocabulary if given; drafting
    uses the whole one), starting near the mean of the target's embeddings."""

    first, needs = 2, frozenset[str]()

    def __init__(
        self, target: Any, *, embeddings: int = 4, anchors: int = 24, vocabulary: PrefixCache = 0, fade: float = 0.8
    ) -> None:
        super().__init__()
        network: Network = target.network
        self._begin(network, vocabulary, fade, embeddings=embeddings, anchors=anchors)
        self.depth, self.anchors = embeddings, anchors
        rows = network.embedding.float()
        mean, spread = rows.mean(0).cpu(), rows.std().cpu()  # heads are made on the host, as their random numbers are
        self.embeddings = nn.Parameter(mean + 0.1 * spread * torch.randn(embeddings, rows.shape[1]))
        self._network, self._layers = [network], list[Block]()  # in lists, so that they are not submodules
        self._known: tuple[Batch, Context] | None = None

    def _frozen_layers(self) -> list[Block]:
        """The target's layers as blocks that pass gradients."""
        if not self._layers:
            self._layers += frozen(self._network[0])
        return self._layers

    def _read(self, batch: Batch) -> Context:
        """The keys and values of the target's layers for a batch; cached for the last batch."""
        if self._known is not None and self._known[0] is batch:
            return self._known[1]
        (rows, count), device = batch.tokens.shape, batch.tokens.device
        place, dtype = batch.positions[0], self._dtype(device)
        shape = (len(self._frozen_layers()), rows, 2 * self.form.kv_heads, count, self.form.head_dim)
        store = torch.zeros(shape, dtype=dtype, device=device)
        attn_mask = AttentionMask(
            *self.angles(batch.positions, count, dtype),
            (place <= place[:, None])[None],
            store,
            PassLayout(batch.positions, count, None, 0),
        )
        with torch.no_grad():
            x = self.words.embed(batch.tokens).to(self.embeddings.dtype)
            for layer in self._frozen_layers():
                x = layer(x, attn_mask)
        kv = self.form.kv_heads
        self._known = batch, [(layer[:, :kv], layer[:, kv:]) for layer in store.unbind()]
        return self._known[1]

    def _dtype(self, device: torch.device) -> torch.dtype:
        """The dtype of keys and values."""
        kind = device.type
        return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else self._network[0].dtype

    def block_states(self, batch: Batch, roots: Tensor) -> Tensor:
        context, dtype = self._read(batch), self._dtype(roots.device)
        (rows, count), length, wide = roots.shape, batch.tokens.shape[1], self.depth
        positions = (roots[..., None] + 1 + torch.arange(wide, device=roots.device)).flatten(1)
        order = torch.arange(count * wide, device=roots.device)
        own = (order // wide == order[:, None] // wide) & (order <= order[:, None])
        back = (batch.positions <= roots[..., None]).repeat_interleave(wide, 1)  # [B, A K, T]
        mask = torch.cat([back, own.expand(rows, -1, -1)], 2)
        x = self.embeddings.repeat(count, 1).expand(rows, -1, -1)
        attn_mask = AttentionMask(*self.angles(positions, length + wide + 1, dtype), mask, context=context)
        for layer in self._frozen_layers():
            x = layer(x, attn_mask)
        network = self._network[0]
        states = F.rms_norm(x.to(network.dtype), (x.shape[2],), network.norm, network.config.norm_eps)
        return states.view(rows, count, wide, -1)

    @property
    def pass_bytes(self) -> int:
        """0: the passes are the target's own."""
        return 0


def frozen(network: Network) -> list[Block]:
    """A network's layers as blocks that pass gradients; unquantized weights are shared."""
    if not network.config.like_llama:
        raise Incompatible(
            f"lookahead embeddings train through the target's layers, and those of '{network.config.architecture}' are "
            "not built as Llama's; train another draft head"
        )
    blocks = []
    for index, layer in enumerate(network.layers):
        with torch.device("meta"):
            block = Block(network.config, index=index)
        attention, mlp = block.attention, block.mlp
        assert block.attention_norm is not None
        for part, name, weight in (
            (block.attention_norm, "weight", layer.attention_norm),
            (block.mlp_norm, "weight", layer.mlp_norm),
            (attention, "qk_norm", layer.qk_norm),
            *(
                (mine, name, weight)
                for mine, theirs in (
                    (attention.qkv, layer.qkv),
                    (attention.out, layer.out),
                    (mlp.up_gate, layer.up_gate),
                    (mlp.down, layer.down),
                )
                for name, weight in (("weight", theirs.weight), ("bias", theirs.bias))
            ),
        ):
            if weight is not None:
                setattr(part, name, nn.Parameter(weight, requires_grad=False))
        blocks.append(block.eval())
    return blocks


@lru_cache(maxsize=256)
def grown(shape: tuple[int, ...], ahead: int) -> tuple[int, ...]:
    """A tree of guesses, with a chain of `ahead` look-ahead nodes after the root and after each guess."""
    parents = [*shape]
    for above in range(-1, len(shape)):
        for _ in range(ahead):
            parents.append(above)
            above = len(parents) - 1
    return tuple(parents)


class PaSS(WeightFree):
    """Drafts with look-ahead embeddings: a chain with one guess per embedding (at most `length`), drawn from the
    target's distributions after the embeddings (at temperature 0: the likeliest); or a static `tree` of the likeliest
    tokens. In the paper drafting and verifying passes alternate (`separate_passes`). Ours does both in one pass: it
    reads L probes after the root and after each of N guesses, wherever the accepted path may end, (N + 1) L in all.
    Rules never try probes."""

    standalone: Literal[True] = True  # its guesses come from its own draft's scores

    def __init__(
        self,
        head: Any,
        *,
        length: int | None = None,
        tree: Sequence[int] | None = None,
        separate_passes: bool = False,
    ) -> None:
        self.embeddings: Tensor = head.embeddings.detach()
        self.known: int = head.words.full_vocabulary
        self.vocabulary = self.known
        max_depth = len(self.embeddings)
        if length is not None and length < 1:
            raise InvalidOption(f"length is {length}; it must be 1 or more")
        self.drawn = tree is None
        parents = chain(min(length or max_depth, max_depth)) if tree is None else shallow(validate(tree), max_depth)
        if not parents:
            raise InvalidOption("the tree has no nodes; give parents such as (-1, -1, 0), or drafter=None")
        self.parents, self.separate_passes = tuple(parents), separate_passes
        self.depth = Tree.of(self.parents).depth

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        if prefill.self_draftable is None or not prefill.self_draftable.reads_embeddings:
            raise Incompatible(
                "PaSS feeds the target learned embeddings, which this target does not support; use a model that our "
                "own decoder runs (Llama, Qwen, Mistral, Gemma, ...), or another drafter"
            )
        self._draws = self.drawn and not sampling.greedy
        self._distribution: Distribution | None = None  # [B, L, S] of the next positions, None: not known
        self._ahead = 0  # look-ahead nodes after each node of this round's draft

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        max_depth, distribution, device = int(room.max()), self._distribution, rng.device
        shape: tuple[int, ...] = ()
        if distribution is not None and max_depth > 0:
            shape = shallow(self.parents, min(distribution.probs.shape[1], max_depth))
        looks_ahead = not (self.separate_passes and shape)
        self._guesses, self._ahead = len(shape), max(min(self.depth, max_depth - 1), 0) if looks_ahead else 0
        tree = Tree.of(grown(shape, self._ahead), device)
        if not tree.size:
            return Draft.empty(len(room), device)
        place = torch.arange(tree.size, device=device) - len(shape)
        probe = place >= 0
        fits = tree.depths + probe < upload(room, device)[:, None]  # the token after a probe needs room as well
        tokens = torch.where(probe, place % max(self._ahead, 1) + self.known, 0).repeat(len(room), 1)
        draft = Draft.guess(tokens, tree, fits)
        if distribution is not None and shape:
            draft = (
                self._draw(draft, distribution, rng)
                if self._draws
                else self._choose(draft, distribution, Tree.of(shape, device))
            )
        return replace(draft, probe=probe.expand(len(room), -1), embeddings=self.embeddings)

    def _draw(self, draft: Draft, distribution: Distribution, rng: CounterRNG) -> Draft:
        """The chain's tokens, each drawn from its own distribution."""
        rng.reserve(self._guesses)
        tokens, source = draft.tokens.clone(), torch.full_like(draft.tokens, -1)
        for node in range(self._guesses):
            tokens[:, node] = rng.sample(distribution.column(node), node, Purpose.DRAW, draft.live[:, node])
            source[:, node] = node
        return replace(draft, tokens=tokens, distributions=distribution, source=source, mixed=True)

    def _choose(self, draft: Draft, distribution: Distribution, tree: Tree) -> Draft:
        """The tree's tokens: the likeliest of each position."""
        ids, probs = distribution.top(tree.width)  # [B, L, W]
        at = (tree.depths * tree.width + tree.ranks).expand(draft.rows, -1)
        chosen, single = ids.flatten(1).gather(1, at), probs.flatten(1).gather(1, at).double()
        value = (tree.ancestors.double() @ single.clamp(min=1e-30).log()[..., None])[..., 0].exp()
        probes = draft.size - tree.size
        live = ((draft.live & F.pad(chosen >= 0, (0, probes), value=True))[:, None] | ~draft.tree.ancestors).all(-1)
        tokens = torch.cat([chosen.clamp(min=0), draft.tokens[:, tree.size :]], 1)
        return replace(draft, tokens=tokens, live=live, belief=F.pad(value, (0, probes)))

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        """Keep the target's distributions after the look-ahead nodes at the end of the accepted path."""
        self._distribution = None
        if not self._ahead:
            return
        last = verdict.path.gather(1, (verdict.accepted - 1).clamp(min=0)[:, None])[:, 0]
        ended = torch.where(verdict.accepted > 0, last + 1, 0)  # 0 is the root
        rows = 1 + self._guesses + ended[:, None] * self._ahead
        rows = rows + torch.arange(self._ahead, device=rows.device)
        # fixed guesses rank tokens by the target's distribution at temperature 1
        self._distribution = (
            scores.distributions(rows) if self._draws else to_distribution(scores.logits(rows), Sampling())
        )

    def end(self) -> None:
        self._distribution = None
