"""The EAGLE family: a small decoder predicts the target's next hidden state from the last state and the next token, and
continues from its own states while drafting.

All share the target's embedding and output rows. `unrolled` trains them on their own states, as they will draft
(EAGLE-3's training-time test; HASS, arXiv 2408.15766).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.drafters.length_policies import Policy
from outrider.core.drafters.trained.drafter import Learned
from outrider.core.drafters.trained.head_runner import ready
from outrider.core.drafters.trained.heads import PrefixCache, before, causal, kept
from outrider.core.drafters.trained.lora import adapted
from outrider.core.engine.native.draft_tree import NativeTree
from outrider.core.engine.trainable.block import Angles, AttentionMask, Block, Matrix, Norm, Rounds
from outrider.core.engine.trainable.shared_embedding import SharedEmbedding, weight_bytes
from outrider.core.engine.types import Config, Variant
from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels.native import Tiled
from outrider.core.training.draft_head import Batch, DraftHead, Guess, agreement, guessed
from outrider.core.training.losses import Loss

TAP_NORMS = ("each", "joint", "none")


def unrolled(
    angles: Angles, batch: Batch, x: Tensor, advance: Callable[[Tensor, Tensor, AttentionMask], Tensor]
) -> Iterator[Tensor]:
    """Endless rounds of unrolled drafting, each as the states [N, S] at the positions that count for the loss. Round 1
    reads the target's states x [B, T, F], each later one those of the round before, shifted by one token."""
    first = causal(angles, batch, x)
    position = batch.positions[0]
    visible = (position > 0) & (position <= position[:, None])
    round_kv: Rounds = {}
    number = 0
    while True:
        if number:
            visible = visible & (position <= position[:, None] - number)
        attn_mask = replace(first, mask=first.mask if not number else visible[None], rounds=round_kv)
        states = advance(x, batch.tokens, attn_mask)
        yield states[batch.answer & (batch.positions >= number)]
        x, number = before(states), number + 1


class EagleHead(DraftHead):
    """EAGLE (arXiv 2401.15077): a decoder layer reads the target's last state and the next token's embedding, combined
    by one matrix, and predicts the next last state, to which the target's output layer applies. The loss adds `regress`
    times a smooth L1 loss of that state, in the paper's ratio; training adds `noise` to the states it reads. Ours
    starts as a copy of the target's last layer, and with more than one of `rounds` is trained on its own states too.
    Its tree is static; with dynamic trees it is EAGLE-2 (arXiv 2406.16858)."""

    parallel, cached_layers, draft_kind, taps, depth = False, 1, "tree", ("last",), None
    needs = frozenset({"last"})

    def __init__(
        self,
        target: Any,
        *,
        rounds: int = 1,
        regress: float = 10.0,
        noise: float = 0.1,
        normed: bool = True,
        hidden: int = 0,
        form: Mapping[str, Any] | None = None,
        own_embedding: bool = False,
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        network = target.network
        self.words = SharedEmbedding(network, vocabulary, own_embedding=own_embedding)
        self.form = shaped(network.config, hidden, form)
        self.rounds, self.regress, self.noise, self.fade = rounds, regress, noise, fade
        self.config = {
            "rounds": rounds,
            "regress": regress,
            "noise": noise,
            "normed": normed,
            "hidden": hidden,
            "form": dict(form or {}),
            "own_embedding": own_embedding,
            "vocabulary": kept(self.words),
            "fade": fade,
        }
        width = self.form.hidden_size
        self.fuse = Matrix(2 * width, width, bias=True)
        self.block = Block(self.form, normed=normed)
        for layer in network.layers[-1:]:
            self.block.copy(layer)
        self.angles = Angles(self.form)
        with torch.no_grad():  # starts with the target's state and a little of the token's embedding
            self.fuse.weight[:, width:] = torch.eye(width)
            for last in (self.block.attention.out, self.block.mlp.down):
                last.weight.zero_()  # the last layer adds values in the hundreds; this state is normed

    def advance(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        """States [B, Q, D] and the next tokens [B, Q] -> the predicted next states [B, Q, D]."""
        embedded = self.words.embed(tokens).to(features.dtype)
        states: Tensor = self.block(self.fuse(torch.cat([embedded, features], -1)), attn_mask)
        return states

    def _rounds(self, batch: Batch) -> Iterator[Tensor]:
        x = before(batch.taps["last"].to(self.fuse.weight.dtype))
        if self.training and self.noise:
            x = x + (torch.rand_like(x) * 2 - 1) * self.noise
        return unrolled(self.angles, batch, x, self.advance)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        return round_guesses(self, self._rounds(batch), self.rounds)

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        states = [own for own, _ in zip(self._rounds(batch), range(self.rounds), strict=False)]
        regression = F.smooth_l1_loss(states[0], batch.taps["last"][batch.answer].to(states[0].dtype))
        return guessed(round_guesses(self, iter(states), self.rounds), batch, loss) + self.regress * regression

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return agreement(list(round_guesses(self, self._rounds(batch), depth)), batch, depth)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.advance(features, tokens, attn_mask)

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        return self.advance(states, tokens, attn_mask)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


class Eagle3Head(DraftHead):
    """EAGLE-3 (arXiv 2503.01840): reads states from a low, a middle and a high layer of the target, combined by one
    matrix, concatenated with embeddings. It is trained on the target's distributions only, unrolled over `rounds` of
    its own states, and can guess within a reduced vocabulary. `steady` norms every tap and the states fed back, as
    EAGLE-3.1 does (arXiv 2605.09992); imported heads may norm the taps one by one (`tap_norm` "each") or side by side
    ("joint"), and the states or not (`normed_output`). Ours starts as a copy of the target's last layer (or is that
    layer with LoRA corrections of rank `lora`), and shares the target's output rows unless it has its `own`. Of more
    `layers` only the first reads embeddings; each may see a window of positions (`windows`, its own included)."""

    parallel, cached_layers, draft_kind = False, 1, "dynamic"
    depth: int | None = None

    def __init__(
        self,
        target: Any,
        *,
        taps: Sequence[str] = (),
        rounds: int = 4,
        steady: bool = True,
        hidden: int = 0,
        form: Mapping[str, Any] | None = None,
        normed_residual: bool = False,
        tap_norm: str | None = None,
        normed_output: bool | None = None,
        own: bool = False,
        own_embedding: bool = False,
        lora: int = 0,
        layers: int = 1,
        windows: Sequence[int | None] = (),
        vocabulary: PrefixCache = 0,
        fade: float = 0.8,
    ) -> None:
        super().__init__()
        network = target.network
        usual = (tap if tap in target.taps else "last" for tap in spread(network.config.layers))
        self.taps = tuple(taps) or tuple(dict.fromkeys(usual))
        for tap in self.taps:
            if tap not in target.taps:
                raise unknown("hidden tap", tap, target.taps)
        if min(rounds, layers) < 1:
            raise InvalidOption(f"rounds={rounds}, layers={layers}: each must be 1 or more")
        if windows and len(windows) != layers:
            raise InvalidOption(f"windows has {len(windows)} values; it must have one for each of {layers} layers")
        self.needs = frozenset(self.taps)
        self.words = SharedEmbedding(network, vocabulary, own=own, own_embedding=own_embedding)
        self.form = shaped(network.config, hidden, {"qk_norm": False, **(form or {})})
        self.rounds, self.steady, self.fade, self.normed_residual = rounds, steady, fade, normed_residual
        self.tap_norm = ("each" if steady else "none") if tap_norm is None else tap_norm
        if self.tap_norm not in TAP_NORMS:
            raise unknown("tap_norm", self.tap_norm, TAP_NORMS)
        self.normed_output = steady if normed_output is None else normed_output
        self.config = {
            "taps": list(self.taps),
            "rounds": rounds,
            "steady": steady,
            "hidden": hidden,
            "form": dict(form or {}),
            "normed_residual": normed_residual,
            "tap_norm": tap_norm,
            "normed_output": normed_output,
            "own": own,
            "own_embedding": own_embedding,
            "lora": lora,
            "layers": layers,
            "windows": list(windows),
            "vocabulary": kept(self.words),
            "fade": fade,
        }
        width, eps = self.form.hidden_size, self.form.norm_eps
        sizes = {"each": [width] * len(self.taps), "joint": [len(self.taps) * width], "none": []}[self.tap_norm]
        self.tap_norms = nn.ModuleList(Norm(size, eps) for size in sizes)
        self.fuse = Matrix(len(self.taps) * width, width)
        self.embedded = Norm(width, eps)
        self.entered = Norm(width, eps)
        self.block = Block(self.form, into=2 * width, normed=False)
        self.norm = Norm(width, eps)
        self.cached_layers, self.windows = layers, tuple(windows)
        self.more: Any = nn.ModuleList(Block(self.form, index=index) for index in range(1, layers))
        copied = network.layers[-layers:]
        for block, layer in zip((self.block, *self.more), copied, strict=False):
            block.copy(layer)
            adapted(block, lora, known=width, changed=bool(hidden or form))
        self.angles = Angles(self.form)
        with torch.no_grad():
            self.fuse.weight.mul_(0.1)
            self.fuse.weight[:, -width:] += torch.eye(width)  # starts with mostly the highest tap
            for layer in copied[:1]:
                self.entered.weight.copy_(layer.attention_norm)
            self.norm.weight.copy_(network.norm)

    def enter(self, features: Tensor) -> Tensor:
        """Concatenated taps [..., F] -> [..., D]."""
        if self.tap_norms:
            parts = features.chunk(len(self.tap_norms), -1)
            features = torch.cat([norm(x) for norm, x in zip(self.tap_norms, parts, strict=True)], -1)
        result: Tensor = self.fuse(features)
        return result

    def advance(
        self, x: Tensor, tokens: Tensor, attn_mask: AttentionMask, kept: list[tuple[Tensor, Tensor]] | None = None
    ) -> Tensor:
        """States [B, Q, D] and the next tokens [B, Q] -> the predicted next states [B, Q, D], normed or not; each
        layer's keys and values are added to `kept`."""
        entered = self.entered(x)
        read = torch.cat([self.embedded(self.words.embed(tokens)), entered], -1)
        masks = [attn_mask.within(window) for window in self.windows or (None,) * self.cached_layers]
        states: Tensor = self.block(entered if self.normed_residual else x, masks[0], read)
        if kept is not None:
            kept.append(self.block.attention.read(read, masks[0]))
        for block, mask in zip(self.more, masks[1:], strict=True):
            if kept is not None:
                kept.append(block.attention.read(block.attention_norm(states), mask))
            states = block(states, mask)
        return self.norm(states) if self.normed_output else states

    def _rounds(self, batch: Batch) -> Iterator[Tensor]:
        x = torch.cat([before(batch.taps[tap]) for tap in self.taps], -1)
        x = self.enter(x.to(self.fuse.weight.dtype))
        return unrolled(self.angles, batch, x, self.advance)

    def guesses(self, batch: Batch) -> Iterable[Guess]:
        return round_guesses(self, self._rounds(batch), self.rounds)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        return agreement(list(round_guesses(self, self._rounds(batch), depth)), batch, depth)

    def open(self, features: Tensor, tokens: Tensor, attn_mask: AttentionMask) -> Tensor:
        return self.advance(self.enter(features), tokens, attn_mask)

    def step(self, states: Tensor, tokens: Tensor, attn_mask: AttentionMask, level: int) -> Tensor:
        return self.advance(states, tokens, attn_mask)

    def logits(self, states: Tensor) -> Tensor:
        return self.words.logits(states if self.normed_output else self.norm(states))

    def native_tree(self) -> NativeTree | None:
        passes, words, fuse = self.block.runner, self.words, self.fuse.fast
        output = words.tiled()
        if passes is None or output is None or not isinstance(fuse, Tiled):
            return None
        if self.tap_norm != "each" or not self.normed_output or self.normed_residual or self.form.qk_norm:
            return None
        if self.more or any(self.windows):
            return None
        norms = [norm.weight.detach() for norm in (self.embedded, self.entered, self.norm)]
        taps = [weight.detach() for weight in self.tap_norms.parameters()]
        return NativeTree(passes, words.embedding, norms, taps, fuse, output, words.vocabulary, words.count)

    @property
    def pass_bytes(self) -> int:
        return weight_bytes(self)

    def drafts(self, target: Any) -> Any:
        return ready(self, target)


def shaped(config: Config, hidden: int, form: Mapping[str, Any] | None) -> Config:
    """The target's configuration with another MLP width, or with other fields `form` (for imported weights)."""
    if form and "heads" in form:  # another model's layer, of which only these fields are known
        config = replace(config, variant=Variant(), rotary_dim=None)
    fields = {**(form or {}), **({"intermediate_size": hidden} if hidden else {})}
    if fields.get("rope_scaling"):
        kind, numbers = fields["rope_scaling"]
        fields["rope_scaling"] = (kind, dict(numbers))
    return replace(config, **fields)


def round_guesses(draft_head: Any, states: Iterator[Tensor], rounds: int) -> Iterator[Guess]:
    """A draft head's guesses in each round of `unrolled`."""
    for number, own in zip(range(rounds), states, strict=False):
        yield Guess(draft_head.logits(own), number + 1, draft_head.fade**number, draft_head.words.vocabulary)


def eagle2(
    head: Any,
    *,
    draft_kind: str = "dynamic",
    length: int = 5,
    policy: Policy | str = "fixed",
    nodes: int = 16,
    width: int = 4,
    depth: int = 5,
    min_probability: float = 0.0,
    sampling: Sampling | None = None,
) -> Learned:
    """EAGLE's drafter with the dynamic trees of EAGLE-2 (arXiv 2406.16858): each level expands the `width` nodes with
    the most probable paths; of all candidates the `nodes` most probable are kept, if they reach `min_probability`."""
    return Learned(
        head,
        draft_kind=draft_kind,
        length=length,
        policy=policy,
        nodes=nodes,
        width=width,
        depth=depth,
        min_probability=min_probability,
        sampling=sampling,
    )


def spread(layers: int) -> tuple[str, ...]:
    """EAGLE-3's taps: a low, a middle and a high layer; the first, middle and last in shallow targets."""
    chosen = (1, layers // 2 - 1, layers - 4) if layers >= 8 else (0, layers // 2, layers - 1)
    return tuple(f"layer.{index}" for index in sorted({max(layer, 0) for layer in chosen}))
