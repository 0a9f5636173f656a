"""Frames of several codebooks as a target of tokens: a frame is K consecutive tokens in the order of depth.

A model of frames reads whole frames and has a state behind each; from a state and the codes of the frame so far, the
next book's distribution is said, by a small decoder along depth, or, where the books of a frame are independent given
the past, by a head for each. A draft's tree of tokens becomes a tree of the frames that its paths complete, which the
model reads in one pass; the frame under way is held here. As long as no row has completed a frame since, and no draft
completes one, the state is known, so that books within a frame cost no pass of the model. Tokens are told apart by book
(book k's codes are the ids from k V on), conditions by the ids behind all of them. Knows nothing of sound."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts, Scores, Target, committed
from outrider.core.tree import Tree

# States [Q, D], codes of the frame so far [Q, K - 1] (0 behind them) and how many there are [Q] -> logits [Q, V] of the
# next book.
Say = Callable[[Tensor, Tensor, Tensor], Tensor]


class Store:
    """The frames that ids of the inner model stand for: conditions first, then frames as they come up."""

    def __init__(self, conditions: int, books: int) -> None:
        self.conditions = conditions
        self.codes = torch.zeros(0, books, dtype=torch.long)

    def add(self, codes: Tensor) -> Tensor:
        """Frames [..., K] -> ids [...]."""
        first = self.conditions + len(self.codes)
        self.codes = torch.cat([self.codes.to(codes.device), codes.reshape(-1, codes.shape[-1])])
        return torch.arange(first, first + codes[..., 0].numel(), device=codes.device).view(codes.shape[:-1])

    def of(self, ids: Tensor) -> Tensor:
        """Ids [...] -> codes [..., K]; anything for conditions."""
        if not len(self.codes):
            return self.codes.new_zeros(*ids.shape, self.codes.shape[1], device=ids.device)
        return self.codes.to(ids.device)[(ids - self.conditions).clamp(0, len(self.codes) - 1)]


@dataclass(frozen=True, eq=False)
class _Plan:
    """A draft's tree of frames, and where each of its nodes hangs."""

    draft: Draft  # of frames
    size: int  # N, nodes of the draft
    node: Tensor  # [B, N + 1] the row (0: the root) of the frames' tree that the root and each node stand in
    codes: Tensor  # [B, N + 1, K - 1] of the frame under way there, the last one still open
    count: Tensor  # [B, N + 1] how many
    frame: Tensor  # [B, N] the frame that each node completes, as a node of the frames' tree; -1: none


class FrameTarget:
    """`inner` reads ids of `store` and has states at the tap "last"; `say` is what its states say of each book."""

    rollback = True

    def __init__(self, inner: Target, store: Store, books: int, codes: int, say: Say, *, depth_bytes: int = 0) -> None:
        if books < 1:
            raise InvalidOption(f"{books} books; a frame has one or more")
        self.inner, self.store, self.books, self.codes, self._say = inner, store, books, codes, say
        self.vocabulary, self.device = books * codes, inner.device
        self.weight_bytes = inner.weight_bytes + depth_bytes

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if needs:
            raise InvalidOption(f"frames have no states of single tokens, and {', '.join(sorted(needs))} was asked for")
        self.store.codes = self.store.codes[:0]
        self._pipeline = LogitsPipeline(sampling, [[0]] * len(prompts), self.vocabulary, self.device)
        self._lengths = torch.tensor([len(one) for one in prompts], device=self.device)
        given, parts = [], []
        for one in prompts:
            before = [token - self.vocabulary for token in one if token >= self.vocabulary]
            tokens = torch.tensor(one[len(before) :], dtype=torch.long, device=self.device) % self.codes
            if not before:
                raise InvalidOption("a row of frames begins with a condition, for the model to have a state behind")
            whole = len(tokens) // self.books * self.books
            ids = self.store.add(tokens[:whole].view(-1, self.books))
            given.append([*before, *ids.tolist()])
            parts.append(tokens[whole:].tolist())
        self._hold(parts)
        self._state: Tensor | None = None  # [B, D] behind each row's last frame, where it is known
        self._known = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        self._read: _Plan | None = None  # what was scored since something was kept
        self._frames = 0  # of its frames, those that the inner model holds in its scratch
        self.inner.begin(given, Sampling(), frozenset({"last"}))
        return Prefill()

    def _hold(self, parts: list[list[int]]) -> None:
        """The frame under way in each row."""
        room = self.books - 1
        self._part = torch.tensor([[*one, *[0] * (room - len(one))] for one in parts], device=self.device).long()
        self._part = self._part.view(len(parts), room)
        self._held = torch.tensor([len(one) for one in parts], device=self.device)

    def _planned(self, draft: Draft, read: _Plan | None = None) -> _Plan:
        """`read`: what was planned for the draft's first nodes; the frames of later nodes come behind those."""
        scored = (0, 0) if read is None else (read.size, read.draft.size)
        rows, size, books = draft.rows, draft.size, self.books
        parents = draft.tree.parents.expand(rows, -1)
        own = draft.tokens.clamp(min=0) % self.codes
        # walk down: what each node adds to the frame that its parent left open
        node = torch.zeros(rows, size + 1, dtype=torch.long, device=self.device)
        count = torch.zeros_like(node)
        codes = torch.zeros(rows, size + 1, books, dtype=torch.long, device=self.device)
        codes[:, 0, : books - 1], count[:, 0] = self._part, self._held
        frame = torch.full((rows, size), -1, dtype=torch.long, device=self.device)
        whole = torch.zeros(rows, size, books, dtype=torch.long, device=self.device)
        found = torch.zeros(rows, dtype=torch.long, device=self.device)  # frames of each row so far
        up = torch.full((rows, size), -1, dtype=torch.long, device=self.device)
        used = torch.zeros(rows, size, dtype=torch.bool, device=self.device)
        for place in range(size):
            if place == scored[0]:
                found = found.clamp(min=scored[1])
            above = parents[:, place : place + 1] + 1
            line = codes.gather(1, above[..., None].expand(-1, -1, books))[:, 0]
            there = count.gather(1, above)
            line = line.scatter(1, there, own[:, place : place + 1])
            ends = (there[:, 0] == books - 1) & draft.live[:, place]
            stands = node.gather(1, above)[:, 0]
            frame[:, place] = torch.where(ends, found, -1)
            slot = torch.where(ends, found, size - 1)
            kept = whole.gather(1, slot[:, None, None].expand(-1, -1, books))[:, 0]
            whole.scatter_(
                1, slot[:, None, None].expand(-1, -1, books), torch.where(ends[:, None], line, kept)[:, None]
            )
            before = up.gather(1, slot[:, None])[:, 0]
            up.scatter_(1, slot[:, None], torch.where(ends, stands - 1, before)[:, None])
            used.scatter_(1, slot[:, None], (used.gather(1, slot[:, None])[:, 0] | ends)[:, None])
            found = found + ends
            node[:, place + 1] = torch.where(ends, found, stands)
            count[:, place + 1] = torch.where(ends, 0, (there[:, 0] + 1).clamp(max=books - 1))
            codes[:, place + 1] = torch.where(ends[:, None], 0, line)
        most = int(found.max()) if size else 0
        slots, live = torch.arange(most, device=self.device), used[:, :most]
        tree = torch.where(live, up[:, :most], slots - 1)  # dead nodes hang below one another
        ids = self.store.add(whole[:, :most]) if most else whole[:, :0, 0]
        frames = Draft.guess(ids, Tree(tree), live)
        return _Plan(frames, size, node, codes[..., : books - 1], count, frame)

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        plan = self._read = self._planned(draft)
        if plan.draft.size or self._state is None or not bool(self._known.all()):
            scores = self.inner.score(plan.draft)
            states = scores.hidden["last"]  # [B, M + 1, D]
            self._state, self._known = states[:, 0], torch.ones_like(self._known)
            self._frames = plan.draft.size
        else:
            self._drop()
            states = self._state[:, None]
        self._states = states
        first = 0 if since is None else since + 1

        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            def picked(part: Tensor) -> Tensor:
                index = rows if part.dim() == 2 else rows[..., None].expand(-1, -1, part.shape[2])
                return part.gather(1, index)

            node, count = picked(plan.node), picked(plan.count)
            state = states.gather(1, node[..., None].expand(-1, -1, states.shape[2]))
            said = self._say(state.flatten(0, 1), picked(plan.codes).flatten(0, 1), count.flatten())
            found = said.new_zeros(len(said), self.books, self.codes)
            found[torch.arange(len(said), device=self.device), count.flatten()] = said
            return found.view(*rows.shape, self.vocabulary)

        return Scores(draft, self._pipeline, self._lengths, logits, None, first)

    def _drop(self) -> None:
        """Frames of an earlier draft are no part of what is scored or kept next."""
        if self._frames:
            self.inner.rewind(self.inner.mark())
        self._frames = 0

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        tokens = committed(draft, verdict, count)
        self._pipeline.commit(tokens)
        self._lengths = self._lengths + count
        read, self._read = self._read, None  # the scratch is good for one keep
        plan = read
        if plan is None or plan.size != draft.size:  # some of its nodes were never scored, or none
            plan = self._planned(draft, read)
        # what was emitted, frame by frame; the last one may have been completed by the target's own token
        emitted: list[list[list[int]]] = []
        parts: list[list[int]] = []
        path: list[list[int]] = []
        last: list[list[int]] = []
        frames = plan.frame.tolist()
        kept, taken = verdict.path.tolist(), count.tolist()
        for row, line in enumerate(tokens.tolist()):
            held = self._part[row, : int(self._held[row])].tolist()
            line = [*held, *(token % self.codes for token in line if token >= 0)]
            whole = len(line) // self.books
            emitted.append([line[at * self.books : (at + 1) * self.books] for at in range(whole)])
            parts.append(line[whole * self.books :])
            nodes = [node for node in kept[row][: taken[row]] if node >= 0]
            path.append([frames[row][node] for node in nodes if frames[row][node] >= 0])
            last.append(emitted[-1][-1] if whole > len(path[-1]) else [0] * self.books)
        self._hold(parts)
        if any(emitted):
            self._advance(plan, emitted, path, last)
        self._drop()

    def _advance(
        self, plan: _Plan, emitted: list[list[list[int]]], path: list[list[int]], last: list[list[int]]
    ) -> None:
        """The inner model keeps what was completed; where its state is known already, it stays so."""
        device, scored, self._frames = self.device, self._frames, 0
        ids = self.store.add(torch.tensor(last, device=device))
        deep = plan.draft.tree.depth
        chosen = torch.tensor([[*one, *[-1] * (deep - len(one))] for one in path], device=device).long()
        chosen = chosen.view(len(path), deep)
        accepted = torch.tensor([len(one) for one in path], device=device)
        none = torch.zeros(len(path), plan.draft.size, device=device)
        verdict = Verdict(chosen, accepted, ids, accepted < 0, none.bool(), none, none, none)
        counts = [len(one) for one in emitted]
        verdict = replace(verdict, outcome=Outcome(verdict.rows(plan.draft), path, counts))
        many = torch.tensor(counts, device=device)
        self.inner.keep(plan.draft, verdict, many)
        if self._state is None:  # nothing was read yet
            return
        ends = chosen.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0] if deep else accepted * 0
        own = (many > 0) & (many == accepted) & (ends < scored)  # the last frame was a node that was scored
        index = torch.where(own, ends + 1, 0)
        seen = self._states.gather(1, index[:, None, None].expand(-1, 1, self._states.shape[2]))[:, 0]
        self._state = torch.where(own[:, None], seen, self._state)
        self._known = own | (many == 0)

    def mark(self) -> object:
        return (
            self.inner.mark(),
            copy.copy(self._pipeline),
            self._lengths,
            self._part,
            self._held,
            self._state,
            self._known,
        )

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self.inner.rewind(mark[0])
        self._pipeline = copy.copy(mark[1])
        here = mark[2] is self._lengths  # nothing was kept since: the states behind the rows are what they were
        self._lengths, self._part, self._held = mark[2:5]
        if not here:
            self._state, self._known = mark[5:]
        self._read, self._frames = None, 0

    def end(self) -> None:
        self.inner.end()
        self._state = None
        self.store.codes = self.store.codes[:0]
