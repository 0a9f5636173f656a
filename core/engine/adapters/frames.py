"""Multi-codebook frames as a target over tokens: a frame is K consecutive tokens, one per codebook, in order.

The frame model reads whole frames and has a state after each. From this state and the codes of the frame so far, a
small depth decoder computes the state before the next codebook (without one it is the frame's), and that codebook's
output rows its distribution. A draft's token tree becomes a tree of the frames that its paths complete, which the model
reads in one pass; incomplete frames are kept here. While no frame is completed, the state is known, so the codebooks
within a frame cost no pass of the model. Code c of codebook k is the token k V + c; ids from K V on are conditions.

For draft heads a token's state is the next codebook's, followed by one column a codebook that says which it is, so that
one output layer over all tokens has these distributions. Independent of sound."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import linear, one_hot, pad

from outrider.core.distribution import LogitsPipeline, Sampling
from outrider.core.draft import Draft, Outcome, Verdict
from outrider.core.engine.linear import Dense
from outrider.core.engine.network import Network
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption, unknown
from outrider.core.protocol import Prefill, Prompts, Scores, Target, committed
from outrider.core.tree import Tree

# states of frames [Q, D], codes of the frame so far [Q, K - 1] (padded with 0) and their number [Q]
# -> states [Q, S] before the next codebook
CodebookStates = Callable[[Tensor, Tensor, Tensor], Tensor]
_APART = 30.0  # by which the output layer of draft heads has the logits of other codebooks below those of the next
_COLUMNS = 32  # of which it has a multiple for the codebooks


def _columns(books: int) -> int:
    return -(-books // _COLUMNS) * _COLUMNS


def first_turn(config: Config, books: int) -> int:
    """The first of the columns that say which codebook is next, in the states of a frame target's network."""
    return config.hidden_size - _columns(books)


class FrameStore:
    """The frames behind the inner model's ids: conditions come first, then frames in the order they are added."""

    def __init__(self, conditions: int, books: int) -> None:
        self.conditions = conditions
        self.codes = torch.zeros(0, books, dtype=torch.long)

    def add(self, codes: Tensor) -> Tensor:
        """Frames [..., K] -> ids [...]."""
        first = self.conditions + len(self.codes)
        self.codes = torch.cat([self.codes.to(codes.device), codes.reshape(-1, codes.shape[-1])])
        return torch.arange(first, first + codes[..., 0].numel(), device=codes.device).view(codes.shape[:-1])

    def of(self, ids: Tensor) -> Tensor:
        """Ids [...] -> codes [..., K]; arbitrary for conditions."""
        if not len(self.codes):
            return self.codes.new_zeros(*ids.shape, self.codes.shape[1], device=ids.device)
        return self.codes.to(ids.device)[(ids - self.conditions).clamp(0, len(self.codes) - 1)]


@dataclass(frozen=True, eq=False)
class _Plan:
    """The tree of frames of a draft, and how the draft's nodes map to it. Index 0 of [B, N + 1] is the root."""

    draft: Draft  # the tree of frames
    size: int  # N, the draft's nodes
    node: Tensor  # [B, N + 1] the row in the frame tree's scores (0: its root) whose state precedes the next token
    codes: Tensor  # [B, N + 1, K - 1] codes of the incomplete frame
    count: Tensor  # [B, N + 1] the number of these
    frame: Tensor  # [B, N] the frame that a node completes, as a node of the frame tree; -1: none


class FrameTarget:
    """A target over the tokens of frames with `books` codebooks of `codes` codes.

    `inner` reads ids of `store` and has states at the tap "last". `states` computes those before a codebook from them,
    of which its rows in `heads` [V, S] make the logits; rows and columns that are left out are 0. `depth_bytes`: the
    weights that `states` reads. `embedding` [K V, E]: the tokens' vectors, for draft heads.
    """

    rollback, taps = True, ("last",)

    def __init__(
        self,
        inner: Target,
        store: FrameStore,
        books: int,
        codes: int,
        states: CodebookStates,
        heads: Sequence[Tensor],
        *,
        embedding: Callable[[], Tensor] | None = None,
        depth_bytes: int = 0,
    ) -> None:
        if books < 1 or len(heads) != books:
            raise InvalidOption(f"books is {books}, with output rows for {len(heads)}; a frame has 1 or more codebooks")
        self.inner, self.store, self.books, self.codes = inner, store, books, codes
        self._codebook_states, self._heads, self._embedding = states, heads, embedding
        self._needs = frozenset[str]()
        self.vocabulary, self.device = books * codes, inner.device
        self.weight_bytes = inner.weight_bytes + depth_bytes
        self._width = max(head.shape[1] for head in heads)

    @cached_property
    def network(self) -> Network:
        """What draft heads share, as a network without layers: the tokens' vectors and one output layer over their
        states at the tap "last"."""
        width, columns = self._width, _columns(self.books)
        rows = self._heads[0].new_zeros(self.books, self.codes, width + columns)
        for book, head in enumerate(self._heads):
            rows[book, : len(head), : head.shape[1]] = head.detach()
        which = torch.eye(self.books, columns, device=rows.device, dtype=rows.dtype)[:, None].expand(-1, self.codes, -1)
        rows[..., width : width + self.books] = -_APART * (1 - which[..., : self.books])
        vectors = torch.zeros_like(rows)
        vectors[..., width:] = which
        if self._embedding is not None:
            given = self._embedding().detach()
            vectors[..., : given.shape[1]] = given.view(self.books, self.codes, -1)
        heads = max(width // 64, 1)
        config = Config(
            vocabulary=self.vocabulary,
            hidden_size=width + columns,
            layers=1,
            heads=heads,
            kv_heads=heads,
            head_dim=width // heads // 2 * 2,
            intermediate_size=2 * width,
            context=1 << 20,
            tied=False,
        )
        norm = torch.ones(width + columns, dtype=rows.dtype, device=rows.device)
        return Network(config, vectors.flatten(0, 1), (), norm, Dense(rows.flatten(0, 1)))

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        for tap in needs:
            if tap not in self.taps:
                raise unknown("hidden tap", tap, self.taps)
        self._needs = needs
        self.store.codes = self.store.codes[:0]
        self._pipeline = LogitsPipeline(sampling, [[0]] * len(prompts), self.vocabulary, self.device)
        self._lengths = torch.tensor([len(prompt) for prompt in prompts], device=self.device)
        inputs, incomplete = [], []
        for prompt in prompts:
            conditions = [token - self.vocabulary for token in prompt if token >= self.vocabulary]
            tokens = torch.tensor(prompt[len(conditions) :], dtype=torch.long, device=self.device) % self.codes
            if not conditions:
                raise InvalidOption(
                    f"a prompt for frames must begin with a condition, an id of {self.vocabulary} or more; got none"
                )
            whole = len(tokens) // self.books * self.books
            ids = self.store.add(tokens[:whole].view(-1, self.books))
            inputs.append([*conditions, *ids.tolist()])
            incomplete.append(tokens[whole:].tolist())
        self._set_incomplete(incomplete)
        self._state: Tensor | None = None  # [B, D] after each row's last frame, where known
        self._known = torch.zeros(len(prompts), dtype=torch.bool, device=self.device)
        self._read: _Plan | None = None  # the plan scored since the last keep
        self._frames = 0  # frames in the inner model's scratch
        hidden = self.inner.begin(inputs, Sampling(), frozenset({"last"})).hidden
        return Prefill(self._of_prompts(prompts, inputs, hidden) if needs and max(map(len, prompts)) > 1 else {})

    def _of_prompts(
        self, prompts: Prompts, inputs: Sequence[Sequence[int]], hidden: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """The states [B, L, S] of the prompts' tokens but the last, at the taps; `hidden` lacks that of the last
        input, the root."""
        self.score(Draft.empty(len(prompts), self.device))
        assert self._state is not None
        self._read = None
        ends = torch.tensor([len(ids) - 1 for ids in inputs], device=self.device)
        known = pad(hidden["last"], (0, 0, 0, 1)) if hidden else self._state[:, None]
        known = known.scatter(1, ends[:, None, None].expand(-1, 1, known.shape[2]), self._state[:, None])
        longest = max(map(len, prompts))
        tokens = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=self.device)
        first = (tokens >= self.vocabulary).sum(1, keepdim=True)  # [B, 1] conditions
        place = torch.arange(longest - 1, device=self.device)
        read = (place + 1 - first).clamp(min=0)  # [B, L] codes read
        whole, count = read // self.books, read % self.books
        slots = torch.arange(self.books - 1, device=self.device)
        at = (first + whole * self.books)[..., None] + slots  # [B, L, K - 1]
        codes = tokens.gather(1, at.clamp(max=longest - 1).flatten(1)).view_as(at) % self.codes
        codes = torch.where(slots < count[..., None], codes, 0)
        index = torch.where(place < first, place, first - 1 + whole).minimum(ends[:, None])
        states = known.gather(1, index[..., None].expand(-1, -1, known.shape[2]))
        return {"last": self._tapped(states, codes, count)}

    def _tapped(self, states: Tensor, codes: Tensor, count: Tensor) -> Tensor:
        """States of frames [B, R, D], codes so far [B, R, K - 1] and their number -> [B, R, S] at the tap "last"."""
        whole = self._width + _columns(self.books)
        own = self._codebook_states(states.flatten(0, 1), codes.flatten(0, 1), count.flatten())
        which = one_hot(count.flatten(), whole - self._width).to(own)
        return torch.cat([pad(own, (0, self._width - own.shape[1])), which], 1).view(*count.shape, whole)

    def _set_incomplete(self, frames: list[list[int]]) -> None:
        """Set the codes of each row's incomplete frame."""
        room = self.books - 1
        padded = [[*codes, *[0] * (room - len(codes))] for codes in frames]
        self._incomplete = torch.tensor(padded, device=self.device).long().view(len(frames), room)
        self._incomplete_count = torch.tensor([len(codes) for codes in frames], device=self.device)

    def _plan(self, draft: Draft, read: _Plan | None = None) -> _Plan:
        """The plan of a draft. `read`: the plan of its first nodes, already scored; later nodes' frames follow its."""
        rows, size, books, device = draft.rows, draft.size, self.books, self.device
        before, start = self._incomplete, self._incomplete_count[:, None]  # codes and their number at the root
        if not size:
            nothing = torch.zeros(rows, 1, dtype=torch.long, device=device)
            ids = torch.zeros(rows, 0, dtype=torch.long, device=device)
            frames = Draft.guess(ids, Tree(ids), ids.bool())
            return _Plan(frames, 0, nothing, before[:, None], start, ids)
        # a node at depth d has the code number start + d of its row, counted from the start of the incomplete frame
        codes = torch.cat([before, draft.tokens.clamp(min=0) % self.codes], 1)  # [B, K - 1 + N]
        depths, paths = draft.tree.depths.expand(rows, -1), draft.tree.paths.expand(rows, -1, -1)
        number = start + depths + 1  # [B, N] codes up to a node, its own included
        slots = torch.arange(books, device=device)
        here = (number - 1) // books * books  # the first code of a node's frame
        line = self._codes_at(codes, paths, here[..., None] + slots)  # [B, N, K] unknown ones arbitrary
        completes = (number % books == 0) & draft.live
        frame = completes.cumsum(1) - 1
        if read is not None:
            missing = read.draft.size - completes[:, : read.size].sum(1, keepdim=True)
            frame = frame + missing.clamp(min=0) * (torch.arange(size, device=device) >= read.size)
        frame = torch.where(completes, frame, -1)
        # the last node on each path that completes a frame
        last = number // books * books - start - 1
        ending = paths.gather(2, last.clamp(0, paths.shape[2] - 1)[..., None])[..., 0].clamp(min=0)
        after = torch.where(last >= 0, frame.gather(1, ending) + 1, 0)
        node = pad(after, (1, 0))
        count = torch.cat([start, number % books], 1)
        inside = slots[: books - 1] < count[:, 1:, None]
        partial = torch.where(inside, line[..., : books - 1], 0)
        most = int(frame.max()) + 1
        place = torch.where(completes, frame, most)  # other nodes write to a column that is dropped
        frame_codes = codes.new_zeros(rows, most + 1, books)
        frame_codes.scatter_(1, place[..., None].expand(-1, -1, books), line)
        above = node.gather(1, draft.tree.parents.expand(rows, -1) + 1) - 1
        parents = codes.new_zeros(rows, most + 1).scatter_(1, place, above)[:, :most]
        live = completes.new_zeros(rows, most + 1).scatter_(1, place, completes)[:, :most]
        tree = torch.where(live, parents, torch.arange(most, device=device) - 1)  # dead nodes form a chain
        ids = self.store.add(frame_codes[:, :most]) if most else frame_codes[:, :0, 0]
        states = torch.cat([before[:, None], partial], 1)
        return _Plan(Draft.guess(ids, Tree(tree), live), size, node, states, count, frame)

    def _codes_at(self, codes: Tensor, paths: Tensor, numbers: Tensor) -> Tensor:
        """The codes with these numbers [B, N, K] on each node's path, from those at the root and of all nodes."""
        start = self._incomplete_count[:, None, None]
        depth = (numbers - start).clamp(0, paths.shape[2] - 1)
        on_path = paths.gather(2, depth).clamp(min=0) + self.books - 1
        place = torch.where(numbers < start, numbers.clamp(0, max(self.books - 2, 0)), on_path)
        return codes.gather(1, place.flatten(1)).view_as(numbers)

    @torch.no_grad()
    def score(self, draft: Draft, since: int | None = None) -> Scores:
        plan = self._read = self._plan(draft)
        if plan.draft.size or self._state is None or not bool(self._known.all()):
            scores = self.inner.score(plan.draft)
            states = scores.hidden["last"]  # [B, M + 1, D]
            self._state, self._known = states[:, 0], torch.ones_like(self._known)
            self._frames = plan.draft.size
        else:
            self._drop_scratch()
            states = self._state[:, None]
        self._states = states
        first = 0 if since is None else since + 1
        before = states.gather(1, plan.node[..., None].expand(-1, -1, states.shape[2]))  # [B, N + 1, D] each token
        tapped = self._tapped(before, plan.codes, plan.count) if self._needs else None

        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            def at_rows(part: Tensor) -> Tensor:
                index = rows if part.dim() == 2 else rows[..., None].expand(-1, -1, part.shape[2])
                return part.gather(1, index).flatten(0, 1)

            count = at_rows(plan.count)
            own = (
                self._codebook_states(at_rows(before), at_rows(plan.codes), count)
                if tapped is None
                else at_rows(tapped)
            )
            by_book = own.new_zeros(len(own), self.books, self.codes)
            for book in sorted(set(count.tolist())):
                which, head = (count == book).nonzero()[:, 0], self._heads[book]
                by_book[which, book, : len(head)] = linear(own[which, : head.shape[1]], head)
            return by_book.view(*rows.shape, self.vocabulary)

        hidden = None if tapped is None else {"last": tapped[:, first:]}
        return Scores(draft, self._pipeline, self._lengths, logits, hidden, first)

    def _drop_scratch(self) -> None:
        """Remove the frames of an earlier draft from the inner model's scratch."""
        if self._frames:
            self.inner.rewind(self.inner.mark())
        self._frames = 0

    @torch.no_grad()
    def keep(self, draft: Draft, verdict: Verdict, count: Tensor) -> None:
        tokens = committed(draft, verdict, count)
        self._pipeline.commit(tokens)
        self._lengths = self._lengths + count
        read, self._read = self._read, None  # the scratch serves one keep
        plan = read
        if plan is None or plan.size != draft.size:  # some nodes were not scored
            plan = self._plan(draft, read)
        # split the emitted codes into frames; the last frame may end with the token that is not from the draft
        emitted: list[list[list[int]]] = []
        incomplete: list[list[int]] = []
        path: list[list[int]] = []
        last: list[list[int]] = []
        frames = plan.frame.tolist()
        accepted, counts = verdict.path.tolist(), count.tolist()
        for row, row_tokens in enumerate(tokens.tolist()):
            codes = self._incomplete[row, : int(self._incomplete_count[row])].tolist()
            codes += [token % self.codes for token in row_tokens if token >= 0]
            whole = len(codes) // self.books
            emitted.append([codes[index * self.books : (index + 1) * self.books] for index in range(whole)])
            incomplete.append(codes[whole * self.books :])
            nodes = [node for node in accepted[row][: counts[row]] if node >= 0]
            path.append([frames[row][node] for node in nodes if frames[row][node] >= 0])
            last.append(emitted[-1][-1] if whole > len(path[-1]) else [0] * self.books)
        self._set_incomplete(incomplete)
        if any(emitted):
            self._advance(plan, emitted, path, last)
        self._drop_scratch()

    def _advance(
        self, plan: _Plan, emitted: list[list[list[int]]], path: list[list[int]], last: list[list[int]]
    ) -> None:
        """Commit the completed frames to the inner model, and update the known states."""
        device, scored, self._frames = self.device, self._frames, 0
        ids = self.store.add(torch.tensor(last, device=device))
        depth = plan.draft.tree.depth
        padded = [[*nodes, *[-1] * (depth - len(nodes))] for nodes in path]
        paths = torch.tensor(padded, device=device).long().view(len(path), depth)
        accepted = torch.tensor([len(nodes) for nodes in path], device=device)
        zeros = torch.zeros(len(path), plan.draft.size, device=device)
        verdict = Verdict(paths, accepted, ids, accepted < 0, zeros.bool(), zeros, zeros, zeros)
        counts = [len(frames) for frames in emitted]
        verdict = replace(verdict, outcome=Outcome(verdict.rows(plan.draft), path, counts))
        count = torch.tensor(counts, device=device)
        self.inner.keep(plan.draft, verdict, count)
        if self._state is None:  # nothing was read yet
            return
        ends = paths.gather(1, (accepted - 1).clamp(min=0)[:, None])[:, 0] if depth else accepted * 0
        scored_end = (count > 0) & (count == accepted) & (ends < scored)  # the last frame is a node that was scored
        index = torch.where(scored_end, ends + 1, 0)
        states = self._states.gather(1, index[:, None, None].expand(-1, 1, self._states.shape[2]))[:, 0]
        self._state = torch.where(scored_end[:, None], states, self._state)
        self._known = scored_end | (count == 0)

    def mark(self) -> object:
        return (
            self.inner.mark(),
            copy.copy(self._pipeline),
            self._lengths,
            self._incomplete,
            self._incomplete_count,
            self._state,
            self._known,
        )

    def rewind(self, mark: object) -> None:
        assert isinstance(mark, tuple)
        self.inner.rewind(mark[0])
        self._pipeline = copy.copy(mark[1])
        unchanged = mark[2] is self._lengths  # nothing was kept since the mark, so the known states are still valid
        self._lengths, self._incomplete, self._incomplete_count = mark[2:5]
        if not unchanged:
            self._state, self._known = mark[5:]
        self._read, self._frames = None, 0

    def end(self) -> None:
        self.inner.end()
        self._state = None
        self.store.codes = self.store.codes[:0]
