"""The target drafts for itself with part of its cache, or in fewer bits.

At long contexts a pass reads more cache than weights, so the same weights with a sparse cache are a fast, accurate
drafter: MagicDec (Sadhukhan et al., arXiv 2408.11049) attends to the first and the latest entries (StreamingLLM's sinks
and window); TriForce (Sun et al., arXiv 2404.11912) also to the chunks with the highest attention. At short contexts
weights dominate, and QSpec (Zhao et al., arXiv 2410.11305) drafts in fewer bits. Ours are views of the target's cache,
updated from the target's own entries every round, so draft errors do not accumulate.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.draft_model.model import DraftModel
from outrider.core.drafters.length_policies import Policy
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, View
from outrider.core.rng import CounterRNG


class SparseView:
    """A chain of draws from a view of the target, `length` tokens or as many as `policy` decides. The other options are
    those of the view (outrider.core.engine.self_draft_views.View). `cache_bytes` is the peak size of the cache entries
    that the view copied."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()

    def __init__(self, *, length: int = 4, policy: Policy | str = "fixed", **view: Any) -> None:
        if length < 1:
            raise InvalidOption(f"length is {length}; it must be 1 or more")
        self.length, self.policy, self.view = length, policy, view
        self.cache_bytes = 0
        self._inner: DraftModel | None = None
        self._seen: View | None = None
        self._read = 0

    @property
    def bytes_read(self) -> int:
        return self._read + self._reading

    @property
    def _reading(self) -> int:
        """Bytes read in this generation: by the view, and by target passes that choose the entries to attend to."""
        if self._inner is None or self._seen is None:
            return 0
        return self._inner.bytes_read + self._seen.cache_passes * self._whole

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        if prefill.self_draftable is None:
            raise Incompatible(
                "this drafter is the target itself with part of its cache or in fewer bits, and this target (a "
                "transformers model, or a row of a continuous batch) has no such view; use generate() with a model "
                "that our own decoder runs (Llama, Qwen, Mistral, Gemma, ...), or another drafter"
            )
        self._whole, self._seen = prefill.self_draftable.weight_bytes, prefill.self_draftable.view(**self.view)
        self._inner = DraftModel(self._seen, length=self.length, policy=self.policy)
        self._inner.begin(prefill, prompts, sampling)

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        assert self._inner is not None and self._seen is not None
        draft = self._inner.propose(room, rng)
        self.cache_bytes = max(self.cache_bytes, self._seen.cache_bytes)
        return draft

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        assert self._inner is not None
        self._inner.observe(draft, scores, verdict, rng)

    def end(self) -> None:
        if self._inner is not None:
            self._read += self._reading
            self._inner.end()
            self._inner = self._seen = None


def sparse_cache(*, length: int = 4, sinks: int = 4, window: int = 256, policy: Policy | str = "fixed") -> SparseView:
    """MagicDec (arXiv 2408.11049): attends to the first `sinks` and the last `window` cache entries."""
    if min(length, window) < 1 or sinks < 0:
        raise InvalidOption(
            f"length={length}, sinks={sinks}, window={window}: length and window must be 1 or more, sinks 0 or more"
        )
    return SparseView(length=length, policy=policy, window=(sinks, window))


def triforce(
    *,
    length: int = 4,
    sinks: int = 4,
    window: int = 64,
    chunks: int = 32,
    chunk: int = 8,
    refresh: int = 16,
    policy: Policy | str = "fixed",
) -> SparseView:
    """TriForce (arXiv 2404.11912): attends to sinks, a window, and in between to the `chunks` chunks of `chunk` entries
    with each head's highest attention, chosen by a target pass every `refresh` drafts, which is counted. Without the
    paper's third level, a tiny model that drafts for the sparse target."""
    if min(length, window, chunks, chunk, refresh) < 1 or sinks < 0:
        raise InvalidOption(
            f"length={length}, sinks={sinks}, window={window}, chunks={chunks}, chunk={chunk}, refresh={refresh}: "
            "sinks must be 0 or more, the others 1 or more"
        )
    view = {"window": (sinks, window), "chunks": (chunks, chunk), "refresh": refresh}
    return SparseView(length=length, policy=policy, **view)


def qspec(*, length: int = 4, bits: int = 4, policy: Policy | str = "fixed") -> SparseView:
    """QSpec (arXiv 2410.11305): the same weights in `bits` bits draft over the same cache. In the paper both share
    4-bit weights and differ in activations (4 bits to draft, 16 to verify); ours differ in weights, which needs a
    second copy and is faster where reading weights dominates."""
    return SparseView(length=length, policy=policy, bits=bits)
