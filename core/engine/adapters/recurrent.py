"""Causal language models of transformers with a recurrent state (Qwen3-Next, Qwen3.5, Falcon-H1, RWKV) as a target.

Such a state cannot be cut back. It is saved before a draft is read, and restored if the draft is not accepted whole;
the tokens committed since are then read again together with the next draft, which adds tokens to a pass but no pass.
Rows are read one by one, and so are the leaves of a tree, each from the saved state. A class that does not continue its
state by several tokens at once would need a pass per token, and is refused.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.adapters.hf import TransformersTarget, causal_lm, context_of, default_cache, longest_of
from outrider.core.engine.adapters.model_parts import SharesWeights, tapped
from outrider.core.engine.adapters.tree_by_rows import leaf_paths
from outrider.core.errors import Incompatible
from outrider.core.protocol import PREFILL_CHUNK, Prefill, Prompts, Scores, committed

_REREAD = 16  # committed tokens that are read again with a draft; more are read before it, in a pass of their own
_TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-3}  # of logits in their standard deviation; else _COARSE
_COARSE = 0.1


def adapter(model: Any, trees: str | None = None) -> TransformersTarget | RecurrentTarget:
    """A target around a model's own code."""
    return RecurrentTarget(model) if is_recurrent(model) else TransformersTarget(model, trees=trees)


def is_recurrent(model: Any) -> bool:
    """Whether the class keeps a recurrent state, with or without a cache of keys and values."""
    if _state_of(model) in ("cache_params", "state"):
        return True
    if _state_of(model) is None:
        return False
    return any(type(layer).__name__.startswith("LinearAttention") for layer in default_cache(model).layers)


def _state_of(model: Any) -> str | None:
    """The argument with which the class takes its cache or state."""
    parameters = inspect.signature(model.forward).parameters
    return next((name for name in ("past_key_values", "cache_params", "state") if name in parameters), None)


@dataclass(eq=False)
class _State:
    """The state of a class that returns a new one from each pass, as RWKV."""

    value: Any = None


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copied(part) for name, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _saved(cache: Any) -> list[dict[str, Any]]:
    """A copy of the recurrent states, and of keys and values within a window; others, which can be cut back, by their
    number."""
    if isinstance(cache, _State):
        return [{"value": _copied(cache.value)}]
    layers = []
    for layer in cache.layers:
        parts, keys = dict(vars(layer)), vars(layer).get("keys")
        if not getattr(layer, "is_sliding", False):
            parts = {name: value for name, value in parts.items() if name not in ("keys", "values")}
        else:
            keys = None
        layers.append(
            _copied(parts) | {"count": keys.shape[2] if isinstance(keys, Tensor) and keys.dim() > 2 else None}
        )
    return layers


def _restore(cache: Any, saved: Sequence[dict[str, Any]]) -> None:
    if isinstance(cache, _State):
        cache.value = _copied(saved[0]["value"])
        return
    for layer, parts in zip(cache.layers, saved, strict=True):
        count = parts["count"]
        for name, value in parts.items():
            if name != "count":
                setattr(layer, name, _copied(value))
        if count is not None:
            layer.keys, layer.values = layer.keys[:, :, :count], layer.values[:, :, :count]


@dataclass(eq=False)
class _Row:
    """A row's committed tokens, how many its state has read, and the draft that was read after them."""

    text: list[int]
    cache: Any
    read: int = 0
    saved: list[dict[str, Any]] | None = None  # the state before the draft and the tokens not read until then
    fed: list[int] = field(default_factory=list)  # the nodes read since

    def rewind(self) -> None:
        """Drop what was read since the state was saved."""
        if self.saved is not None:
            _restore(self.cache, self.saved)
        self.saved, self.fed = None, []


@dataclass(frozen=True, eq=False)
class Mark:
    """A state to rewind to."""

    rows: tuple[tuple[int, int, list[dict[str, Any]]], ...]  # committed tokens, those read, and the state
    pipeline: LogitsPipeline


class RecurrentTarget(SharesWeights):
    """A transformers model with its recurrent state. Taps: "embedding", "layer.0" to "layer.{L - 2}" and "last"
    (normed), as transformers returns them."""

    rollback = True
    trees = "branches"

    def __init__(self, model: Any) -> None:
        self.model = model.eval()
        interface = causal_lm(model)
        self.vocabulary, self.weight_bytes = interface.vocabulary, interface.weight_bytes
        self.dtype, self.device = model.dtype, model.device
        config = model.config.get_text_config(decoder=True)
        self.context = context_of(config)
        self.taps = ("embedding", *(f"layer.{index}" for index in range(config.num_hidden_layers - 1)), "last")
        self._argument = _state_of(model)
        self._parameters = inspect.signature(model.forward).parameters
        self._needs: frozenset[str] = frozenset()
        self._rows: list[_Row] = []
        if not self._continues():
            raise Incompatible(
                f"{type(model).__name__} reads one token per pass once it has a state (three at once gave other "
                "logits), so that drafts would cost a pass per token; decode it with transformers' own generate()"
            )

    def _new_cache(self) -> Any:
        return _State() if self._argument == "state" else default_cache(self.model)

    def _forward(self, cache: Any, ids: Sequence[int], start: int) -> tuple[Tensor, dict[str, Tensor]]:
        """Read ids after the first `start` tokens -> logits [Q, V] and the states at the taps [Q, D]."""
        positions = torch.arange(start, start + len(ids), device=self.device)
        given: dict[str, Any] = {"input_ids": torch.tensor([list(ids)], device=self.device)}
        given |= {"cache_position": positions} if "cache_position" in self._parameters else {}
        given |= {"position_ids": positions[None]} if "position_ids" in self._parameters else {}
        given[str(self._argument)] = cache.value if isinstance(cache, _State) else cache
        out = self.model(**given, use_cache=True, output_hidden_states=bool(self._needs))
        if isinstance(cache, _State):
            cache.value = out.state
        hidden = tapped(self.model, self.taps, out, self._needs)
        return out.logits[0, :, : self.vocabulary], {tap: states[0] for tap, states in hidden.items()}

    @torch.no_grad()
    def _continues(self) -> bool:
        """Whether the class continues its state by several tokens as by one after the other."""
        ids = [token % self.vocabulary for token in range(1, 10)]
        logits = []
        try:
            for sizes in ((9,), (6, 3)):
                cache, start = self._new_cache(), 0
                for size in sizes:
                    out, _ = self._forward(cache, ids[start : start + size], start)
                    start += size
                logits.append(out[-3:].double())
        except (ValueError, RuntimeError, TypeError, IndexError, AttributeError):
            return False
        close = _TOLERANCE.get(self.dtype, _COARSE) * float(logits[0].std().clamp(min=1e-3))
        return bool((logits[0] - logits[1]).abs().max() <= close)

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        longest = longest_of(prompts, needs, self.taps, self.context)
        self._needs = needs
        self._pipeline = LogitsPipeline(sampling, prompts, self.vocabulary, self.device)
        self._rows = [_Row(list(prompt), self._new_cache()) for prompt in prompts]
        hidden: dict[str, list[Tensor]] = {tap: [] for tap in needs}
        for row in self._rows:
            chunks = self._read(row, len(row.text) - 1)
            for tap in needs if chunks else ():
                states = torch.cat([chunk[tap] for chunk in chunks])
                hidden[tap].append(torch.nn.functional.pad(states, (0, 0, 0, longest - 1 - len(states))))
        return Prefill({tap: torch.stack(rows) for tap, rows in hidden.items() if len(rows) == len(prompts)})

    def _read(self, row: _Row, stop: int) -> list[dict[str, Tensor]]:
        """Read a row's committed tokens up to `stop`; returns the states at the taps, chunk by chunk."""
        chunks = []
        while row.read < stop:
            ids = row.text[row.read : min(row.read + PREFILL_CHUNK, stop)]
            chunks.append(self._forward(row.cache, ids, row.read)[1])
            row.read += len(ids)
        return chunks

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        size = draft.size + 1
        logits = torch.zeros(len(self._rows), size, self.vocabulary, dtype=self.dtype, device=self.device)
        hidden: dict[str, Tensor] = {}
        every, live = leaf_paths(draft)[0] if draft.size else [[[]]] * len(self._rows), draft.live.tolist()
        for index, (row, paths) in enumerate(zip(self._rows, every, strict=True)):
            row.rewind()
            if len(row.text) - row.read > _REREAD:
                self._read(row, len(row.text) - 1)
            row.saved, start = _saved(row.cache), row.read
            waiting = row.text[start:]
            tokens = draft.tokens[index].tolist()
            for number, path in enumerate(_distinct(paths, live[index])):
                if number:
                    _restore(row.cache, row.saved)
                out, states = self._forward(row.cache, [*waiting, *(tokens[node] for node in path)], start)
                places = torch.tensor([0, *(node + 1 for node in path)], device=self.device)
                logits[index, places] = out[len(waiting) - 1 :].to(self.dtype)
                for tap, part in states.items():
                    if tap not in hidden:
                        hidden[tap] = part.new_zeros(len(self._rows), size, part.shape[1])
                    hidden[tap][index, places] = part[len(waiting) - 1 :]
                row.fed = path
        first = 0 if since is None else since + 1
        hidden = {tap: states[:, first:] for tap, states in hidden.items()}
        lengths = torch.tensor([len(row.text) for row in self._rows], device=self.device)
        return Scores(draft, self._pipeline, lengths, logits[:, first:], hidden, first)

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        counts = count.tolist() if verdict.outcome is None else verdict.outcome.counts
        emitted, paths = verdict.rows(draft), verdict.path.tolist()
        for row, tokens, path, kept in zip(self._rows, emitted, paths, counts, strict=True):
            accepted = [node for node in path if node >= 0]
            if row.saved is not None and row.fed == accepted and kept > len(accepted):
                row.read, row.saved, row.fed = len(row.text) + len(accepted), None, []
            row.rewind()
            row.text += tokens[:kept]
        self._pipeline.commit(committed(draft, verdict, count), verdict.known(count))

    def mark(self) -> object:
        for row in self._rows:
            row.rewind()
        states = tuple((len(row.text), row.read, _saved(row.cache)) for row in self._rows)
        return Mark(states, copy.copy(self._pipeline))

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        for row, (length, read, saved) in zip(self._rows, mark.rows, strict=True):
            row.saved, row.fed, row.read = None, [], read
            del row.text[length:]
            _restore(row.cache, saved)
        self._pipeline = copy.copy(mark.pipeline)

    def end(self) -> None:
        self._rows = []


def _distinct(paths: Sequence[Sequence[int]], live: Sequence[bool]) -> list[list[int]]:
    """The paths of nodes to the leaves, without the nodes that are not live, each once, and none within another."""
    cut = {tuple(node for node in path if live[node]) for path in paths}
    whole = [path for path in cut if not any(path != other and other[: len(path)] == path for other in cut)]
    return [list(path) for path in sorted(whole)]
