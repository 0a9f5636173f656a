"""A round in two CUDA graphs: one lays the pass out, computes it and the logits, decides by the rule and packs what the
host reads; one, after the host has cut the output, moves the accepted path into the cache.

The rows' lengths are read on the device. Where attention reads them too a recording holds for every length, else for
those within a bucket of cache columns, and a recording that repeats is made for the larger buckets too. What it gives
is lent, not copied: it holds until the target's next pass. Independent of how drafts are made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import Tensor

from outrider.core.device import packed
from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.engine.captured_passes import Graphs, pass_inputs
from outrider.core.engine.captured_rules import CapturedRule, RecordedDraft, recordable, scores_of
from outrider.core.engine.cuda_graphs import Inputs
from outrider.core.engine.kv_cache.cache import Cache
from outrider.core.engine.kv_cache.captured_growth import followed
from outrider.core.engine.kv_cache.rows import device_rows
from outrider.core.engine.self_draft_views import at_nodes, position_bound
from outrider.core.protocol import Judged, Reading, Rule, Scores
from outrider.core.rng import CounterRNG
from outrider.core.step_recorder import fetched_parts

_MAX_LOGITS = 1 << 24  # of a round, whose memory each recording keeps


@dataclass(frozen=True, eq=False)
class JudgedRound:
    """A judged draft, and how its recording names it."""

    draft: Draft
    judged: Judged
    recorded: Draft
    verdict: Verdict  # with the recording's depth


class Judge:
    """The recorded rounds of one decoder."""

    def __init__(self, graphs: Graphs, cache: Cache) -> None:
        self.graphs, self.cache = graphs, cache
        self._last: JudgedRound | None = None

    def judge(
        self,
        draft: Draft,
        rule: Rule,
        rng: CounterRNG,
        pipeline: LogitsPipeline,
        taps: frozenset[str],
        *,
        nodes: bool,
        readings: Sequence[Reading],
    ) -> Judged | None:
        """The scores and the verdict; None if they are not recorded together."""
        cache, graphs, sampling = self.cache, self.graphs, pipeline.sampling
        self._last = None
        plain = rule.rule if isinstance(rule, CapturedRule) else rule
        known = type(pipeline) is LogitsPipeline and draft.embeddings is None and draft.carry is None
        total = cache.rows.pending.shape[1] + draft.size
        few = draft.rows * total * pipeline.vocabulary <= _MAX_LOGITS
        if cache.device.type == "cpu" or not known or not few or not recordable(plain, sampling, rng, draft):
            return None
        cache.reserve(total + cache.rows.pending.shape[1])
        graphs.network.ensure_positions(position_bound(cache, draft), cache.long)
        drafted = RecordedDraft.of(draft, plain, sampling, rng, pipeline.vocabulary)
        store, lengths = cache.store, graphs.network.reads_lengths(cache.store.dtype)
        columns = cache.columns(max(cache.rows.host) + total, lengths)
        with graphs.pool.lock:
            angles = graphs.network.angles
            inputs = *cache.rows.inputs, *drafted.inputs
            how = plain, sampling, taps, nodes, tuple(readings)

            def at(columns: int) -> tuple[tuple[object, ...], Inputs, Callable[[Inputs], Any]]:
                key = (store.data_ptr(), *store.shape, columns, angles[0].data_ptr(), "round", *how, *drafted.key)
                return key, inputs, partial(self._judged, store, columns, *how, drafted)

            lent = graphs.pool.lend(*at(columns), angles, ahead=lambda: map(at, cache.larger(columns)))
        logits, hidden, lengths, parts, fetched, flat = lent.out
        cache.scored, cache.scratch_owner = draft.size, self
        scores = Scores(draft, pipeline, lengths, logits, hidden)
        scores.recordings = graphs.pool
        judged = Judged(scores, Verdict.of((parts[0][:, : draft.tree.depth], *parts[1:])), fetched, flat)
        if lent.replayed:
            recorded, _ = drafted.made(lent.inputs[4:])
            self._last = JudgedRound(draft, judged, recorded, Verdict.of(parts))
        return judged

    def _judged(
        self,
        store: Tensor,
        columns: int,
        rule: Rule,
        sampling: Sampling,
        taps: frozenset[str],
        nodes: bool,
        readings: Sequence[Reading],
        drafted: RecordedDraft,
        inputs: Inputs,
    ) -> tuple[Tensor, dict[str, Tensor], Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
        """The recorded work -> logits, states at the taps, lengths, the verdict's parts, and what the host reads."""
        rows, (draft, rng) = device_rows(inputs[:4]), drafted.made(inputs[4:])
        lengths = self.graphs.network.reads_lengths(store.dtype)
        ids, layout = self.cache.device_plan(rows, draft, columns, lengths=lengths)
        states, _, hidden = self.graphs.compute(store, columns, taps, False, pass_inputs(ids, layout))
        logits = self.graphs.network.logits(at_nodes(states, rows, draft, 0, None))
        hidden = {tap: at_nodes(tapped, rows, draft, 0, None) for tap, tapped in hidden.items()}
        scores = scores_of(draft, sampling, logits)
        verdict = rule(draft, scores, rng)
        fetched = tuple(fetched_parts(draft, verdict, nodes, scores, readings))
        return logits, hidden, rows.committed, verdict.parts, fetched, packed(fetched)

    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> bool:
        """`Cache.keep` of the draft that was judged last, from a recording; False if there is none."""
        last, self._last, cache = self._last, None, self.cache
        if last is None or draft is not last.draft or verdict.token is not last.judged.verdict.token:
            return False
        if verdict.outcome is None or cache.scored != draft.size or cache.scratch_owner is not self:
            return False
        decided = replace(last.verdict, outcome=verdict.outcome)
        return followed(self.graphs.pool, cache, last.recorded, decided, count, empty=True) is not None
