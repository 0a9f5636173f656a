"""Several drafters of fixed guesses as one: their trees are merged, and the guesses most likely to be right are kept.

SAM-Decoding (arXiv 2411.10666) falls back to token recycling or a model if its match is short; hybrids of suffixes and
heads (arXiv 2411.04975) do likewise. Ours merges instead of switching: the probability of a guess is its drafter's
belief, corrected by how often such guesses of that drafter have been right in this row. Each step shows this for all
drafters, whichever guesses were scored. Works on token ids and beliefs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor

from outrider.core.device import fetch
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Trie, TrieDrafter, to_draft
from outrider.core.drafters.per_row import batches
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import BatchedDrafter, Drafter, Prefill, Prompts, Scores, StandaloneDrafter
from outrider.core.rng import CounterRNG

_STEPS = 10  # bins of beliefs
_PRIOR = 12.0  # observations that the belief itself counts for
_UNSURE = 0.5  # the probability of a guess without a belief
Guesses = tuple[list[int], list[int], list[bool], list[float] | None]  # tokens, parents, which are live, beliefs


class _Member:
    """How often one drafter's guesses in one row were right, by belief."""

    def __init__(self) -> None:
        self.right = [_PRIOR * (step + 0.5) / _STEPS for step in range(_STEPS)]
        self.seen = [_PRIOR] * _STEPS
        self.trie = Trie()  # the last guesses
        self.steps: list[int] = []  # the bin of each one's belief, given its parent

    def take(self, tokens: list[int], parents: list[int], live: list[bool], belief: list[float] | None) -> list[float]:
        """The guesses of a step -> the probability that each node of the trie, and all above it, is right."""
        self.trie, self.steps = Trie(), []
        place, probabilities = {-1: -1}, list[float]()
        for node, token in enumerate(tokens):
            above = place.get(parents[node])
            if above is None or not live[node] or (above, token) in self.trie.nodes:
                continue
            place[node] = self.trie.at(above, token)
            believed = _UNSURE
            if belief is not None:
                believed = belief[node] / max(belief[parents[node]] if parents[node] >= 0 else 1.0, 1e-9)
            step = min(int(believed * _STEPS), _STEPS - 1)
            self.steps.append(step)
            corrected = believed + self.right[step] / self.seen[step] - (step + 0.5) / _STEPS
            probabilities.append(min(max(corrected, 0.0), 1.0) * (probabilities[above] if above >= 0 else 1.0))
        return probabilities

    def learn(self, emitted: Sequence[int]) -> None:
        """Count the guesses whose parent was emitted: those are known to be right or wrong."""
        path = [-1, *self.trie.follow(emitted)]
        reached = dict(zip(path, emitted, strict=False))
        for node, above in enumerate(self.trie.parents):
            if above in reached:
                self.seen[self.steps[node]] += 1
                self.right[self.steps[node]] += self.trie.tokens[node] == reached[above]


class Ensemble:
    """Drafts the `nodes` most probable of all guesses; of those below `min_probability` at most `free`, which add
    almost nothing to the cost of a pass."""

    def __init__(
        self,
        *,
        drafters: Mapping[str, Drafter],
        nodes: int = 16,
        min_probability: float = 0.06,
        free: int = 3,
    ) -> None:
        if not drafters or nodes < 1 or not 0 <= min_probability <= 1 or free < 0:
            raise InvalidOption(
                f"{len(drafters)} drafters, nodes={nodes}, min_probability={min_probability}, free={free}: there must "
                "be a drafter and a node, min_probability from 0 to 1, free 0 or more"
            )
        self.drafters = list(drafters.values())
        for name, drafter in drafters.items():
            if isinstance(drafter, StandaloneDrafter):
                raise Incompatible(f"{name} reads its next guesses off its own draft, so it can't be merged")
        self.nodes, self.min_probability, self.free = nodes, min_probability, free
        sizes = {drafter.vocabulary for drafter in self.drafters} - {None}
        if len(sizes) > 1:
            raise Incompatible(f"the drafters of an ensemble have vocabularies of {sizes}; they must be made for one")
        self.vocabulary: int | None = sizes.pop() if sizes else None
        self.needs = frozenset[str]().union(*(drafter.needs for drafter in self.drafters))

    @property
    def bytes_read(self) -> int:
        return sum(drafter.bytes_read for drafter in self.drafters)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        for drafter in self.drafters:
            drafter.begin(prefill, prompts, sampling)
        self._members = [self._fresh() for _ in prompts]

    def _fresh(self) -> list[_Member]:
        return [_Member() for _ in self.drafters]

    # ---- continuous batching (outrider.core.protocol.BatchedDrafter)

    def supports_batching(self) -> bool:
        return all(map(batches, self.drafters))

    def open(self, sampling: Sampling) -> None:
        for drafter in self._batched():
            drafter.open(sampling)
        self._members = []

    def arrange(self, order: Sequence[int], width: int) -> None:
        for drafter in self._batched():
            drafter.arrange(order, width)
        self._members = [self._members[row] if row >= 0 else self._fresh() for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        for drafter in self._batched():
            drafter.enter(row, prefill, prompt)
        self._members[row] = self._fresh()

    def leave(self, row: int) -> None:
        for drafter in self._batched():
            drafter.leave(row)

    def _batched(self) -> list[BatchedDrafter]:
        return [drafter for drafter in self.drafters if isinstance(drafter, BatchedDrafter)]

    # ----

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return self._draft(
            self._merged([self._guesses_of(number, room, rng) for number in range(len(self.drafters))]), rng
        )

    def _guesses_of(self, number: int, room: Tensor, rng: CounterRNG) -> list[Guesses]:
        """One drafter's guesses in each row."""
        drafter = self.drafters[number]
        if hosted(drafter):
            return [_of_trie(trie) for trie in drafter.tries(room.tolist())]
        return _host(drafter.propose(room, rng.fork(number)))

    def _merged(self, parts: Sequence[Sequence[Guesses]]) -> list[Trie]:
        """All guesses of each row in one trie, from those of each drafter."""
        return [self._merge(row, [part[row] for part in parts]) for row in range(len(self._members))]

    def _draft(self, tries: Sequence[Trie], rng: CounterRNG) -> Draft:
        counts = self.counts([trie.weights for trie in tries])
        return to_draft([trie.best(count) for trie, count in zip(tries, counts, strict=True)], rng.device)

    def _merge(self, row: int, parts: list[Any]) -> Trie:
        """All guesses of a row in one trie; a guess of several drafters is wrong only if all of them are."""
        merged = Trie()
        for member, part in zip(self._members[row], parts, strict=True):
            probabilities = member.take(*part)
            places: dict[int, int] = {-1: -1}
            for node, probability in enumerate(probabilities):
                above = places[member.trie.parents[node]]
                place = places[node] = merged.at(above, member.trie.tokens[node])
                merged.weights[place] = 1 - (1 - merged.weights[place]) * (1 - probability)
        for node, above in enumerate(merged.parents):  # no node is likelier than its parent
            if above >= 0:
                merged.weights[node] = min(merged.weights[node], merged.weights[above])
        return merged

    def counts(self, rows: Sequence[Sequence[float]]) -> list[int]:
        """How many of each row's guesses to score, given the probability of each."""
        likely = (sum(weight >= self.min_probability for weight in weights) for weights in rows)
        return [min(self.nodes, max(count, self.free)) for count in likely]

    def forget(self) -> None:
        """Drop the last guesses: nothing is drafted in this step."""
        for members in self._members:
            for member in members:
                member.trie, member.steps = Trie(), []

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for members, emitted in zip(self._members, verdict.rows(draft), strict=True):
            for member in members:
                member.learn(emitted)
        for number, drafter in enumerate(self.drafters):
            drafter.observe(draft, scores, verdict, rng.fork(number))

    def end(self) -> None:
        for drafter in self.drafters:
            drafter.end()
        self._members = []


def hosted(drafter: Drafter) -> TypeGuard[TrieDrafter]:
    """Does it grow its guesses on the host, without a model?"""
    return isinstance(drafter, TrieDrafter) and drafter.hosted


def _of_trie(trie: Trie) -> Guesses:
    """The same as `_host` of the drafted trie."""
    return trie.tokens, trie.parents, [True] * len(trie), [min(weight, 1.0) for weight in trie.weights]


def _host(draft: Draft) -> list[Guesses]:
    """The draft's tokens, parents, live nodes and beliefs by row, as lists."""
    if draft.distributions is not None or draft.probe is not None:
        raise Incompatible("an ensemble merges fixed guesses, so a drafter that draws its guesses can't be part of one")
    parents = draft.tree.parents.expand(draft.rows, -1)
    wanted = [draft.tokens, parents, draft.live]
    arrays = fetch(*wanted) if draft.belief is None else fetch(*wanted, draft.belief)
    lists = [array.tolist() for array in arrays]
    return [(*row, None) if draft.belief is None else row for row in zip(*lists, strict=True)]
