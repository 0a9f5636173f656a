"""Multi-codebook frames as a target over tokens: a frame is K consecutive tokens, one per codebook, in order.

The frame model reads whole frames and has a state after each. From this state and the codes of the frame so far, the
next codebook's distribution is computed, by a small depth decoder or by one head per codebook. A draft's token tree
becomes a tree of the frames that its paths complete, which the model reads in one pass; incomplete frames are kept
here. While no frame is completed, the state is known, so the codebooks within a frame cost no pass of the model. Code c
of codebook k is the token k V + c; ids from K V on are conditions. Independent of sound."""

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

# states [Q, D], codes of the frame so far [Q, K - 1] (padded with 0) and their number [Q]
# -> logits [Q, V] of the next codebook
CodebookLogits = Callable[[Tensor, Tensor, Tensor], Tensor]


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

    `inner` reads ids of `store` and has states at the tap "last"; `logits` computes a codebook's logits from them.
    `depth_bytes`: the weights that `logits` reads.
    """

    rollback = True

    def __init__(
        self,
        inner: Target,
        store: FrameStore,
        books: int,
        codes: int,
        logits: CodebookLogits,
        *,
        depth_bytes: int = 0,
    ) -> None:
        if books < 1:
            raise InvalidOption(f"books is {books}; a frame has 1 or more codebooks")
        self.inner, self.store, self.books, self.codes, self._codebook_logits = inner, store, books, codes, logits
        self.vocabulary, self.device = books * codes, inner.device
        self.weight_bytes = inner.weight_bytes + depth_bytes

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if needs:
            raise InvalidOption(
                f"no hidden states at {', '.join(sorted(needs))}: a model of frames has none for single tokens"
            )
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
        self.inner.begin(inputs, Sampling(), frozenset({"last"}))
        return Prefill()

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
        node = torch.nn.functional.pad(after, (1, 0))
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

        @torch.no_grad()
        def logits(rows: Tensor) -> Tensor:
            def at_rows(part: Tensor) -> Tensor:
                index = rows if part.dim() == 2 else rows[..., None].expand(-1, -1, part.shape[2])
                return part.gather(1, index)

            node, count = at_rows(plan.node), at_rows(plan.count).flatten()
            state = states.gather(1, node[..., None].expand(-1, -1, states.shape[2]))
            code_logits = self._codebook_logits(state.flatten(0, 1), at_rows(plan.codes).flatten(0, 1), count)
            by_book = code_logits.new_zeros(len(code_logits), self.books, self.codes)
            by_book[torch.arange(len(code_logits), device=self.device), count] = code_logits
            return by_book.view(*rows.shape, self.vocabulary)

        return Scores(draft, self._pipeline, self._lengths, logits, None, first)

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
