"""Jacobi decoding: a window of guesses for the next positions, renewed by every pass until they settle.

Fillers start a position off; each pass gives the distributions after all guesses, from which the window is renewed.
`greedy` takes the likeliest tokens as fixed guesses (Santilli et al., "Accelerating transformer inference for
translation via parallel decoding", arXiv 2305.10427); `redraw` draws them and verifies them by the distributions they
were drawn from (speculative Jacobi decoding, arXiv 2410.01699); `couple` keeps the old draw where a maximal coupling of
old and new distribution allows it (arXiv 2510.24211), so that guesses survive; `gumbel` draws with noise that belongs
to the position, the other coupling of that paper. All are exact. Ours runs whole batches, row by row ragged. Where
tokens stand in rows of so many `columns`, a new position may begin as its neighbour on the `left` or `above` (also
arXiv 2410.01699)."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from outrider.core.device import upload
from outrider.core.distribution import Distribution, Sampling, residual
from outrider.core.draft import Draft, Verdict
from outrider.core.errors import InvalidOption, unknown
from outrider.core.kernels.topk import argmax
from outrider.core.protocol import Prefill, Prompts, Scores, WeightFree
from outrider.core.rng import CounterRNG, Purpose
from outrider.core.rules import small_batch
from outrider.core.tree import Tree

SPATIAL = ("left", "above")  # for tokens that stand in rows
FILLERS = ("copy", "random", "pad", *SPATIAL)
RENEWALS = ("greedy", "redraw", "couple", "gumbel")


class Jacobi(WeightFree):
    """One window a row. `filler` is what stands at positions nothing is known about: the last token repeated, a random
    token, `pad`, or what is thought of the position on the left (in the first column, above) or above. The first row of
    tokens lies below the prompt's last one."""

    standalone: Literal[True] = True  # its window is read off its own draft

    def __init__(
        self, *, window: int = 8, renew: str = "greedy", filler: str = "copy", pad: int = 0, columns: int = 0
    ) -> None:
        if filler in SPATIAL and columns < 1:
            raise InvalidOption(f"the filler '{filler}' needs columns=..., how many tokens make a row; got {columns}")
        if window < 1:
            raise InvalidOption(f"the window is {window}; it must be 1 or more")
        if renew not in RENEWALS:
            raise unknown("way to renew a window", renew, RENEWALS)
        if filler not in FILLERS:
            raise unknown("filler", filler, FILLERS)
        self.window, self.renew, self.filler, self.pad, self.columns = window, renew, filler, pad, columns

    def begin(self, prefill: Prefill, prompts: Prompts, sampling: Sampling) -> None:
        self._last = [prompt[-1] for prompt in prompts]
        self._latest = [[prompt[-1]] * self.columns for prompt in prompts]  # a row of tokens before what comes
        self._count = [0] * len(prompts)
        self._draft: Draft | None = None

    @property
    def _spatial(self) -> bool:
        return self.filler in SPATIAL

    def _beside(self, known: Tensor, tokens: Tensor) -> Tensor:
        """The window [B, W] with what isn't known taken over from the left or from above, slot by slot."""
        both = torch.cat([upload(self._latest, tokens.device), torch.where(known, tokens, 0)], 1)
        if self.filler == "above":
            for start in range(0, self.window, self.columns):
                row = both[:, self.columns :][:, start : start + self.columns]
                row.copy_(
                    torch.where(known[:, start : start + self.columns], row, both[:, start : start + row.shape[1]])
                )
            return both[:, self.columns :]
        first = upload(self._count, tokens.device) % self.columns
        for slot in range(self.window):
            above, left = both[:, slot], both[:, self.columns + slot - 1]
            taken = torch.where((first + slot) % self.columns == 0, above, left)
            place = self.columns + slot
            both[:, place] = torch.where(known[:, slot], both[:, place], taken)
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
        slots = torch.arange(size, device=rng.device)
        live = slots < upload(room, rng.device)[:, None]
        tree = Tree.chain(size, rng.device)
        if self._draft is None:
            last = upload(self._last, rng.device)
            none = torch.zeros(len(room), self.window, dtype=torch.long, device=rng.device)
            ids = last[:, None] + 1  # no more is known yet of which ids there are
            tokens = self._filled(none.bool(), none, last, ids, rng)
            return Draft.guess(tokens[:, :size], tree, live)
        source = None if self._draft.source is None else self._draft.source[:, :size]
        return replace(self._draft, tokens=self._draft.tokens[:, :size], tree=tree, live=live, source=source)

    def observe(self, draft: Draft, scores: Scores, verdict: Verdict, rng: CounterRNG) -> None:
        rows, device = draft.rows, draft.tokens.device
        slots = torch.arange(self.window, device=device).expand(rows, -1)
        after = verdict.accepted[:, None] + 1 + slots  # the row that foretells each slot of the next window
        known = after <= draft.size
        distributions = scores.distributions(after.clamp(max=draft.size))  # [B, W, S]
        if self._spatial:
            self._move(verdict.rows(draft))
        if self.renew == "greedy":
            best = self._filled(
                known, distributions.name(argmax(distributions.probs)), verdict.token, scores.vocabulary, rng
            )
            self._draft = Draft.guess(best, Tree.chain(self.window, device), known)
            return
        if self.renew == "gumbel":
            tokens = rng.gumbel_argmax(distributions, scores.position(after.clamp(max=draft.size)), known)
        elif self.renew == "couple" and draft.distributions is not None and draft.size:
            if small_batch.walks(rng, distributions, draft.distributions):
                tokens = small_batch.coupled(draft, distributions, after, known, rng)
            else:
                tokens = self._couple(draft, distributions, after, known, rng)
        else:
            tokens = rng.sample(distributions, slots, Purpose.REDRAW, known)
        self._draft = Draft(
            self._filled(known, tokens, verdict.token, scores.vocabulary, rng),
            Tree.chain(self.window, device),
            known,
            distributions=distributions,
            source=torch.where(known, slots, -1),
        )

    def _move(self, emitted: list[list[int]]) -> None:
        """Along the rows of tokens."""
        for row, tokens in enumerate(emitted):
            self._latest[row] = [*self._latest[row], *tokens][-self.columns :]
            self._count[row] += len(tokens)

    def _filled(self, known: Tensor, tokens: Tensor, last: Tensor, vocabulary: Tensor | int, rng: CounterRNG) -> Tensor:
        """The window [B, W], tokens where they are known."""
        if self._spatial:
            return self._beside(known, tokens)
        return torch.where(known, tokens, self._fill(last, vocabulary, rng))

    def _couple(self, draft: Draft, new: Distribution, after: Tensor, known: Tensor, rng: CounterRNG) -> Tensor:
        """Retain each old draw x with chance min(1, new(x) / old(x)), else draw from norm((new - old)+): the token is
        distributed by the new distribution, and equals the old one as often as any coupling allows."""
        assert draft.distributions is not None
        node = after.clamp(max=draft.size - 1)
        token = draft.tokens.gather(1, node)
        had = (after < draft.size) & ~draft.fixed.gather(1, node)
        ids = token[..., None]
        before = draft.distributions.at_rows(node, ids)[..., 0].clamp(min=torch.finfo(new.probs.dtype).tiny)
        chance = (new.at(ids)[..., 0] / before).clamp(max=1) * had
        slots = torch.arange(self.window, device=token.device).expand_as(token)
        retained = had & rng.accept(chance, slots, Purpose.RETAIN, had)
        anew = known & ~retained
        at = _some(anew)
        distribution = new.rows(at)
        left = residual(distribution, draft.distributions.rows(node.gather(1, at)).on(distribution))
        mine = had.gather(1, at)[..., None]
        distribution = Distribution(
            torch.where(mine, left.probs, distribution.probs), distribution.tokens, distribution.vocabulary
        )
        drawn = rng.sample(distribution, at, Purpose.REDRAW, anew.gather(1, at))
        return torch.where(anew, token.scatter(1, at, drawn), token)

    def end(self) -> None:
        self._draft = None


def _some(wanted: Tensor) -> Tensor:
    """Slots [B, K] with all those that are wanted [B, W] among them: few where counting them costs no wait."""
    order = wanted.to(torch.uint8).argsort(stable=True, dim=1, descending=True)
    return order[:, : int(wanted.sum(1).max())] if wanted.device.type == "cpu" else order
