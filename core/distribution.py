"""The only place where logits become distributions: penalties, processors, constraint, temperature, top-k, top-p,
min-p.

A distribution is dense (over the whole vocabulary) or has a support: top-k leaves k tokens and temperature 0 leaves
one, so greedy decoding is the same code with distributions of width 1. Independent of drafts, targets and rules."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.constraint import Constraint, PathMasks
from outrider.core.errors import InvalidOption
from outrider.core.kernels.bit_mask import masked
from outrider.core.kernels.topk import argmax, largest

LogitsProcessor = Callable[[Tensor, Tensor], Tensor]  # (token ids [1, L], logits [1, V]) -> logits [1, V]
_NEARLY_GREEDY = 1e-5
_TOP_P_START = 256  # the most likely tokens that top-p sorts first; it sorts more if these do not hold its mass


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are drawn, and which ids end a row. The defaults leave the model's distribution as it is."""

    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt and output, as in CTRL (arXiv 1909.05858)
    presence_penalty: float = 0.0  # over the output only
    frequency_penalty: float = 0.0
    entropy_aware: bool = False  # a temperature by each distribution's entropy: see `entropy_temperature`
    processors: tuple[LogitsProcessor, ...] = ()  # applied to prompt and output so far; must be pure functions
    constraint: Constraint | None = None  # what the output must obey; applied after penalties and processors
    end: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, valid, expected in (
            ("temperature", 0 <= self.temperature < math.inf, "0 (greedy) or more"),
            ("top_k", self.top_k >= 0, "0 (off) or more"),
            ("top_p", 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", 0 <= self.min_p < 1, "0 or more and below 1"),
            ("repetition_penalty", 0 < self.repetition_penalty < math.inf, "above 0 (1 is off)"),
            ("presence_penalty", math.isfinite(self.presence_penalty), "finite (0 is off)"),
            ("frequency_penalty", math.isfinite(self.frequency_penalty), "finite (0 is off)"),
        ):
            if not valid:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be {expected}")

    @property
    def greedy(self) -> bool:
        """Whether every distribution is a single token."""
        return self.temperature < _NEARLY_GREEDY or self.top_k == 1

    @property
    def plain(self) -> bool:
        """Whether a distribution is just the softmax of its logits at some temperature."""
        cut = (self.top_k > 0 and not self.greedy) or self.top_p < 1 or self.min_p > 0
        return not (cut or self.entropy_aware or self.remembers)

    @property
    def unscaled(self) -> Sampling:
        """The same penalties, processors and constraint at temperature 1, without top-k, top-p and min-p."""
        return replace(self, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, entropy_aware=False)

    @property
    def remembers(self) -> bool:
        """Whether distributions depend on earlier tokens other than through the model's logits."""
        return self.penalises or bool(self.processors) or self.constraint is not None

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens are penalised."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


@dataclass(frozen=True)
class Distribution:
    """A batch of probability distributions over token ids. Each sums to 1, or to 0 if nothing can be drawn."""

    probs: Tensor  # [..., S]
    tokens: Tensor | None  # [..., S] ids of the support, each id once; None: S is the vocabulary, in order
    vocabulary: int

    @property
    def width(self) -> int:
        return self.probs.shape[-1]

    @classmethod
    def point(cls, tokens: Tensor, vocabulary: int, dtype: torch.dtype = torch.float32) -> Distribution:
        """All mass on one token each: tokens [...] -> distributions of width 1."""
        return cls(torch.ones_like(tokens, dtype=dtype)[..., None], tokens[..., None], vocabulary)

    def name(self, place: Tensor) -> Tensor:
        """The token ids at places [...] of the support."""
        return place if self.tokens is None else self.tokens.gather(-1, place[..., None])[..., 0]

    def sole(self) -> Tensor:
        """The tokens [...] of distributions of width 1."""
        return torch.zeros_like(self.probs[..., 0], dtype=torch.long) if self.tokens is None else self.tokens[..., 0]

    def at(self, tokens: Tensor) -> Tensor:
        """Probabilities of tokens [..., K]; 0 for ids outside the vocabulary, such as the -1 of padding."""
        if self.tokens is None:
            inside = (tokens >= 0) & (tokens < self.vocabulary)
            return self.probs.gather(-1, tokens.clamp(0, self.vocabulary - 1)) * inside
        if self.width * tokens.shape[-1] > 1 << 14:
            return self.dense().at(tokens)
        return ((self.tokens[..., None, :] == tokens[..., None]) * self.probs[..., None, :]).sum(-1)

    def on(self, support: Distribution) -> Tensor:
        """The probabilities on another distribution's support, shaped like support.probs."""
        if support.tokens is not None:
            return self.at(support.tokens)
        return self.dense().probs.expand_as(support.probs)

    def dense(self) -> Distribution:
        """The same distribution over the whole vocabulary, in order."""
        if self.tokens is None:
            return self
        probs = self.probs.new_zeros(*self.probs.shape[:-1], self.vocabulary)
        return Distribution(probs.scatter_add_(-1, self.tokens, self.probs), None, self.vocabulary)

    def rows(self, index: Tensor) -> Distribution:
        """Rows of its own for each batch member: [B, R, S] and index [B, K] -> [B, K, S]."""
        batch, rows = self.probs.shape[:2]
        flat = (index + torch.arange(batch, device=index.device)[:, None] * rows).flatten()
        parts = [
            part.flatten(0, 1).index_select(0, flat).view(*index.shape, self.width)
            for part in (self.probs, self.tokens)
            if part is not None
        ]
        return Distribution(parts[0], None if self.tokens is None else parts[1], self.vocabulary)

    def row(self, index: Tensor) -> Distribution:
        """One row for each batch member: [B, R, S] and index [B] -> [B, S]."""
        return self.rows(index[:, None]).column(0)

    def at_rows(self, index: Tensor, tokens: Tensor) -> Tensor:
        """Probabilities that rows [B, K] of a distribution [B, R, S] give to tokens [B, K, M] -> [B, K, M]."""
        if self.tokens is not None:
            return self.rows(index).at(tokens)
        batch, rows = self.probs.shape[:2]
        inside = (tokens >= 0) & (tokens < self.vocabulary)
        row = index + torch.arange(batch, device=index.device)[:, None] * rows
        place = row[..., None] * self.vocabulary + tokens.clamp(0, self.vocabulary - 1)
        return self.probs.reshape(-1)[place] * inside

    def column(self, place: int) -> Distribution:
        """The same row for all batch members, without a copy: [B, R, S] -> [B, S]."""
        return Distribution(
            self.probs[:, place], None if self.tokens is None else self.tokens[:, place], self.vocabulary
        )

    def span(self, places: slice) -> Distribution:
        """The same span of rows for all, without a copy: [B, R, S] -> [B, K, S]."""
        return Distribution(
            self.probs[:, places], None if self.tokens is None else self.tokens[:, places], self.vocabulary
        )

    def select(self, places: Tensor) -> Distribution:
        """The same rows for all: [B, R, S] and places [K] -> [B, K, S]."""
        tokens = None if self.tokens is None else self.tokens.index_select(1, places)
        return Distribution(self.probs.index_select(1, places), tokens, self.vocabulary)

    def without(self, tokens: Tensor, where: Tensor) -> Distribution:
        """The distributions without one token [...] each, where `where` [...] says so, renormalised."""
        if self.tokens is None:
            safe = tokens.clamp(0, self.vocabulary - 1)[..., None]
            prob = self.probs.gather(-1, safe) * ~where[..., None]
            probs = self.probs.scatter(-1, safe, prob)
        else:
            probs = self.probs * ~((self.tokens == tokens[..., None]) & where[..., None])
        total = probs.sum(-1, keepdim=True)
        return Distribution(probs / total.clamp(min=torch.finfo(probs.dtype).tiny), self.tokens, self.vocabulary)

    def top(self, count: int) -> tuple[Tensor, Tensor]:
        """The most likely tokens and their probabilities in descending order: [..., count] each, padded with -1 and
        0."""
        probs, place = largest(self.probs, min(count, self.width))
        tokens = place if self.tokens is None else self.tokens.gather(-1, place)
        missing = count - probs.shape[-1]
        if missing:
            probs, tokens = _pad(probs, missing, 0.0), _pad(tokens, missing, -1)
        return torch.where(probs > 0, tokens, -1), probs

    def entropy(self) -> Tensor:
        """In nats, [...]."""
        return -torch.xlogy(self.probs, self.probs).sum(-1)


def concatenated(distributions: Sequence[Distribution]) -> Distribution:
    """Distributions [B, P, S] concatenated along P; dense if their supports differ in size."""
    if len({(distribution.width, distribution.tokens is None) for distribution in distributions}) > 1:
        distributions = [distribution.dense() for distribution in distributions]
    tokens = [distribution.tokens for distribution in distributions if distribution.tokens is not None]
    return Distribution(
        torch.cat([distribution.probs for distribution in distributions], 1),
        torch.cat(tokens, 1) if tokens else None,
        distributions[0].vocabulary,
    )


def _pad(tensor: Tensor, count: int, value: float) -> Tensor:
    return torch.nn.functional.pad(tensor, (0, count), value=value)


def residual(p: Distribution, q: Tensor, f: Tensor | None = None) -> Distribution:
    """The distribution of the token after a rejection, norm((p - q f)+), q and f being given on p's support.

    Without f, f is the strict min(1, p/q). For any f up to that, the emitted token has the distribution p. If the
    residual is empty, a rejection is a rounding error, and the result is p.
    """
    left = (p.probs - (q if f is None else q * f)).clamp_(min=0)
    total = left.sum(-1, keepdim=True)
    empty = total <= 0
    left /= total + empty
    return Distribution(left.addcmul_(p.probs, empty.to(left.dtype)), p.tokens, p.vocabulary)


class LogitsPipeline:
    """Makes distributions for one batch: the sampling options, the token counts that penalties need, the token ids
    that processors take, and the masks of a constraint. A copy is not changed by what happens to the original."""

    def __init__(
        self, sampling: Sampling, prompts: Sequence[Sequence[int]], vocabulary: int, device: torch.device
    ) -> None:
        self.sampling = sampling
        self.vocabulary = vocabulary
        self._prompted: Tensor | None = None  # [B, V] how often the prompt has each token
        self._emitted: Tensor | None = None
        self._sequences: list[list[int]] | None = [list(prompt) for prompt in prompts] if sampling.processors else None
        self.masks = None if sampling.constraint is None else PathMasks.of(sampling.constraint, prompts)
        if sampling.penalises:
            self._prompted = torch.zeros(len(prompts), vocabulary, device=device)
            self._emitted = torch.zeros_like(self._prompted)
            for row, prompt in enumerate(prompts):
                ids = torch.tensor(list(prompt), device=device)
                self._prompted[row].index_add_(0, ids, torch.ones(len(prompt), device=device))

    def arrange(self, order: Sequence[int]) -> None:
        """Row i becomes what row order[i] was; -1: an empty row."""
        if self.masks is not None:
            self.masks = self.masks.arranged(order)
        if self._sequences is not None:
            self._sequences = [self._sequences[place] if place >= 0 else [] for place in order]
        if self._prompted is None or self._emitted is None:
            return
        index = torch.tensor(order, dtype=torch.long, device=self._emitted.device)
        exists = (index >= 0).float()[:, None]
        self._prompted, self._emitted = (
            F.pad(counts, (0, 0, 0, 1))[index] * exists for counts in (self._prompted, self._emitted)
        )

    def enter(self, row: int, prompt: Sequence[int]) -> None:
        """Start a row with this prompt."""
        if self.masks is not None:
            self.masks = self.masks.entered(row, prompt)
        if self._sequences is not None:
            self._sequences = [*self._sequences[:row], list(prompt), *self._sequences[row + 1 :]]
        if self._prompted is None or self._emitted is None:
            return
        fresh = LogitsPipeline(self.sampling, [prompt], self.vocabulary, self._emitted.device)
        assert fresh._prompted is not None
        self._prompted, self._emitted = self._prompted.clone(), self._emitted.clone()  # marks may hold the old ones
        self._prompted[row], self._emitted[row] = fresh._prompted[0], 0

    def row(self, row: int) -> LogitsPipeline:
        """The pipeline of one row."""
        alone = copy.copy(self)
        if self.masks is not None:
            alone.masks = self.masks.arranged([row])
        if self._sequences is not None:
            alone._sequences = self._sequences[row : row + 1]
        if self._prompted is not None and self._emitted is not None:
            alone._prompted, alone._emitted = self._prompted[row : row + 1], self._emitted[row : row + 1]
        return alone

    def commit(self, tokens: Tensor, known: Sequence[Sequence[int]] | None = None) -> None:
        """Tokens [B, K] were emitted; -1 is padding. `known`: the same on the host, if it has them."""
        if self._sequences is not None or self.masks is not None:
            new = tokens.tolist() if known is None else known
            if self.masks is not None:
                self.masks = self.masks.committed(new)
            if self._sequences is not None:  # new lists, since marks may hold the old ones
                rows = zip(self._sequences, new, strict=True)
                self._sequences = [[*before, *(token for token in row if token >= 0)] for before, row in rows]
        if self._emitted is not None:
            self._emitted = self._emitted + self._count(tokens)

    def _count(self, tokens: Tensor) -> Tensor:
        counts = torch.zeros(*tokens.shape[:-1], self.vocabulary, device=tokens.device)
        return counts.scatter_add_(-1, tokens.clamp(min=0), (tokens >= 0).float())

    def distribution(
        self, logits: Tensor, path: Tensor | None = None, bits: Tensor | None = None, *, unscaled: bool = False
    ) -> Distribution:
        """Logits [B, ..., V] and, for penalties and processors, the uncommitted tokens before each row [B, ..., D], for
        a constraint the bits of `masks` -> distributions; `unscaled`: at temperature 1 and uncut, whatever the sampling
        is."""
        if self._emitted is not None:
            logits = self._penalise(logits, path)
        if self._sequences is not None:
            logits = self._process(logits, path)
        if bits is not None:
            logits = masked(logits, bits)
        return to_distribution(logits, self.sampling.unscaled if unscaled else self.sampling)

    def _penalise(self, logits: Tensor, path: Tensor | None) -> Tensor:
        assert self._emitted is not None and self._prompted is not None
        shape = (len(logits), *[1] * (logits.dim() - 2), self.vocabulary)
        emitted = self._emitted.view(shape)
        if path is not None and path.shape[-1]:
            emitted = emitted + self._count(path)
        options = self.sampling
        seen = (emitted + self._prompted.view(shape)) > 0
        factor = options.repetition_penalty
        logits = torch.where(seen, torch.where(logits > 0, logits / factor, logits * factor), logits)
        return logits - options.presence_penalty * (emitted > 0) - options.frequency_penalty * emitted

    def _process(self, logits: Tensor, path: Tensor | None) -> Tensor:
        """Each row through the processors by itself, so that the result does not depend on batch or draft. A row that
        they leave no token of, as they may of a drafter's reduced vocabulary, stays as it is."""
        assert self._sequences is not None
        precise = logits.dtype if logits.dtype == torch.float64 else torch.float32
        rows = logits.reshape(len(logits), -1, self.vocabulary).to(precise, copy=True)
        paths = None if path is None else path.reshape(*rows.shape[:2], -1).tolist()
        for member, before in enumerate(self._sequences):
            for place in range(rows.shape[1]) if before else ():
                drafted = [] if paths is None else [token for token in paths[member][place] if token >= 0]
                ids, row = torch.tensor([[*before, *drafted]], device=logits.device), rows[member, place][None]
                for processor in self.sampling.processors:
                    row = processor(ids, row)
                    if not isinstance(row, Tensor) or row.shape != (1, self.vocabulary):
                        raise InvalidOption(
                            f"the logits processor {processor!r:.80} returned {getattr(row, 'shape', type(row))}; it "
                            f"must return logits of shape (1, {self.vocabulary}), as it is given"
                        )
                if bool((row > -torch.inf).any()):
                    rows[member, place] = row[0]
        return rows.view(logits.shape)


def to_distribution(logits: Tensor, sampling: Sampling) -> Distribution:
    """Logits [..., V] -> distributions after temperature, top-k, top-p and min-p, in float64 for float64 logits, else
    in float32."""
    vocabulary = logits.shape[-1]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        return Distribution.point(argmax(logits), vocabulary, logits.dtype)
    tokens: Tensor | None = None
    if 0 < sampling.top_k < vocabulary:
        logits, tokens = largest(logits, sampling.top_k)
    if sampling.entropy_aware:
        logits = logits / entropy_temperature(logits)
    probs = torch.softmax(logits / sampling.temperature if sampling.temperature != 1 else logits, -1)
    if sampling.top_p < 1:
        probs, tokens = _nucleus(probs, tokens, sampling.top_p)
    if sampling.min_p > 0:
        probs = probs * (probs >= sampling.min_p * probs.amax(-1, keepdim=True))
    if sampling.top_p < 1 or sampling.min_p > 0:
        probs = probs / probs.sum(-1, keepdim=True)
    return Distribution(probs, tokens, vocabulary)


def entropy_temperature(logits: Tensor) -> Tensor:
    """A temperature for each distribution by its entropy H in nats, 2.5 exp(-H / 3) + 0.6 (entropy-aware sampling of
    image tokens, arXiv 2510.09012): higher for peaked distributions. [..., V] -> [..., 1]"""
    logs = logits.log_softmax(-1)
    entropy = -torch.where(logs > -torch.inf, logs.exp() * logs, 0).sum(-1, keepdim=True)
    return 2.5 * torch.exp(-entropy / 3) + 0.6


def _nucleus(probs: Tensor, tokens: Tensor | None, top_p: float) -> tuple[Tensor, Tensor]:
    """The fewest tokens that hold top_p of the mass; sorts only as many as that takes."""
    if tokens is None:
        count = _TOP_P_START if probs.device.type == "cpu" else probs.shape[-1]
        while True:
            best, tokens = largest(probs, min(count, probs.shape[-1]))
            if count >= probs.shape[-1] or bool((best.sum(-1) >= top_p).all()):
                break
            count *= 8
        probs = best
    return probs * (probs.cumsum(-1) - probs < top_p), tokens
