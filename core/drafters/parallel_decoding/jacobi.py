"""Jacobi decoding: a window of guesses for the next positions, updated by every target pass until they converge.

New positions start with a filler; a pass gives the distributions after all guesses, from which the window is updated:
`greedy` takes the likeliest tokens as fixed guesses (Santilli et al., "Accelerating transformer inference for
translation via parallel decoding", arXiv 2305.10427); `redraw` draws new tokens (speculative Jacobi decoding, arXiv
2410.01699); `couple` keeps old draws by a maximal coupling of the old and the new distribution, and `gumbel` draws with
noise fixed per position (both arXiv 2510.24211). All are exact. Ours supports ragged batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Literal

import torch
from torch import Tensor

from outrider.core.device import side_number, upload
from outrider.core.distribution import Distribution, LogitsPipeline, Sampling, residual
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels.topk import argmax
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG, PredrawnRNG, Purpose
from outrider.core.rules import native_walk
from outrider.core.tree import Tree

SPATIAL = ("left", "above")  # for tokens in a raster, such as image codes
FILLERS = ("copy", "random", "pad", *SPATIAL)
RENEWALS = ("greedy", "redraw", "couple", "gumbel")


class Jacobi(WeightFree):
    """One window per row. `filler` is the guess at new positions: the last token ("copy"), a "random" token, the token
    `pad`, or in a raster of `columns` columns the token or guess to the "left" (in the first column: above) or "above"
    (arXiv 2410.01699). Above the first raster row is the prompt's last token."""

    standalone: Literal[True] = True  # the window is updated from its own draft's scores

    def __init__(
        self, *, window: int = 8, renew: str = "greedy", filler: str = "copy", pad: int = 0, columns: int = 0
    ) -> None:
        if filler in SPATIAL and columns < 1:
            raise InvalidOption(f"the filler '{filler}' needs columns=..., the tokens in a raster row; got {columns}")
        if window < 1:
            raise InvalidOption(f"window is {window}; it must be 1 or more")
        if renew not in RENEWALS:
            raise unknown("value of renew", renew, RENEWALS)
        if filler not in FILLERS:
            raise unknown("filler", filler, FILLERS)
        self.window, self.renew, self.filler, self.pad, self.columns = window, renew, filler, pad, columns

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._last = [prompt[-1] for prompt in prompts]
        self._latest = [[prompt[-1]] * self.columns for prompt in prompts]  # the last `columns` tokens
        self._count = [0] * len(prompts)
        self._draft: Draft | None = None

    @property
    def _spatial(self) -> bool:
        return self.filler in SPATIAL

    def _fill_spatial(self, known: Tensor, tokens: Tensor) -> Tensor:
        """The window [B, W] with unknown slots filled from the left or from above, slot by slot."""
        both = torch.cat([upload(self._latest, tokens.device), torch.where(known, tokens, 0)], 1)
        if self.filler == "above":
            for start in range(0, self.window, self.columns):
                row = both[:, self.columns :][:, start : start + self.columns]
                row.copy_(
                    torch.where(known[:, start : start + self.columns], row, both[:, start : start + row.shape[1]])
                )
            return both[:, self.columns :]
        first = upload(self._count, tokens.device) % self.columns  # column of the window's first slot
        for slot in range(self.window):
            above, left = both[:, slot], both[:, self.columns + slot - 1]
            neighbour = torch.where((first + slot) % self.columns == 0, above, left)
            index = self.columns + slot
            both[:, index] = torch.where(known[:, slot], both[:, index], neighbour)
        return both[:, self.columns :]

    def _fill(self, last: Tensor, vocabulary: Tensor | int, rng: CounterRNG) -> Tensor:
        """Fillers [B, W]."""
        shape = (len(last), self.window)
        if self.filler == "copy":
            return last[:, None].expand(shape).contiguous()
        if self.filler == "pad":
            return torch.full(shape, self.pad, device=last.device)
        slots = torch.arange(self.window, device=last.device).expand(shape)
        return (rng.uniform(Purpose.DRAW, slots) * vocabulary).long()

    def propose(self, room: Tensor, rng: CounterRNG) -> Draft:
        rng.reserve(self.window + 1)
        size = max(min(self.window, int(room.max())), 0)
        live = constant_mask(tuple(max(min(size, left), 0) for left in room.tolist()), size, rng.device)
        tree = Tree.chain(size, rng.device)
        if self._draft is None:
            last = upload(self._last, rng.device)
            empty = torch.zeros(len(room), self.window, dtype=torch.long, device=rng.device)
            vocabulary = last[:, None] + 1  # the vocabulary's size is not known before the first pass
            tokens = self._filled(empty.bool(), empty, last, vocabulary, rng)
            return Draft.guess(tokens[:, :size], tree, live)
        source = None if self._draft.source is None else self._draft.source[:, :size]
        return replace(self._draft, tokens=self._draft.tokens[:, :size], tree=tree, live=live, source=source)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        logits, recordings, sampling = scores.whole, scores.recordings, scores.sampling
        if recordings is None or logits is None or self._spatial or self.renew == "gumbel" or sampling.remembers:
            self._draft = self._renewed(draft, scores, verdict, rng)
            return
        drawn = draft.distributions

        def work(inputs: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
            logits, tokens, live, source, probs, support, accepted, token, tables = inputs
            assert logits is not None and tokens is not None and live is not None
            assert accepted is not None and token is not None
            old = None if probs is None else Distribution(probs, support, scores.vocabulary)
            before = Draft(tokens, draft.tree, live, distributions=old, source=source, mixed=draft.mixed)
            pipeline = LogitsPipeline(sampling, [], scores.vocabulary, logits.device)
            again = Scores(before, pipeline, accepted, logits)
            predrawn = PredrawnRNG(tables, len(tokens), logits.device)
            new = self._renewed(before, again, replace(verdict, accepted=accepted, token=token), predrawn)
            laws = new.distributions
            return new.tokens, new.live, new.source, *((laws.probs, laws.tokens) if laws is not None else (None, None))

        key = ("window", self.window, self.renew, self.filler, self.pad, sampling, draft.size, draft.mixed)
        parts = (None, None) if drawn is None else (drawn.probs, drawn.tokens)
        numbers = None if self.renew == "greedy" and self.filler != "random" else rng.tables()
        inputs = (logits, draft.tokens, draft.live, draft.source, *parts, verdict.accepted, verdict.token, numbers)
        tokens, live, source, probs, support = recordings.record_work(key, inputs, work)
        laws = None if probs is None else Distribution(probs, support, scores.vocabulary)
        self._draft = Draft(
            tokens,
            Tree.chain(self.window, tokens.device),
            live,
            distributions=laws,
            source=source,
            mixed=laws is not None,
        )

    def _renewed(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> Draft:
        """The next window."""
        rows, device = draft.rows, draft.tokens.device
        slots = torch.arange(self.window, device=device).expand(rows, -1)
        after = verdict.accepted[:, None] + 1 + slots  # score row for each slot of the next window
        known = after <= draft.size
        distributions = scores.distributions(after.clamp(max=draft.size))  # [B, W, S]
        if self._spatial:
            self._advance(verdict.rows(draft))
        if self.renew == "greedy":
            likeliest = distributions.name(argmax(distributions.probs))
            tokens = self._filled(known, likeliest, verdict.token, scores.vocabulary, rng)
            return Draft.guess(tokens, Tree.chain(self.window, device), known)
        if self.renew == "gumbel":
            tokens = rng.gumbel_argmax(distributions, scores.position(after.clamp(max=draft.size)), known)
        elif self.renew == "couple" and draft.distributions is not None and draft.size:
            reference = partial(self._couple, draft, distributions, after, known)
            if native_walk.usable(rng, device):
                tokens = native_walk.couple(draft, distributions, after, known, rng, reference)
            else:
                tokens = reference(rng)
        else:
            tokens = rng.sample(distributions, slots, Purpose.REDRAW, known)
        return Draft(
            self._filled(known, tokens, verdict.token, scores.vocabulary, rng),
            Tree.chain(self.window, device),
            known,
            distributions=distributions,
            source=torch.where(known, slots, -1),
        )

    def _advance(self, emitted: list[list[int]]) -> None:
        """Append the emitted tokens to the raster."""
        for row, tokens in enumerate(emitted):
            self._latest[row] = [*self._latest[row], *tokens][-self.columns :]
            self._count[row] += len(tokens)

    def _filled(self, known: Tensor, tokens: Tensor, last: Tensor, vocabulary: Tensor | int, rng: CounterRNG) -> Tensor:
        """The window [B, W]: `tokens` in known slots, fillers elsewhere."""
        if self._spatial:
            return self._fill_spatial(known, tokens)
        return torch.where(known, tokens, self._fill(last, vocabulary, rng))

    def _couple(self, draft: Draft, new: Distribution, after: Tensor, known: Tensor, rng: CounterRNG) -> Tensor:
        """Keep each old draw x with probability min(1, new(x) / old(x)), else draw from norm((new - old)+). The result
        is distributed as `new`, and equals the old draw as often as any coupling allows."""
        assert draft.distributions is not None
        node = after.clamp(max=draft.size - 1)
        token = draft.tokens.gather(1, node)
        was_drawn = (after < draft.size) & ~draft.fixed.gather(1, node)
        ids = token[..., None]
        old = draft.distributions.at_rows(node, ids)[..., 0].clamp(min=torch.finfo(new.probs.dtype).tiny)
        probability = (new.at(ids)[..., 0] / old).clamp(max=1) * was_drawn
        slots = torch.arange(self.window, device=token.device).expand_as(token)
        retained = was_drawn & rng.accept(probability, slots, Purpose.RETAIN, was_drawn)
        redraw = known & ~retained
        at = _slots_of(redraw)
        distribution = new.rows(at)
        excess = residual(distribution, draft.distributions.rows(node.gather(1, at)).on(distribution))
        coupled = was_drawn.gather(1, at)[..., None]
        distribution = Distribution(
            torch.where(coupled, excess.probs, distribution.probs), distribution.tokens, distribution.vocabulary
        )
        drawn = rng.sample(distribution, at, Purpose.REDRAW, redraw.gather(1, at))
        return torch.where(redraw, token.scatter(1, at, drawn), token)

    def arrange(self, order: Sequence[int], width: int) -> None:
        """Let rows leave; the others keep their order."""
        self._last, self._count = [self._last[row] for row in order], [self._count[row] for row in order]
        self._latest = [self._latest[row] for row in order]
        if (draft := self._draft) is None:
            return
        rows, laws, source = torch.tensor(order, device=draft.tokens.device), draft.distributions, draft.source
        if laws is not None:
            support = None if laws.tokens is None else laws.tokens[rows]
            laws = Distribution(laws.probs[rows], support, laws.vocabulary)
        self._draft = replace(
            draft,
            tokens=draft.tokens[rows],
            live=draft.live[rows],
            distributions=laws,
            source=None if source is None else source[rows],
        )

    def end(self) -> None:
        self._draft = None


def constant_mask(counts: tuple[int, ...], size: int, device: torch.device) -> Tensor:
    """[B, size] bool: the first count of each row. On a device made once for the same numbers."""
    return _mask(counts, size, device, side_number())


@lru_cache(maxsize=1024)
def _mask(counts: tuple[int, ...], size: int, device: torch.device, side: int) -> Tensor:
    return upload([[slot < count for slot in range(size)] for count in counts], device, torch.bool).view(
        len(counts), size
    )


def _slots_of(mask: Tensor) -> Tensor:
    """Slots [B, K] that include all where `mask` [B, W] is set. On a GPU K is W, as counting would synchronise."""
    order = mask.to(torch.uint8).argsort(stable=True, dim=1, descending=True)
    return order[:, : int(mask.sum(1).max())] if mask.device.type == "cpu" else order
