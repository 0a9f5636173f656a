"""Sparse-cache self-drafting: the target with a small part of its own cache drafts for itself with all of it.

At long contexts a pass reads the cache more than the weights, so that the same weights with less of the cache are a
fast and very accurate drafter: MagicDec (Sadhukhan et al., arXiv 2408.11049) keeps the first entries and the latest
(StreamingLLM's sinks and window); TriForce (Sun et al., arXiv 2404.11912) adds the chunks of the cache that the query
attends to most. Ours has the first of these, as a view over the target's cache that holds no copy of the weights and
is renewed from the target's own entries at every step, so that no error of a draft outlives it. Knows laws and token
ids; what the view leaves out is the engine's affair.
"""

from __future__ import annotations

from torch import Tensor

from outrider.core.dice import Dice
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.model import DraftModel
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.laws import Sampling
from outrider.core.policies import Policy
from outrider.core.target import Prefill, Prompts, Scores


class SparseCache:
    """A chain drawn from the target seen through the first `sinks` and the last `window` of its entries."""

    vocabulary: int | None = None
    needs: frozenset[str] = frozenset()

    def __init__(self, *, length: int = 4, sinks: int = 4, window: int = 256, policy: Policy | str = "fixed") -> None:
        if min(length, window) < 1 or sinks < 0:
            raise InvalidOption(
                f"length={length}, sinks={sinks}, window={window}: length and window must be 1 or more, sinks 0 or more"
            )
        self.length, self.sinks, self.window, self.policy = length, sinks, window, policy
        self._inner: DraftModel | None = None
        self._read = 0

    @property
    def bytes_read(self) -> int:
        return self._read + (0 if self._inner is None else self._inner.bytes_read)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        if prefill.itself is None:
            raise Incompatible(
                "the drafter 'sparse-cache' reads part of the target's own cache, and this target (it runs on code of "
                "others) can't be seen so; take a model of Llama's or Qwen's family, or another drafter"
            )
        view = prefill.itself.view(window=(self.sinks, self.window))
        self._inner = DraftModel(view, length=self.length, policy=self.policy)
        self._inner.begin(prefill, prompts, sampling)

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        assert self._inner is not None
        return self._inner.propose(room, dice)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, dice: Dice) -> None:
        assert self._inner is not None
        self._inner.observe(draft, scores, verdict, dice)

    def end(self) -> None:
        if self._inner is not None:
            self._read += self._inner.bytes_read
            self._inner.end()
            self._inner = None
