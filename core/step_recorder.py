"""Records steps: fetches draft and verdict to the host in one transfer, and optional extras.

Independent of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider.core.device import fetch
from outrider.core.draft import Draft, Verdict
from outrider.core.protocol import Judged, Reading, Scores
from outrider.core.trace import Source


@dataclass(frozen=True, kw_only=True)
class Record:
    """What is recorded of each step."""

    nodes: bool = True  # the draft, node by node
    alternatives: int = 0  # number of the target's likeliest tokens at each committed token
    logprobs: bool = False  # of each committed token, under the model's own softmax
    entropy: bool = False  # of the distribution that each committed token follows, in nats


_NODE_PARTS = 7


def fetched_parts(
    draft: Draft, verdict: Verdict, nodes: bool, scores: Scores, readings: Sequence[Reading]
) -> list[Tensor]:
    """What the host reads of a draft, its verdict and its scores, in the order in which `FetchedStep` takes it."""
    wanted = [draft.tokens, verdict.path, verdict.token[:, None], verdict.resampled[:, None]]
    wanted += [] if verdict.total_variation is None else [verdict.total_variation]
    wanted += [] if verdict.relaxed is None else [verdict.relaxed]
    if nodes:
        parents, fixed = draft.tree.parents.expand(draft.rows, -1), draft.fixed.expand(draft.rows, -1)
        wanted += [parents, draft.tried, fixed, verdict.tried, verdict.chance, verdict.p, verdict.q]
    return wanted + [part for reading in readings for part in reading(draft, scores)]


class FetchedStep:
    """A draft and its verdict, copied to the host in one transfer."""

    def __init__(
        self,
        draft: Draft,
        verdict: Verdict,
        nodes: bool,
        scores: Scores,
        readings: Sequence[Reading],
        judged: Judged | None = None,
    ) -> None:
        self._note = draft.note
        self._nodes = nodes
        wanted = fetched_parts(draft, verdict, nodes, scores, readings) if judged is None else judged.parts
        parts = iter(fetch(*wanted, bytes_of=None if judged is None else judged.packed))
        self._tokens, self._path, last, resampled = next(parts), next(parts), next(parts), next(parts)
        self._resampled = resampled[:, 0].tolist()
        self._emitted = [
            [*(tokens[node] for node in path if node >= 0), token]
            for tokens, path, (token,) in zip(self._tokens.tolist(), self._path.tolist(), last.tolist(), strict=True)
        ]
        self._total_variation = None if verdict.total_variation is None else next(parts)
        self._relaxed = None if verdict.relaxed is None else next(parts)
        self._rest = [next(parts) for _ in range(_NODE_PARTS if nodes else 0)]
        self.readings = {reading: [next(parts) for _ in range(reading.parts)] for reading in readings}

    def emitted(self, row: int) -> list[int]:
        """The tokens emitted in a row, before end tokens, stops and limits cut them."""
        tokens: list[int] = self._emitted[row]
        return tokens

    def path(self, row: int) -> list[int]:
        """The accepted nodes of a row."""
        nodes: list[int] = self._path[row].tolist()
        return nodes[: len(self._emitted[row]) - 1]

    def step(self, row: int, kept: int) -> dict[str, object]:
        accepted = len(self._emitted[row]) - 1
        sources: list[Source] = ["drafted"] * accepted
        if self._relaxed is not None:
            sources = ["relaxed" if relaxed else "drafted" for relaxed in self._relaxed[row, :accepted].tolist()]
        sources.append("resampled" if self._resampled[row] else "bonus")
        fields: dict[str, object] = {
            "emitted": tuple(self.emitted(row)[:kept]),
            "sources": tuple(sources[:kept]),
        }
        if self._note is not None:
            fields["note"] = self._note[row]
        if self._total_variation is not None:
            fields["total_variation"] = tuple(self._total_variation[row, :kept].tolist())
        if self._nodes:
            fields |= self._tree(row, kept)
        return fields

    def _tree(self, row: int, kept: int) -> dict[str, object]:
        parents, live, fixed, tried, chance, p, q = (part[row] for part in self._rest)
        tokens, path = self._tokens[row], self._path[row]
        nodes = np.flatnonzero(live)
        index = np.full(len(live) + 1, -1)  # node -> index among live nodes; entry -1, the root's, is the last
        index[nodes] = np.arange(len(nodes))
        accepted = path[path >= 0][:kept]
        return {
            "drafted": tuple(tokens[nodes].tolist()),
            "parents": tuple(index[parents[nodes]].tolist()),
            "fixed": tuple(fixed[nodes].tolist()),
            "tried": tuple(tried[nodes].tolist()),
            "chance": tuple(chance[nodes].tolist()),
            "p": tuple(p[nodes].tolist()),
            "q": tuple(q[nodes].tolist()),
            "path": tuple(index[accepted].tolist()),
        }


class Extras:
    """The optional records: alternatives, log-probabilities and entropy at each committed token."""

    def __init__(self, scores: Scores, verdict: Verdict, record: Record) -> None:
        self._parts: list[np.ndarray] = []
        self._record = record
        if not record.alternatives and not record.logprobs and not record.entropy:
            return
        rows = torch.nn.functional.pad(verdict.path + 1, (1, 0))  # the score row of each emitted token
        tokens = verdict.emitted(scores.draft).clamp(min=0)
        wanted: list[Tensor] = []
        if record.alternatives or record.entropy:
            distributions = scores.distributions(rows)
            wanted += distributions.top(record.alternatives) if record.alternatives else ()
            wanted += [distributions.entropy()] if record.entropy else []
        if record.logprobs:
            logits = scores.logits(rows)
            logits = logits if logits.dtype == torch.float64 else logits.float()
            wanted.append(torch.log_softmax(logits, -1).gather(2, tokens[..., None])[..., 0])
        self._parts = fetch(*wanted)

    def step(self, row: int, kept: int) -> dict[str, object]:
        fields: dict[str, object] = {}
        parts = iter([part[row, :kept] for part in self._parts])
        if self._record.alternatives:
            ids, probs = next(parts).tolist(), next(parts).tolist()
            fields["alternatives"] = tuple(
                tuple((token, prob) for token, prob in zip(*pair, strict=True) if token >= 0)
                for pair in zip(ids, probs, strict=True)
            )
        if self._record.entropy:
            fields["entropy"] = tuple(next(parts).tolist())
        if self._record.logprobs:
            fields["logprobs"] = tuple(next(parts).tolist())
        return fields
