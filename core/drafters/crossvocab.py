"""A draft model with another tokenizer than the target's, lossless ("Accelerating LLM Inference with Lossless
Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202).

In two ways. `retokenise`: the model continues its own tokens of the text, and what it wrote is tokenised anew as fixed
guesses. `shared`: the model draws from the tokens that both vocabularies have, its law restricted to them and
renormalised, which is q. Knows two sets of token ids and a bridge between them, nothing of text: the model reads what
the bridge makes of the target's tokens, settled as far as they can't be tokenised otherwise any more, and for each step
the rest behind that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.dice import Dice, Purpose
from outrider.core.draft import Draft, Verdict, told
from outrider.core.drafters.lookup import guesses
from outrider.core.drafters.model import joined
from outrider.core.errors import InvalidOption, unknown
from outrider.core.laws import Law, Sampling, to_law
from outrider.core.policies import Policy, make_policy
from outrider.core.target import Prefill, Prompts, Scores, Target
from outrider.core.tree import Tree

WAYS = ("retokenise", "shared")
_FEW = 1024  # entries up to which a law is left as it is


class Passage(Protocol):
    """One row's text in the draft model's tokens."""

    def add(self, tokens: Sequence[int]) -> None: ...  # of the target's, committed
    def settled(self) -> list[int]: ...  # what has become final since it was last asked; at first one token at least
    @property
    def tail(self) -> list[int]: ...  # the rest
    def back(self, drafted: Sequence[int]) -> list[int]: ...  # in the target's tokens: what was drafted behind the tail


class Bridge(Protocol):
    """Between two vocabularies."""

    @property
    def shared(self) -> Mapping[int, int]: ...  # the target's id of a token that both have -> the draft model's
    @property
    def size(self) -> int | None: ...  # of the target's vocabulary; None: the same as the draft model's
    def open(self, prompt: Sequence[int]) -> Passage: ...


class Renamed:
    """A bridge between vocabularies that call the same tokens by other ids: `names` has the draft model's for the
    target's, of which there are `size`. Tokens that have none are read as `unknown` and never drafted."""

    def __init__(self, names: Mapping[int, int], unknown: int = 0, size: int | None = None) -> None:
        self.shared, self.size, self._unknown = dict(names), size, unknown
        self._back = {theirs: ours for ours, theirs in names.items()}

    def open(self, prompt: Sequence[int]) -> Passage:
        return _Renamed(self.shared, self._back, self._unknown, prompt)


class _Renamed:
    def __init__(self, there: Mapping[int, int], back: Mapping[int, int], unknown: int, prompt: Sequence[int]) -> None:
        self._there, self._back, self._unknown = there, back, unknown
        self.tail: list[int] = []
        self._new: list[int] = []
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        self._new += [self._there.get(token, self._unknown) for token in tokens]

    def settled(self) -> list[int]:
        new, self._new = self._new, []
        return new

    def back(self, drafted: Sequence[int]) -> list[int]:
        known = [self._back.get(token) for token in drafted]
        return [one for one in known[: known.index(None) if None in known else None] if one is not None]


class CrossVocabulary:
    """A chain of guesses by a model with another vocabulary; `length` counts the model's tokens. Without a bridge both
    are taken to have the same vocabulary. A policy says how far to draft, as for a draft model."""

    vocabulary: int | None = None  # the bridge's affair
    needs: frozenset[str] = frozenset()

    def __init__(
        self,
        model: Target,
        *,
        bridge: Bridge | None = None,
        way: str = "retokenise",
        length: int = 5,
        policy: Policy | str = "fixed",
    ) -> None:
        if way not in WAYS:
            raise unknown("way of crossing vocabularies", way, WAYS)
        self.model, self.way = model, way
        self.bridge = bridge or Renamed({token: token for token in range(model.vocabulary)})
        self.policy = make_policy(policy, length) if isinstance(policy, str) else policy
        self._size = self.bridge.size or model.vocabulary
        self.bytes_read = 0
        if way == "shared":
            pairs = sorted(self.bridge.shared.items())
            if not pairs or len({theirs for _, theirs in pairs}) < len(pairs):
                raise InvalidOption(
                    "the vocabularies share no tokens, or one that stands for two; take way='retokenise'"
                )
            self._ours, self._theirs = (upload(list(one), model.device) for one in zip(*pairs, strict=True))

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._passages = [self.bridge.open(prompt) for prompt in prompts]
        self.model.begin([one.settled() for one in self._passages], Sampling(temperature=0), frozenset())
        self.policy.begin(len(prompts), self.model.device)
        # what penalties remember is in the target's tokens; leaving them out changes q, and q may be anything
        self._sampling = replace(sampling, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
        self._news: list[list[int]] = [[] for _ in prompts]

    def propose(self, room: Tensor, dice: Dice) -> Draft:
        left = upload(room, dice.device)
        for passage, tokens, going in zip(self._passages, self._news, (room >= 0).tolist(), strict=True):
            if going:
                passage.add(tokens)
        self._news = [[] for _ in self._passages]
        self.model.keep(*told([one.settled() for one in self._passages], dice.device))
        committed = self.model.mark()
        self.model.keep(*told([one.tail for one in self._passages], dice.device))
        draft = self._retokenised(left, dice) if self.way == "retokenise" else self._restricted(left, dice)
        self.model.rewind(committed)
        self._drafted = draft.live.sum(1)
        return draft

    def _scores(self, tokens: Tensor, live: Tensor, depth: int) -> Scores:
        self.bytes_read += self.model.weight_bytes
        draft = Draft.guess(tokens, Tree.chain(depth, tokens.device), live)
        return self.model.score(draft, depth - 1 if depth else None)

    def _retokenised(self, left: Tensor, dice: Dice) -> Draft:
        wanted = torch.minimum(self.policy.start(), left)  # a token of one may be several of the other: cut below
        going = wanted > 0
        tokens = torch.zeros(len(left), 0, dtype=torch.long, device=dice.device)
        live = tokens.bool()
        for depth in range(self.policy.longest):
            going = going & (wanted > depth)
            if dice.device.type == "cpu" and not bool(going.any()):
                break
            logits = self._scores(tokens, live, depth).logits()[:, -1]
            law = to_law(logits, Sampling())
            going = going & self.policy.more(law, depth)
            tokens = torch.cat([tokens, law.top(1)[0]], 1)
            live = torch.cat([live, going[:, None]], 1)
        counts, rows = live.sum(1).tolist(), tokens.tolist()
        found = [
            passage.back(row[:count])[: max(most, 0)] if count else []
            for passage, row, count, most in zip(self._passages, rows, counts, left.tolist(), strict=True)
        ]
        return guesses(found, dice.device)

    def _restricted(self, left: Tensor, dice: Dice) -> Draft:
        wanted = torch.minimum(self.policy.start(), left)
        longest = min(self.policy.longest, int(wanted.max()))
        dice.reserve(longest)
        theirs = torch.zeros(len(left), 0, dtype=torch.long, device=dice.device)
        tokens, live, going, laws = theirs, theirs.bool(), wanted > 0, list[Law]()
        for depth in range(longest):
            logits = self._scores(theirs, live, depth).logits()[:, -1:].index_select(2, self._theirs)
            places = to_law(logits, self._sampling)  # [B, 1, S] over the shared tokens
            law = self._named(places)
            going = going & (wanted > depth) & self.policy.more(law.column(0), depth)
            if dice.device.type == "cpu" and not bool(going.any()):
                break
            place = dice.pick(places.column(0), depth, Purpose.DRAW, going)
            tokens = torch.cat([tokens, self._ours[place][:, None]], 1)
            theirs = torch.cat([theirs, self._theirs[place][:, None]], 1)
            live = torch.cat([live, going[:, None]], 1)
            laws.append(law)
        return Draft.drawn(tokens, joined(laws), live) if laws else Draft.empty(len(left), dice.device)

    def _named(self, law: Law) -> Law:
        """A law over places among the shared tokens, as one over the target's."""
        ids = self._ours.expand(law.probs.shape) if law.tokens is None else self._ours[law.tokens]
        named = Law(law.probs, ids, self._size)
        return named if law.width <= _FEW else named.dense()

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, dice: Dice) -> None:
        self._news = verdict.rows(draft)
        self.policy.learn(self._drafted, verdict.accepted)

    def end(self) -> None:
        self.model.end()
        self._passages = []
