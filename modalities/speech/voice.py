"""The voice: a decoder that says speech tokens and is told, at each, which phoneme it is saying and how far into it.

A language model of codec tokens in the manner of VALL-E (arXiv 2301.02111). There the text is a prefix, and the model
has to find out by itself where it is in it; ours places text on the axis of time: a small network reads the phonemes
and says how long each will take, and what it made of each is added to what is read wherever that phoneme is spoken.
Little speech suffices to learn from, and nothing is skipped, repeated or left without an end. The decoder itself is
that of outrider.core.engine, with its cache and tree attention. Knows ids, nothing of sound.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.engine.conditioned import ConditionedDecoder
from outrider.core.engine.network import Network
from outrider.core.engine.trainable.block import Angles, Norm, each_before
from outrider.core.engine.trainable.token_decoder import beginning, shape, spoken
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts
from outrider.core.training.draft_head import DraftHead
from outrider.speech.phonemes import COUNT, EDGE

AHEAD = 6  # places ahead of a token whose text can be looked at
_FAR = 24  # tokens into a phoneme, or before its end, that are told apart
_RATE = 22_050 / 512  # tokens a second
_SHORTEST, _LONGEST = 0.3, 40.0  # tokens of a phoneme


@dataclass(frozen=True, eq=False)
class Script:
    """What is to be said, on the axis of time: rows are utterances."""

    told: Tensor  # [B, T + 1, D] what is added to the root and to each token: what to say behind it
    shares: tuple[tuple[int, ...], ...]  # tokens of each phoneme of each utterance

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each utterance, its end not counted."""
        return tuple(map(sum, self.shares))


class _Conv(nn.Module):
    """A residual convolution over phonemes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = Norm(width)
        self.wide = nn.Conv1d(width, width, 5, padding=2)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        """[B, P, R]; nothing is read of places where nothing stands."""
        seen = (self.norm(x) * there[..., None]).transpose(1, 2)
        change: Tensor = self.out(F.gelu(self.wide(seen).transpose(1, 2)))
        return x + change


class Reader(nn.Module):
    """Phonemes -> what to say, and for how long."""

    def __init__(self, width: int, reading: int, drop: float) -> None:
        super().__init__()
        self.drop = drop
        self.embedding = nn.Parameter(torch.randn(COUNT, reading))
        self.convs = nn.ModuleList(_Conv(reading) for _ in range(3))
        self.timing = nn.ModuleList(_Conv(reading) for _ in range(2))
        self.length = nn.Linear(reading, 1)
        self.out = nn.Linear(reading, width)
        self.since = nn.Parameter(torch.randn(_FAR, width) * 0.3)  # tokens since the phoneme began
        self.until = nn.Parameter(torch.randn(_FAR, width) * 0.3)  # tokens until it ends
        self.over = nn.Parameter(torch.randn(width))  # all has been said

    def forward(self, said: Tensor, there: Tensor) -> tuple[Tensor, Tensor]:
        """Ids [B, P] -> [B, P, D] what to say, and the logarithm [B, P] of tokens each takes at the usual speed."""
        x = F.dropout(F.embedding(said, self.embedding), self.drop, self.training)
        for conv in self.convs:
            x = conv(x, there)
        apart = x.detach()  # what is said is not to be bent to how long it takes
        for conv in self.timing:
            apart = conv(F.dropout(apart, self.drop, self.training), there)
        return self.out(x), self.length(apart)[..., 0] + 1.0

    def placed(self, read: Tensor, shares: Tensor, count: int) -> Tensor:
        """[B, P, D] and tokens of each phoneme [B, P] -> [B, count, D]: behind the last phoneme, that all is over."""
        ends = shares.cumsum(1)
        place = torch.arange(count, device=read.device).expand(len(read), -1).contiguous()
        which = torch.searchsorted(ends, place, right=True)  # of each place the phoneme, P behind all
        inside = which < shares.shape[1]
        which = which.clamp(max=shares.shape[1] - 1)
        since = place - (ends - shares).gather(1, which)
        until = ends.gather(1, which) - 1 - place
        told = read.gather(1, which[..., None].expand(-1, -1, read.shape[2]))
        told = told + self.since[since.clamp(0, _FAR - 1)] + self.until[until.clamp(0, _FAR - 1)]
        return torch.where(inside[..., None], told, self.over.to(told.dtype))


class Voice(DraftHead):
    """A reader and a decoder. Its vocabulary is the codec's codes and, behind them, the end, with which an utterance
    also begins. `target` is not looked at: a smaller voice that drafts for a larger one is made in the same way."""

    def __init__(
        self,
        target: Any = None,
        *,
        codes: int,
        width: int = 256,
        layers: int = 5,
        heads: int = 4,
        hidden: int = 576,
        reading: int = 128,
        drop: float = 0.15,
    ) -> None:
        super().__init__()
        if width % heads or width // heads % 2:
            raise InvalidOption(f"width {width} can't be split into {heads} heads of an even width")
        self.config = {
            "codes": codes,
            "width": width,
            "layers": layers,
            "heads": heads,
            "hidden": hidden,
            "reading": reading,
            "drop": drop,
        }
        self.end = codes
        self.form = shape(codes + 1, width=width, layers=layers, heads=heads, hidden=hidden)
        self.drop = drop
        self.reader = Reader(width, reading, drop)
        self.embedding = nn.Parameter(torch.randn(codes + 1, width) * 0.5)
        self.blocks = beginning(self.form)
        self.norm = Norm(width, self.form.norm_eps)
        self.head = nn.Parameter(torch.randn(codes + 1, width) * 0.02)
        self._angles = Angles(self.form)

    # ---- learning

    def states(self, tokens: Tensor, told: Tensor) -> Tensor:
        """Tokens [B, T] and what is told at each [B, T, D] -> [B, T, D] behind each, normed."""
        return self.tapped(tokens, told, frozenset({"last"}))["last"]

    def tapped(self, tokens: Tensor, told: Tensor, needs: Collection[str]) -> dict[str, Tensor]:
        """The same, and the states within, under the names that the decoder has for them."""
        count, found = tokens.shape[1], dict[str, Tensor]()
        x = F.dropout(F.embedding(tokens, self.embedding), self.drop, self.training) + told
        place = torch.arange(count, device=tokens.device)[None]
        cos, sin = self._angles(place, count, torch.float32)
        attn_mask = each_before(count, cos, sin)
        found["embedding"] = x
        for index, block in enumerate(self.blocks):
            change = block(x, attn_mask) - x
            x = x + F.dropout(change, self.drop, self.training)
            found[f"layer.{index}"] = x
        found["last"] = self.norm(x)
        return {name: found[name] for name in needs if name in found}

    def logits(self, states: Tensor) -> Tensor:
        return F.linear(states, self.head)

    # ---- speaking

    @torch.no_grad()
    def script(
        self, said: Sequence[Sequence[int]], speed: float = 1.0, shares: Sequence[Sequence[int]] | None = None
    ) -> Script:
        """Place the phonemes of some utterances on the axis of time: for as long as they usually take, or as told."""
        device = self.embedding.device
        longest = max(map(len, said))
        ids = torch.tensor([[*one, *[EDGE] * (longest - len(one))] for one in said], device=device)
        there = torch.arange(longest, device=device) < torch.tensor([[len(one)] for one in said], device=device)
        read, logs = self.reader(ids, there)
        if shares is None:
            usual = logs.float().exp().clamp(_SHORTEST, _LONGEST) / speed * there
            ends = usual.double().cumsum(1).round().long()
            taken = torch.diff(ends, dim=1, prepend=ends.new_zeros(len(said), 1))
        else:
            taken = torch.tensor([[*one, *[0] * (longest - len(one))] for one in shares], device=device)
        count = int(taken.sum(1).max()) + 1 + AHEAD
        rows = zip(taken.tolist(), said, strict=True)
        return Script(self.reader.placed(read, taken, count), tuple(tuple(row[: len(one)]) for row, one in rows))

    def network(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Network:
        """The decoder's weights, laid out to be run."""
        return spoken(self.form, self.blocks, self.embedding, self.norm, self.head, dtype, device)


def seconds(tokens: int) -> float:
    """How long so many tokens sound."""
    return tokens / _RATE


class Speaker(ConditionedDecoder):
    """The decoder of some utterances: prompts are the end alone, one for each. Besides the usual taps there is "ahead":
    what the AHEAD tokens behind the next one are told, side by side."""

    def __init__(self, network: Network, script: Script) -> None:
        super().__init__(network, AHEAD)
        self.script = script

    @property
    def taps(self) -> tuple[str, ...]:
        return (*super().taps, "ahead")

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        if len(prompts) != len(self.script.lengths):
            raise InvalidOption(f"there are {len(prompts)} prompts and {len(self.script.lengths)} utterances")
        self.set_conditioning(self.script.told)
        return super().begin(prompts, sampling, needs)

    def _read(self, rows: slice, length: int) -> dict[str, Tensor]:
        if length:
            raise InvalidOption("an utterance begins with one token: its prompt is the end, and what follows is spoken")
        found = super()._read(rows, length)
        if "ahead" in found:
            found["ahead"] = found["ahead"].new_zeros(len(found["ahead"]), 0, AHEAD * self.config.hidden_size)
        return found
