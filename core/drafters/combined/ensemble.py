"""Several drafters of fixed guesses as one: their trees are merged, and the guesses that are likeliest to be right are
kept.

SAM-Decoding (arXiv 2411.10666) falls back on token recycling or on a model where its match is short; hybrids of
suffixes and heads (arXiv 2411.04975) do alike. Ours does not switch but merges: every guess has a chance, read off its
drafter's belief and corrected by how often such guesses of that drafter were right so far in this row, which each step
shows for all drafters alike, whoever's guess was tried. Knows token ids and beliefs only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

from torch import Tensor

from outrider.core.device import fetch
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft, Verdict
from outrider.core.drafters.lookup.trie import Grower, Trie, planted
from outrider.core.drafters.per_row import Joined, joins
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Drafter, Prefill, Prompts, Scores
from outrider.core.rng import CounterRNG

MEMBERS = ("suffix", "token-recycling")
_STEPS = 10  # beliefs are told apart this finely
_PRIOR = 12.0  # guesses that a belief is taken at its word for
_UNSURE = 0.5  # the chance of a guess whose drafter believes nothing
Guesses = tuple[list[int], list[int], list[bool], list[float] | None]  # tokens, parents, which are live, beliefs


class _Member:
    """What one drafter's guesses in one row have been worth."""

    def __init__(self) -> None:
        self.right = [_PRIOR * (step + 0.5) / _STEPS for step in range(_STEPS)]
        self.seen = [_PRIOR] * _STEPS
        self.trie = Trie()  # the last guesses
        self.steps: list[int] = []  # and how sure of each its drafter was, its parent given

    def take(self, tokens: list[int], parents: list[int], live: list[bool], belief: list[float] | None) -> list[float]:
        """The guesses of a step -> the chance of each node of the trie to be right, its ancestors included."""
        self.trie, self.steps = Trie(), []
        place, chances = {-1: -1}, list[float]()
        for node, token in enumerate(tokens):
            above = place.get(parents[node])
            if above is None or not live[node] or (above, token) in self.trie.nodes:
                continue
            place[node] = self.trie.at(above, token)
            given = _UNSURE
            if belief is not None:
                given = belief[node] / max(belief[parents[node]] if parents[node] >= 0 else 1.0, 1e-9)
            step = min(int(given * _STEPS), _STEPS - 1)
            self.steps.append(step)
            within = given + self.right[step] / self.seen[step] - (step + 0.5) / _STEPS
            chances.append(min(max(within, 0.0), 1.0) * (chances[above] if above >= 0 else 1.0))
        return chances

    def learn(self, emitted: Sequence[int]) -> None:
        """Every guess whose place was reached is known to be right or wrong."""
        path = [-1, *self.trie.follow(emitted)]
        reached = dict(zip(path, emitted, strict=False))
        for node, above in enumerate(self.trie.parents):
            if above in reached:
                self.seen[self.steps[node]] += 1
                self.right[self.steps[node]] += self.trie.tokens[node] == reached[above]


class Ensemble:
    """`drafters` are drafters or their names, with `options` by name; of all their guesses the `nodes` likeliest are
    kept, and of those that are less likely than `least` no more than `free`, which a pass has room for anyway."""

    def __init__(
        self,
        *,
        drafters: Sequence[Drafter | str] = MEMBERS,
        options: Mapping[str, Mapping[str, Any]] | None = None,
        nodes: int = 16,
        least: float = 0.06,
        free: int = 3,
    ) -> None:
        if not drafters or nodes < 1 or not 0 <= least <= 1 or free < 0:
            raise InvalidOption(
                f"{len(drafters)} drafters, nodes={nodes}, least={least}, free={free}: there must be a drafter and a "
                "node, least from 0 to 1, free 0 or more"
            )
        self.drafters = [_made(one, (options or {}).get(one, {})) if isinstance(one, str) else one for one in drafters]
        for one in self.drafters:
            if getattr(one, "alone", False):
                raise Incompatible(
                    f"{type(one).__name__} reads its next guesses off its own draft, which an ensemble would take apart"
                )
        self.nodes, self.least, self.free = nodes, least, free
        sizes = {one.vocabulary for one in self.drafters} - {None}
        if len(sizes) > 1:
            raise Incompatible(f"the drafters of an ensemble have vocabularies of {sizes}; they must be made for one")
        self.vocabulary: int | None = sizes.pop() if sizes else None
        self.needs = frozenset[str]().union(*(one.needs for one in self.drafters))

    @property
    def bytes_read(self) -> int:
        return sum(one.bytes_read for one in self.drafters)

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        for one in self.drafters:
            one.begin(prefill, prompts, sampling)
        self._members = [self._fresh() for _ in prompts]

    def _fresh(self) -> list[_Member]:
        return [_Member() for _ in self.drafters]

    # ---- rows that come and go (outrider.core.drafters.per_row.Joined)

    def joins(self) -> bool:
        return all(joins(one) for one in self.drafters)

    def open(self, sampling: Sampling) -> None:
        for one in self._joined:
            one.open(sampling)
        self._members = []

    def arrange(self, order: Sequence[int], width: int) -> None:
        for one in self._joined:
            one.arrange(order, width)
        self._members = [self._members[row] if row >= 0 else self._fresh() for row in order]

    def enter(self, row: int, prefill: Prefill, prompt: Sequence[int]) -> None:
        for one in self._joined:
            one.enter(row, prefill, prompt)
        self._members[row] = self._fresh()

    def leave(self, row: int) -> None:
        for one in self._joined:
            one.leave(row)

    @property
    def _joined(self) -> Sequence[Joined]:
        return self.drafters  # type: ignore[return-value]

    # ----

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        return self._tried(self._merged([self._asked(number, room, rng) for number in range(len(self.drafters))]), rng)

    def _asked(self, number: int, room: Tensor, rng: CounterRNG) -> list[Guesses]:
        """One drafter's guesses in each row."""
        one = self.drafters[number]
        if hosted(one):
            return [_grown(trie) for trie in one.tries(room.tolist())]
        return _host(one.propose(room, rng.fork(number)))

    def _merged(self, parts: Sequence[Sequence[Guesses]]) -> list[Trie]:
        """All guesses of each row, given those of each drafter."""
        return [self._merge(row, [part[row] for part in parts]) for row in range(len(self._members))]

    def _tried(self, tries: Sequence[Trie], rng: CounterRNG) -> Draft:
        counts = self.counts([trie.weights for trie in tries])
        return planted([trie.best(count) for trie, count in zip(tries, counts, strict=True)], rng.device)

    def _merge(self, row: int, parts: list[Any]) -> Trie:
        """All guesses of a row in one trie; where drafters agree, only both can be wrong."""
        merged = Trie()
        for member, part in zip(self._members[row], parts, strict=True):
            chances = member.take(*part)
            places: dict[int, int] = {-1: -1}
            for node, chance in enumerate(chances):
                above = places[member.trie.parents[node]]
                place = places[node] = merged.at(above, member.trie.tokens[node])
                merged.weights[place] = 1 - (1 - merged.weights[place]) * (1 - chance)
        for node, above in enumerate(merged.parents):  # nothing is likelier than what it follows
            if above >= 0:
                merged.weights[node] = min(merged.weights[node], merged.weights[above])
        return merged

    def counts(self, rows: Sequence[Sequence[float]]) -> list[int]:
        """How many of each row's guesses are worth trying, given the chance of each to be right."""
        likely = (sum(weight >= self.least for weight in weights) for weights in rows)
        return [min(self.nodes, max(count, self.free)) for count in likely]

    def forget(self) -> None:
        """Nobody guesses in this step, so nobody is right or wrong."""
        for members in self._members:
            for member in members:
                member.trie, member.steps = Trie(), []

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        for members, emitted in zip(self._members, verdict.rows(draft), strict=True):
            for member in members:
                member.learn(emitted)
        for number, one in enumerate(self.drafters):
            one.observe(draft, scores, verdict, rng.fork(number))

    def end(self) -> None:
        for one in self.drafters:
            one.end()
        self._members = []


def hosted(drafter: Drafter) -> TypeGuard[Grower]:
    """Does it guess on the host, without asking a model?"""
    return isinstance(drafter, Grower) and drafter.hosted


def _made(name: str, options: Mapping[str, Any]) -> Drafter:
    from outrider.core.methods import make_drafter  # which names this module

    made = make_drafter(name, **options)
    assert made is not None
    return made


def _grown(trie: Trie) -> Guesses:
    """What `_host` would give of a trie that was planted."""
    return trie.tokens, trie.parents, [True] * len(trie), [min(weight, 1.0) for weight in trie.weights]


def _host(draft: Draft) -> list[Guesses]:
    """Tokens, parents, which are live and beliefs of each row, as lists."""
    if draft.distributions is not None or draft.probe is not None:
        raise Incompatible("an ensemble merges fixed guesses; a drafter whose guesses are drawn can't be part of one")
    parents = draft.tree.parents.expand(draft.rows, -1)
    wanted = [draft.tokens, parents, draft.live]
    arrays = fetch(*wanted) if draft.belief is None else fetch(*wanted, draft.belief)
    lists = [array.tolist() for array in arrays]
    return [(*row, None) if draft.belief is None else row for row in zip(*lists, strict=True)]
