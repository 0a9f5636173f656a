"""A small decoder of our own as a target: prompts are read in pieces, drafts in one pass over their whole tree.

Knows drafts and laws through the protocol; where things stand is the cache's affair, what is computed the network's.
`Decoder.random` makes one out of a seed, for tests and for measuring; weights of others come through
outrider.core.engine.checkpoints.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core.draft import Draft, Verdict
from outrider.core.engine.cache import Cache, Rows
from outrider.core.engine.network import Config, Network, random_network
from outrider.core.errors import InvalidOption, unknown
from outrider.core.laws import Lawmaker, Sampling
from outrider.core.target import Prefill, Prompts, Scores

__all__ = ["Config", "Decoder"]

_PIECE = 512  # prompt tokens a pass
_DENSE = 1 << 23  # logits a pass: up to so many are computed at once, beyond that only the rows asked for


@dataclass(frozen=True, eq=False)
class Mark:
    """A place to rewind to."""

    rows: Rows
    lawmaker: Lawmaker


class Decoder:
    """A network with its cache. Hidden states can be tapped at "embedding", "layer.0" to "layer.{L - 1}" (what leaves
    that layer) and "last" (normed, what the output layer reads); the prefill holds them for all prompt tokens but the
    last of each row, which is the first root and is read with the first draft."""

    rollback = True

    def __init__(self, network: Network) -> None:
        self.network = network
        self.config = network.config
        self.vocabulary = network.config.vocabulary
        self.device = network.device
        self.weight_bytes = network.weight_bytes
        cfg = network.config
        self.cache = Cache((cfg.layers, 2 * cfg.kv_heads, cfg.head_dim), network.dtype, network.device)
        self._taps: frozenset[str] = frozenset()

    @classmethod
    def random(
        cls,
        config: Config,
        seed: int = 0,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        gain: float = 4.0,
    ) -> Decoder:
        """Seeded random weights, the same in every precision; logits have a spread of `gain`."""
        return cls(random_network(config, seed, dtype=dtype, device=device, gain=gain))

    @property
    def taps(self) -> tuple[str, ...]:
        """The names of hidden states that can be asked for."""
        return ("embedding", *(f"layer.{index}" for index in range(self.config.layers)), "last")

    @torch.no_grad()
    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        for tap in sorted(needs):
            if tap not in self.taps:
                raise unknown("hidden tap", tap, self.taps)
        longest = max(map(len, prompts))
        if longest > self.config.context:
            raise InvalidOption(
                f"a prompt has {longest} tokens and the model's context is {self.config.context}; shorten the prompt"
            )
        self._taps = needs
        self._lawmaker = Lawmaker(sampling, prompts, self.vocabulary, self.device)
        self.cache.begin(prompts)
        self.network.reach(longest)
        found: dict[str, list[Tensor]] = {tap: [] for tap in needs}
        for start in range(0, longest - 1, _PIECE):
            ids, places = self.cache.chunk(start, min(start + _PIECE, longest - 1))
            self.network.run(self.network.embed(ids), self.cache.store, places, found)
        self.cache.prefilled(prompts)
        nothing = torch.zeros(len(prompts), 0, self.config.width, dtype=self.network.dtype, device=self.device)
        return Prefill({tap: torch.cat(parts, 1) if parts else nothing for tap, parts in found.items()})

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        first = 0 if since is None else since + 1
        if since is not None and since > self.cache.scored:
            since = None
        ids, places = self.cache.plan(draft, since)
        self.network.reach(self._reach(draft))
        found: dict[str, list[Tensor]] = {tap: [] for tap in self._taps}
        x = self.network.run(self.network.embed(ids), self.cache.store, places, found)
        states = self._rows(x.view(*ids.shape, -1), draft, first, since)
        hidden = {tap: self._rows(parts[0], draft, first, since) for tap, parts in found.items()}
        lengths = self.cache.rows.committed
        if states.shape[0] * states.shape[1] * self.vocabulary <= _DENSE:
            return Scores(draft, self._lawmaker, lengths, self.network.logits(states), hidden, first)

        @torch.no_grad()
        def some(rows: Tensor) -> Tensor:
            index = (rows - first)[..., None].expand(-1, -1, states.shape[2])
            return self.network.logits(states.gather(1, index))

        return Scores(draft, self._lawmaker, lengths, some, hidden, first)

    def _reach(self, draft: Draft) -> int:
        """A bound on the positions a draft asks for."""
        rows = self.cache.rows
        behind = max(rows.host) + rows.pending.shape[1]
        if draft.positions is None or not draft.size:
            return behind + draft.tree.depth + 1
        return behind + (int(draft.positions.max()) if self.cache.exact else 1024) + 1

    def _rows(self, states: Tensor, draft: Draft, first: int, since: int | None) -> Tensor:
        """States [B, Q, D] of everything fed -> [B, R, D] behind the root and the nodes, from row `first` on."""
        wait = self.cache.rows.pending.shape[1]
        if since is not None or wait == 1:
            return states if since is not None else states[:, first:]
        nodes = torch.arange(wait, wait + draft.size, device=self.device).expand(len(states), -1)
        index = torch.cat([self.cache.rows.waiting[:, None] - 1, nodes], 1)[:, first:]
        return states.gather(1, index[..., None].expand(-1, -1, states.shape[2]))

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        self._lawmaker.commit(self.cache.keep(draft, verdict, count))

    def mark(self) -> object:
        return Mark(self.cache.mark(), copy.copy(self._lawmaker))

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, Mark)
        self.cache.rewind(mark.rows)
        self._lawmaker = copy.copy(mark.lawmaker)

    def end(self) -> None:
        self.cache.end()
