"""Any causal language model of transformers as a target, on the cache that transformers itself keeps for it.

Trees are scored in one pass where the class takes a mask of four dimensions (it is asked once, with a tree of two
leaves), else each leaf's branch as a row. The cache is cut by slicing its tensors, since what `crop` means has changed
between versions. transformers is imported when a model is given, not before. Right before it is fast: our own decoder
is several times quicker on the architectures it knows.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.adapters.tree_by_rows import Branches
from outrider.core.engine.kv_cache.cache import (
    Rows,
    advance,
    prefilled_rows,
    scratch_mask,
    sequence_positions,
    unread_rows,
)
from outrider.core.engine.self_draft_views import at_nodes
from outrider.core.errors import Incompatible, InvalidOption, unknown
from outrider.core.protocol import Prefill, Prompts, Scores

_PIECE = 512  # prompt tokens a pass
_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "max_target_positions", "seq_length")


@dataclass(frozen=True, kw_only=True, eq=False)
class Reading:
    """How a class is read that is no plain causal language model: one that says other ids than it reads, or whose
    prompt is more than ids. Made for one generation where it holds what that generation reads."""

    trunk: Any  # the module that has the cache
    vocabulary: int  # ids that it says
    read: Callable[[Tensor, Tensor], dict[str, Any]]  # ids and positions [B, Q] -> what the trunk is given
    say: Callable[[Any], Tensor]  # what comes out of the trunk -> logits [B, Q, V]
    cache: Callable[[], Any] | None = None  # an empty one; default: of the kind that the trunk wants
    through: Callable[[Any, int], Any] | None = None  # the cache as the trunk takes it, with so many rows
    weights: tuple[Any, ...] = ()  # the modules that a pass reads; default: the trunk
    looked_up: tuple[Tensor, ...] = ()  # of their parameters, those that are read row by row

    @property
    def weight_bytes(self) -> int:
        """What a pass reads."""
        apart = {id(one) for one in self.looked_up}
        found = {id(one): one for module in self.weights or (self.trunk,) for one in module.parameters()}
        return sum(one.numel() * one.element_size() for key, one in found.items() if key not in apart)


@dataclass(frozen=True, eq=False)
class Mark:
    """A place to rewind to."""

    rows: Rows
    pipeline: LogitsPipeline


class TransformersTarget:
    """A model of transformers with its cache, whose column j holds token j of every row that is so long.

    `trees` says how trees are scored: "mask" or "branches"; None finds out. Taps: "embedding", "layer.0" to
    "layer.{L - 2}" and "last" (normed), as transformers hands them out.
    """

    rollback = True

    def __init__(self, model: Any, *, trees: str | None = None, reading: Reading | None = None) -> None:
        if trees not in (None, "mask", "branches"):
            raise unknown("way of scoring trees", trees, ("mask", "branches"))
        self.model = model.eval()
        self._reading = reading or plain(model)
        trunk = self._reading.trunk
        config = trunk.config.get_text_config(decoder=True)
        self.vocabulary = self._reading.vocabulary
        lengths = (getattr(config, name, None) for name in _CONTEXT)
        self.context = next((length for length in lengths if isinstance(length, int) and length > 0), 1 << 30)
        self.dtype, self.device = model.dtype, model.device
        if reason := obstacle(trunk, self._fresh):
            raise Incompatible(
                f"{type(model).__name__} {reason}, so rejected guesses could not be undone; "
                "decode it with transformers' own generate()"
            )
        self.weight_bytes = self._reading.weight_bytes
        layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
        self.taps = ("embedding", *(f"layer.{index}" for index in range(layers - 1)), "last")
        self._needs: frozenset[str] = frozenset()
        self._cache: Any = None
        self._by_column = self._counts_columns(config)
        self._branches = Branches(self._forward)
        self.trees = trees or ("mask" if self._masks() else "branches")

    def _fresh(self) -> Any:
        return fresh(self._reading.trunk) if self._reading.cache is None else self._reading.cache()

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One pass over ids [B, Q] behind the cache -> logits [B, Q, V] and the states at the taps."""
        reading = self._reading
        if self._by_column and mask.dim() == 2 and not bool(mask.all()):
            return self._forward_rows(ids, mask.bool(), positions)
        given = reading.read(ids, positions.clamp(0, self.context - 1))
        cache = self._cache if reading.through is None else reading.through(self._cache, len(ids))
        out = reading.trunk(
            **given,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(self._needs),
        )
        names = dict(zip(self.taps, out.hidden_states or (), strict=False)) if self._needs else {}
        if self._needs:
            names["last"] = out.hidden_states[-1]
        return reading.say(out), {tap: names[tap] for tap in self._needs}

    def _counts_columns(self, config: Any) -> bool:
        """Whether the class takes a token's position from its column in the cache: where it takes no positions, or
        attends within so many columns. Then each row needs a cache without gaps."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo
        return local or "position_ids" not in self._reading.read(ids, ids)

    def _forward_rows(self, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`_forward` of one row after the other, each over the columns [B, T + Q] that its mask names."""
        joint, count = self._cache, ids.shape[1]
        past, real = mask[:, :-count], mask[:, -count:]
        grown: list[list[tuple[Tensor, Tensor]]] = []
        said: list[tuple[Tensor, dict[str, Tensor]]] = []
        for row in range(len(ids)):
            self._cache, new = self._fresh(), real[row].nonzero()[:, 0]
            for index, layer in enumerate(joint.layers):
                if layer.is_initialized:
                    self._cache.update(
                        layer.keys[row, None, :, past[row]], layer.values[row, None, :, past[row]], index
                    )
            logits, hidden = self._forward(
                ids[row, None, new],
                torch.ones_like(mask[row, None, : past[row].sum() + len(new)]).long(),
                positions[row, None, new],
            )
            said.append(
                (_spread(logits, new, count, 1), {tap: _spread(part, new, count, 1) for tap, part in hidden.items()})
            )
            size = len(new)
            grown.append(
                [
                    (
                        _spread(layer.keys[:, :, -size:], new, count, 2),
                        _spread(layer.values[:, :, -size:], new, count, 2),
                    )
                    for layer in self._cache.layers
                ]
            )
        self._cache = joint
        for index, parts in enumerate(zip(*grown, strict=True)):
            joint.update(*(torch.cat(side) for side in zip(*parts, strict=True)), index)
        hidden = {tap: torch.cat([part[1][tap] for part in said]) for tap in self._needs}
        return torch.cat([part[0] for part in said]), hidden

    @torch.no_grad()
    def _masks(self) -> bool:
        """Does the class take a mask for each token? Two leaves on one root must not see each other."""
        ids = torch.arange(1, 4, device=self.device) % self.vocabulary
        if self._by_column:
            return False
        sees = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], device=self.device).bool()
        try:
            self._cache = self._fresh()
            tree, _ = self._forward(ids[None], self._added(sees[None]), torch.tensor([[0, 1, 1]], device=self.device))
            self._cache = self._fresh()
            alone, _ = self._forward(
                ids[None, [0, 2]],
                torch.ones(1, 2, dtype=torch.long, device=self.device),
                torch.tensor([[0, 1]], device=self.device),
            )
        except (ValueError, RuntimeError, TypeError, IndexError):
            return False
        close = {torch.float64: 1e-8, torch.float32: 1e-3}.get(self.dtype, 0.1)
        return bool((tree[0, 2] - alone[0, 1]).abs().max() <= close * alone.float().std().clamp(min=1e-3))

    def _added(self, mask: Tensor) -> Tensor:
        """[B, Q, C] bool -> [B, 1, Q, C] to be added to attention's logits."""
        added = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return added.masked_fill_(~mask, torch.finfo(self.dtype).min)[:, None]

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        for tap in sorted(needs):
            if tap not in self.taps:
                raise unknown("hidden tap", tap, self.taps)
        longest = max(map(len, prompts))
        if longest > self.context:
            raise InvalidOption(
                f"a prompt has {longest} tokens and the model's context is {self.context}; shorten the prompt"
            )
        self._needs = needs
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._cache = self._fresh()
        found: dict[str, list[Tensor]] = {tap: [] for tap in needs}
        ids = unread_rows(prompts, self.device).pending
        for start in range(0, longest - 1, _PIECE):
            stop = min(start + _PIECE, longest - 1)
            positions = torch.arange(start, stop, device=self.device).expand(len(ids), -1)
            whole = torch.ones(len(ids), stop, dtype=torch.long, device=self.device)
            for tap, states in self._forward(ids[:, start:stop], whole, positions)[1].items():
                found[tap].append(states)
        self._rows = prefilled_rows(prompts, self.device, True)
        self._scored = -1
        return Prefill({tap: torch.cat(parts, 1) for tap, parts in found.items() if parts})

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        rows, wait = self._rows, self._rows.pending.shape[1]
        if since is not None and (since > self._scored or self.trees == "branches"):
            since = None
        skip = 0 if since is None else wait + since
        columns = max(rows.host)
        self._cut(columns + skip)
        ids, positions = torch.cat([rows.pending, draft.tokens], 1)[:, skip:], sequence_positions(rows, draft)[:, skip:]
        read = torch.arange(columns, device=self.device) < rows.entries[:, None]  # [B, T]
        if self.trees == "branches" and not draft.tree.is_chain:
            logits, hidden = self._branches(self._cache, rows, draft, read)
        elif not ids.shape[1]:
            logits, hidden = torch.zeros(len(ids), 0, self.vocabulary, dtype=self.dtype, device=self.device), {}
        elif self.trees == "branches":
            real = torch.arange(wait, device=self.device) < rows.pending_count[:, None]
            seen = torch.cat([read, real, torch.ones_like(draft.live)], 1)
            logits, hidden = self._forward(ids, seen.long(), positions)
        else:
            sight = scratch_mask(rows, draft)[:, skip:].expand(len(ids), -1, -1)
            mask = torch.cat([read[:, None].expand(-1, ids.shape[1], -1), sight], 2)
            logits, hidden = self._forward(ids, self._added(mask), positions)
        self._scored = draft.size
        rest = {tap: at_nodes(states, rows, draft, first, since) for tap, states in hidden.items()}
        logits = at_nodes(logits, rows, draft, first, since)
        return Scores(draft, self._pipeline, rows.committed, logits, rest, first)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        rows, scored = self._rows, self._scored
        self._rows, tokens, kept = advance(rows, scored, draft, verdict, count, True)
        self._pipeline.commit(tokens)
        self._scored = -1
        if scored < 0:
            return
        wait, columns = rows.pending.shape[1], max(rows.host)
        length = columns + wait + scored
        place = torch.arange(length, device=self.device).expand(len(kept), -1)
        stays = (place < rows.entries[:, None]) | (place >= columns) & (place < columns + rows.pending_count[:, None])
        path = torch.where(kept, verdict.path + columns + wait, length)
        stays = torch.nn.functional.pad(stays, (0, 1)).scatter(1, path, True)[:, :length]
        longest = max(self._rows.host)
        order = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        wanted = torch.arange(longest, device=self.device)
        behind_rows = wanted >= self._rows.entries[:, None]
        if bool(((order == wanted) | behind_rows).all()):
            self._cut(longest)
            return
        for layer in self._cache.layers:
            index = order[:, None, :, None].expand(-1, layer.keys.shape[1], -1, -1)
            layer.keys = layer.keys.gather(2, index.expand(-1, -1, -1, layer.keys.shape[3]))
            layer.values = layer.values.gather(2, index.expand(-1, -1, -1, layer.values.shape[3]))

    def mark(self) -> object:
        return Mark(self._rows, copy.copy(self._pipeline))

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        read = mark.rows is self._rows and self._scored >= 0  # what waited stays read
        self._rows, self._pipeline, self._scored = mark.rows, copy.copy(mark.pipeline), 0 if read else -1
        self._cut(max(mark.rows.host) + (mark.rows.pending.shape[1] if read else 0))

    def _cut(self, columns: int) -> None:
        """An empty cache is a new one: one of no columns would still be of so many rows."""
        if columns:
            cut(self._cache, columns)
        else:
            self._cache = self._fresh()

    def end(self) -> None:
        self._cache = None


def _spread(part: Tensor, places: Tensor, count: int, dim: int) -> Tensor:
    """The entries of a dimension at their places among `count`; 0 elsewhere."""
    shape = list(part.shape)
    shape[dim] = count
    return part.new_zeros(shape).index_copy_(dim, places, part)


def plain(model: Any) -> Reading:
    """A causal language model."""
    vocabulary, takes = int(model.config.get_text_config().vocab_size), inspect.signature(model.forward).parameters
    outer, inner = model.get_output_embeddings(), model.get_input_embeddings()
    tied = outer is not None and outer.weight is inner.weight

    def read(ids: Tensor, positions: Tensor) -> dict[str, Any]:
        given = {"input_ids": ids.clamp(0, vocabulary - 1)}
        return given | {"position_ids": positions} if "position_ids" in takes else given

    return Reading(
        trunk=model,
        vocabulary=vocabulary,
        read=read,
        say=lambda out: out.logits[..., :vocabulary],
        looked_up=() if tied else (inner.weight,),
    )


def fresh(model: Any) -> Any:
    """An empty cache of the kind that the model wants."""
    from transformers import DynamicCache

    return DynamicCache(config=model.config)


def cut(cache: Any, columns: int) -> None:
    """Leave so many columns."""
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[2] > columns:
            layer.keys, layer.values = layer.keys[:, :, :columns], layer.values[:, :, :columns]


def obstacle(model: Any, empty: Callable[[], Any] | None = None) -> str | None:
    """Why this model's cache cannot be cut back; None: it can."""
    if "past_key_values" not in inspect.signature(model.forward).parameters or getattr(model, "_is_stateful", False):
        return "keeps a recurrent state that only moves forward"
    for layer in (fresh(model) if empty is None else empty()).layers:
        if getattr(layer, "is_sliding", False):
            return "attends within a sliding window and forgets what falls out of it"
        if type(layer).__name__ != "DynamicLayer":
            return f"keeps a cache of its own kind ({type(layer).__name__})"
    return None
