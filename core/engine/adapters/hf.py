"""Any causal language model of transformers as a target, with transformers' own cache.

A tree is scored in one pass if the class honours a four-dimensional attention mask (tested once, with a tree of two
leaves), else with one batch row per leaf. The cache is cut by slicing its tensors, since the meaning of `crop` differs
between versions. Favours compatibility over speed: our own decoder is several times faster on the architectures that it
supports. transformers is imported only when a model is given.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.adapters.model_parts import SharesWeights, tapped
from outrider.core.engine.adapters.tree_by_rows import BranchScorer
from outrider.core.engine.kv_cache.rows import (
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

_CHUNK = 512  # prompt tokens per pass
# names of the context length in transformers configs
_CONTEXT = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "max_target_positions", "seq_length")


@dataclass(frozen=True, kw_only=True, eq=False)
class ModelInterface:
    """Inputs and outputs of a model that is not a plain causal language model: one that predicts other ids than it
    reads, or whose prompt has more than ids. It may hold the inputs of one generation."""

    trunk: Any  # the module with the cache
    vocabulary: int  # the number of ids that it predicts
    inputs: Callable[[Tensor, Tensor], dict[str, Any]]  # ids and positions [B, Q] -> keyword arguments of the trunk
    logits: Callable[[Any], Tensor]  # the trunk's output -> logits [B, Q, V]
    new_cache: Callable[[], Any] | None = None  # default: the kind that the trunk's config implies
    wrap_cache: Callable[[Any, int], Any] | None = None  # cache and batch size -> the trunk's past_key_values
    weights: tuple[Any, ...] = ()  # the modules that a pass reads; default: the trunk
    lookup_tables: tuple[Tensor, ...] = ()  # parameters of these that are only read row by row

    @property
    def weight_bytes(self) -> int:
        """The bytes of weights that a pass reads, without lookup tables."""
        tables = {id(table) for table in self.lookup_tables}
        weights = {id(weight): weight for module in self.weights or (self.trunk,) for weight in module.parameters()}
        return sum(weight.numel() * weight.element_size() for key, weight in weights.items() if key not in tables)


@dataclass(frozen=True, eq=False)
class Mark:
    """A state to rewind to."""

    rows: Rows
    pipeline: LogitsPipeline


class TransformersTarget(SharesWeights):
    """A transformers model with its cache, in which column j holds token j of every row that is long enough.

    `trees`: how trees are scored, "mask" or "branches"; None tests what the model supports. Taps: "embedding",
    "layer.0" to "layer.{L - 2}" and "last" (normed), as transformers returns them.
    """

    rollback = True

    def __init__(self, model: Any, *, trees: str | None = None, interface: ModelInterface | None = None) -> None:
        if trees not in (None, "mask", "branches"):
            raise unknown("way of scoring trees", trees, ("mask", "branches"))
        self.model = model.eval()
        self._interface = interface or causal_lm(model)
        trunk = self._interface.trunk
        config = trunk.config.get_text_config(decoder=True)
        self.vocabulary = self._interface.vocabulary
        self.context = context_of(config)
        self.dtype, self.device = model.dtype, model.device
        self._refuse(rollback_obstacle(trunk, self._interface.new_cache))
        self.weight_bytes = self._interface.weight_bytes
        layers = getattr(config, "decoder_layers", None) or config.num_hidden_layers
        self.taps = ("embedding", *(f"layer.{index}" for index in range(layers - 1)), "last")
        self._needs: frozenset[str] = frozenset()
        self._cache: Any = None
        self._positions_by_column = self._takes_positions_from_columns(config)
        self._score_branches = BranchScorer(self._forward)
        self._refuse(self._foreign_entries() if interface is None else None)
        self.trees = trees or ("mask" if self._supports_tree_mask() else "branches")

    def _refuse(self, reason: str | None) -> None:
        if reason is not None:
            raise Incompatible(
                f"{type(self.model).__name__} {reason}, so rejected tokens could not be removed from its cache; "
                "decode it with transformers' own generate()"
            )

    def _new_cache(self) -> Any:
        interface = self._interface
        return default_cache(interface.trunk) if interface.new_cache is None else interface.new_cache()

    def _forward(self, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """One pass over ids [B, Q] after the cache's columns -> logits [B, Q, V] and the states at the taps."""
        interface = self._interface
        if self._positions_by_column and mask.dim() == 2 and not bool(mask.all()):
            return self._forward_by_row(ids, mask.bool(), positions)
        inputs = interface.inputs(ids, positions.clamp(0, self.context - 1))
        cache = self._cache if interface.wrap_cache is None else interface.wrap_cache(self._cache, len(ids))
        out = interface.trunk(
            **inputs,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            output_hidden_states=bool(self._needs),
        )
        return interface.logits(out), tapped(self.model, self.taps, out, self._needs)

    def _takes_positions_from_columns(self, config: Any) -> bool:
        """Whether the class derives positions from cache columns, because it takes no position ids or has local
        attention over columns. Each row then needs a cache without gaps."""
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        local = "local" in getattr(config, "attention_layers", ())  # GPT-Neo
        local = local or (self._interface.new_cache is None and has_windows(self._interface.trunk))
        return local or "position_ids" not in self._interface.inputs(ids, ids)

    def _forward_by_row(self, ids: Tensor, mask: Tensor, positions: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """`_forward` for one row at a time, each with a cache of only the columns that its mask [B, T + Q] selects."""
        batch_cache, count = self._cache, ids.shape[1]
        past, real = mask[:, :-count], mask[:, -count:]
        new_entries: list[list[tuple[Tensor, Tensor]]] = []
        outputs: list[tuple[Tensor, dict[str, Tensor]]] = []
        for row in range(len(ids)):
            self._cache, new = self._new_cache(), real[row].nonzero()[:, 0]
            size = len(new)
            for index, layer in enumerate(batch_cache.layers):
                if layer.is_initialized:
                    keys, values = (part[row, None, :, past[row]] for part in (layer.keys, layer.values))
                    self._cache.update(keys, values, index)
            ones = torch.ones_like(mask[row, None, : past[row].sum() + size]).long()
            logits, hidden = self._forward(ids[row, None, new], ones, positions[row, None, new])
            hidden = {tap: _spread(states, new, count, 1) for tap, states in hidden.items()}
            outputs.append((_spread(logits, new, count, 1), hidden))
            entries = [(layer.keys[:, :, -size:], layer.values[:, :, -size:]) for layer in self._cache.layers]
            new_entries.append([(_spread(k, new, count, 2), _spread(v, new, count, 2)) for k, v in entries])
        self._cache = batch_cache
        for index, rows in enumerate(zip(*new_entries, strict=True)):
            keys, values = (torch.cat(parts) for parts in zip(*rows, strict=True))
            batch_cache.update(keys, values, index)
        hidden = {tap: torch.cat([states[tap] for _, states in outputs]) for tap in self._needs}
        return torch.cat([logits for logits, _ in outputs]), hidden

    @torch.no_grad()
    def _foreign_entries(self) -> str | None:
        """The reason not to use a class whose cache has other entries than those of the tokens read; else None."""
        self._cache, ids = self._new_cache(), torch.zeros(1, 1, dtype=torch.long, device=self.device)
        self._forward(ids, torch.ones_like(ids), torch.zeros_like(ids))
        lengths = {layer.keys.shape[2] for layer in self._cache.layers if layer.is_initialized}
        return None if lengths == {1} else "keeps entries in its cache that are not of tokens"

    @torch.no_grad()
    def _supports_tree_mask(self) -> bool:
        """Whether the class honours a mask per token: a leaf must get the same logits with and without a sibling."""
        ids = torch.arange(1, 4, device=self.device) % self.vocabulary
        if self._positions_by_column:
            return False
        mask = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], device=self.device).bool()
        try:
            self._cache = self._new_cache()
            positions = torch.tensor([[0, 1, 1]], device=self.device)
            tree, _ = self._forward(ids[None], self._additive(mask[None]), positions)
            self._cache = self._new_cache()
            chain, _ = self._forward(
                ids[None, [0, 2]],
                torch.ones(1, 2, dtype=torch.long, device=self.device),
                torch.tensor([[0, 1]], device=self.device),
            )
        except (ValueError, RuntimeError, TypeError, IndexError):
            return False
        close = {torch.float64: 1e-8, torch.float32: 1e-3}.get(self.dtype, 0.1)
        return bool((tree[0, 2] - chain[0, 1]).abs().max() <= close * chain.float().std().clamp(min=1e-3))

    def _additive(self, mask: Tensor) -> Tensor:
        """[B, Q, C] bool -> [B, 1, Q, C], to add to attention scores."""
        bias = torch.zeros(mask.shape, dtype=self.dtype, device=self.device)
        return bias.masked_fill_(~mask, torch.finfo(self.dtype).min)[:, None]

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        longest = longest_of(prompts, needs, self.taps, self.context)
        self._needs = needs
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._cache = self._new_cache()
        tapped: dict[str, list[Tensor]] = {tap: [] for tap in needs}
        ids = unread_rows(prompts, self.device).pending
        for start in range(0, longest - 1, _CHUNK):
            stop = min(start + _CHUNK, longest - 1)
            positions = torch.arange(start, stop, device=self.device).expand(len(ids), -1)
            mask = torch.ones(len(ids), stop, dtype=torch.long, device=self.device)
            for tap, states in self._forward(ids[:, start:stop], mask, positions)[1].items():
                tapped[tap].append(states)
        self._rows = prefilled_rows(prompts, self.device, True)
        self._scored = -1
        return Prefill({tap: torch.cat(chunks, 1) for tap, chunks in tapped.items() if chunks})

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
        filled = torch.arange(columns, device=self.device) < rows.entries[:, None]  # [B, T]
        if self.trees == "branches" and not draft.tree.is_chain:
            logits, hidden = self._score_branches(self._cache, rows, draft, filled)
        elif not ids.shape[1]:
            logits, hidden = torch.zeros(len(ids), 0, self.vocabulary, dtype=self.dtype, device=self.device), {}
        elif self.trees == "branches":
            real = torch.arange(wait, device=self.device) < rows.pending_count[:, None]
            visible = torch.cat([filled, real, torch.ones_like(draft.live)], 1)
            logits, hidden = self._forward(ids, visible.long(), positions)
        else:
            scratch = scratch_mask(rows, draft)[:, skip:].expand(len(ids), -1, -1)
            mask = torch.cat([filled[:, None].expand(-1, ids.shape[1], -1), scratch], 2)
            logits, hidden = self._forward(ids, self._additive(mask), positions)
        self._scored = draft.size
        hidden = {tap: at_nodes(states, rows, draft, first, since) for tap, states in hidden.items()}
        logits = at_nodes(logits, rows, draft, first, since)
        return Scores(draft, self._pipeline, rows.committed, logits, hidden, first)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        rows, scored = self._rows, self._scored
        self._rows, tokens, kept = advance(rows, scored, draft, verdict, count, True)
        self._pipeline.commit(tokens, verdict.known(count))
        self._scored = -1
        if scored < 0:
            return
        wait, columns = rows.pending.shape[1], max(rows.host)
        length = columns + wait + scored
        column = torch.arange(length, device=self.device).expand(len(kept), -1)
        stays = (column < rows.entries[:, None]) | (column >= columns) & (
            column < columns + rows.pending_count[:, None]
        )
        path = torch.where(kept, verdict.path + columns + wait, length)
        stays = torch.nn.functional.pad(stays, (0, 1)).scatter(1, path, True)[:, :length]
        longest = max(self._rows.host)
        order = (~stays).to(torch.uint8).argsort(dim=1, stable=True)[:, :longest]
        in_order = order == torch.arange(longest, device=self.device)
        unused = torch.arange(longest, device=self.device) >= self._rows.entries[:, None]
        if bool((in_order | unused).all()):
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
        read = mark.rows is self._rows and self._scored >= 0  # the pending tokens stay read
        self._rows, self._pipeline, self._scored = mark.rows, copy.copy(mark.pipeline), 0 if read else -1
        self._cut(max(mark.rows.host) + (mark.rows.pending.shape[1] if read else 0))

    def _cut(self, columns: int) -> None:
        """Keep the first `columns` columns. For none a new cache is made, since a cut one would keep its batch size."""
        if columns:
            cut(self._cache, columns)
        else:
            self._cache = self._new_cache()

    def end(self) -> None:
        self._cache = None


def _spread(part: Tensor, index: Tensor, count: int, dim: int) -> Tensor:
    """Zeros with `count` entries in a dimension, those at `index` taken from `part`."""
    shape = list(part.shape)
    shape[dim] = count
    return part.new_zeros(shape).index_copy_(dim, index, part)


def longest_of(prompts: Prompts, needs: frozenset[str], taps: Sequence[str], context: int) -> int:
    """The length of the longest prompt; refuses one beyond the context, and hidden states that the model has not."""
    for tap in sorted(needs):
        if tap not in taps:
            raise unknown("hidden tap", tap, taps)
    longest = max(map(len, prompts))
    if longest > context:
        raise InvalidOption(f"a prompt has {longest} tokens and the model's context is {context}; shorten the prompt")
    return longest


def context_of(config: Any) -> int:
    """The most tokens that a class takes by its configuration."""
    lengths = (getattr(config, name, None) for name in _CONTEXT)
    return next((length for length in lengths if isinstance(length, int) and length > 0), 1 << 30)


def causal_lm(model: Any) -> ModelInterface:
    """The interface of a plain causal language model."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    parameters = inspect.signature(model.forward).parameters
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    tied = head is not None and head.weight is embedding.weight

    def inputs(ids: Tensor, positions: Tensor) -> dict[str, Any]:
        arguments = {"input_ids": ids.clamp(0, vocabulary - 1)}
        return arguments | {"position_ids": positions} if "position_ids" in parameters else arguments

    return ModelInterface(
        trunk=model,
        vocabulary=vocabulary,
        inputs=inputs,
        logits=lambda out: out.logits[..., :vocabulary],
        lookup_tables=() if tied else (embedding.weight,),
    )


def default_cache(model: Any) -> Any:
    """An empty cache of the kind that the model's config implies, in which layers with attention windows keep all
    entries: the class masks those outside a window, and a rejected draft may bring them back into it."""
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    cache = DynamicCache(config=model.config)
    cache.layers = [DynamicLayer() if type(layer) is DynamicSlidingWindowLayer else layer for layer in cache.layers]
    return cache


def has_windows(model: Any) -> bool:
    """Whether some layers attend within a window, which the class measures in cache columns."""
    from transformers import DynamicCache

    return any(getattr(layer, "is_sliding", False) for layer in DynamicCache(config=model.config).layers)


def cut(cache: Any, columns: int) -> None:
    """Keep the first `columns` columns of the cache."""
    for layer in cache.layers:
        if layer.is_initialized and layer.keys.shape[2] > columns:
            layer.keys, layer.values = layer.keys[:, :, :columns], layer.values[:, :, :columns]


def rollback_obstacle(model: Any, new_cache: Callable[[], Any] | None = None) -> str | None:
    """Why this model's cache cannot be cut back, as the predicate of a sentence; None if it can."""
    parameters = inspect.signature(model.forward).parameters
    if "past_key_values" not in parameters and not {"cache_params", "state", "mems"} & {*parameters}:
        return "takes no cache of keys and values"
    if "past_key_values" not in parameters or getattr(model, "_is_stateful", False):
        return "keeps a recurrent state that only moves forward"
    if new_cache is None and has_windows(model) and not masks_windows(model):
        return "attends within a sliding window by dropping older entries"
    for layer in (default_cache(model) if new_cache is None else new_cache()).layers:
        if type(layer).__name__ == "DynamicSlidingWindowLayer":
            return "attends within a sliding window by dropping older entries"
        if type(layer).__name__ != "DynamicLayer":
            return f"uses a cache of an unsupported kind ({type(layer).__name__})"
    return None


def masks_windows(model: Any) -> bool:
    """Whether the class masks entries outside its attention windows instead of relying on a cache that drops them."""
    makers = ("create_sliding_window_causal_mask", "create_chunked_causal_mask")
    files = (sys.modules[type(module).__module__] for module in model.modules())
    return any(maker in vars(file) for file in files for maker in makers)
