"""What a picture looks like from afar, before any of it is drawn: a small network turns what was asked for into a plan
of the whole grid, and each place is told its part of it.

A prompt's few words are read by every place through attention as well; but the way from a word to a shape is long
there, and words that stand with few pictures never find it. A plan is learned by itself, from all places at once and in
minutes: what is left for the model of codes is to draw by it, or to see that it does not hold. Knows ids, not pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.engine.conditioned import Informed
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts
from outrider.core.training.draft_head import DraftHead
from outrider.image.prompt_encoder import PromptEncoder


class Plan(DraftHead):
    """A style and words -> at each place of a grid, how likely each level of each of a code's dimensions is there. It
    has words of its own, and nothing but them to go by: `target` is not looked at."""

    def __init__(
        self,
        target: Any = None,
        *,
        codes: int,
        styles: Sequence[str],
        words: Sequence[str],
        levels: Sequence[int],
        channels: int = 64,
        side: int = 16,
        drop: float = 0.1,
    ) -> None:
        super().__init__()
        if prod(levels) != codes or side % 2:
            raise InvalidOption(f"a plan of {codes:,} codes on {side} places a side can't have levels {tuple(levels)}")
        self.names, self.levels, self.drop = PromptEncoder(codes, tuple(styles), tuple(words)), list(levels), drop
        self.config = {
            "codes": codes,
            "styles": list(styles),
            "words": list(words),
            "levels": list(levels),
            "channels": channels,
            "side": side,
            "drop": drop,
        }
        width, hidden, self._coarse, self._side = 4 * channels, 12 * channels, side // 2, side
        self.embedding = nn.Parameter(torch.randn(self.names.size - codes, width) * 0.5)
        self.mix = nn.Linear(2 * width, hidden)
        self.start = nn.Linear(hidden, channels * self._coarse**2)
        self.convs = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3)])
        self.out = nn.Conv2d(channels, sum(levels), 1)
        self.place = nn.Parameter(torch.zeros(sum(levels), side, side))

    def features(self, asked: Tensor) -> Tensor:
        """A prompt's ids [B, P] -> [B, channels, side, side]."""
        ids = asked - self.names.codes
        there = (asked[:, 1:] != self.names.nothing)[..., None].to(self.embedding.dtype)
        x = F.dropout(F.embedding(ids, self.embedding), self.drop, self.training)
        said = (x[:, 1:] * there).sum(1) / there.sum(1).clamp(min=1).sqrt()
        x = F.gelu(self.mix(torch.cat([x[:, 0], said], -1)))
        x = self.start(F.dropout(x, self.drop, self.training)).view(len(x), -1, self._coarse, self._coarse)
        x = x + F.gelu(self.convs[0](F.gelu(x)))
        x = F.interpolate(x, size=self._side)
        for conv in self.convs[1:]:
            x = x + F.gelu(conv(F.gelu(x)))
        return x

    def says(self, features: Tensor) -> Tensor:
        """[B, channels, side, side] -> logits [B, levels of all dimensions, side, side]."""
        said: Tensor = self.out(features)
        return said + self.place.to(said.dtype)

    def surprise(self, asked: Tensor, codes: Tensor) -> Tensor:
        """-log of what it gives each of a picture's codes [B, N], were its dimensions strangers to one another."""
        said = self.says(self.features(asked)).float().flatten(2)
        total, rest = torch.zeros_like(codes, dtype=said.dtype), codes
        for logits in reversed(torch.split(said, self.levels, 1)):
            count = logits.shape[1]
            total = total + F.cross_entropy(logits, rest % count, reduction="none")
            rest = rest // count
        return total


class Teller(nn.Module):
    """What of a plan is told to each place. The plan has learned before, and learns no more; one that is `lent` is
    another's, and not among the weights."""

    def __init__(self, plan: Plan, width: int, *, lent: bool = False) -> None:
        super().__init__()
        self._lent = [plan] if lent else []  # in a list: no part of this module
        self.own = None if lent else plan.requires_grad_(False)
        channels, side = plan.config["channels"], plan.config["side"]
        self.out = nn.Conv2d(channels + sum(plan.levels), width, 1)
        self.place = nn.Parameter(torch.zeros(side * side, width))
        with torch.no_grad():  # nothing is told before it is learned
            for tensor in self.out.parameters():
                tensor.zero_()

    @property
    def plan(self) -> Plan:
        return self.own or self._lent[0]

    def train(self, mode: bool = True) -> Teller:
        super().train(mode)
        self.plan.eval()
        return self

    def forward(self, asked: Tensor) -> Tensor:
        """A prompt's ids [B, P] -> [B, side^2, D]."""
        with torch.no_grad():
            features = self.plan.features(asked)
            levels = [one.softmax(1) for one in torch.split(self.plan.says(features).float(), self.plan.levels, 1)]
            seen = torch.cat([features, *(one.to(features.dtype) for one in levels)], 1)
        told: Tensor = self.out(seen).flatten(2).transpose(1, 2)
        return told + self.place.to(told.dtype)


class PlannedTarget(Network):
    """A network, and what tells it of a plan behind prompts of some `length`."""

    def __init__(self, network: Network, teller: Teller, length: int) -> None:
        super().__init__(network.config, network.embedding, network.layers, network.norm, network.head)
        self.teller, self.length = teller, length

    @torch.no_grad()
    def told(self, prompts: Prompts) -> Tensor:
        ids = torch.tensor([list(one[: self.length]) for one in prompts], device=self.device)
        return F.pad(self.teller(ids).to(self.wide), (0, 0, self.length, 0))

    def run(self, *given: Any, **named: Any) -> Tensor:
        raise InvalidOption("this network draws by a plan; make its decoder with outrider.image.layout_planner.decoder")


class Drawer(Informed):
    """A decoder that draws by the plan of what its prompts begin with."""

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        assert isinstance(self._whole, PlannedTarget)
        self.tell(self._whole.told(prompts))
        return super().begin(prompts, sampling, needs)


def decoder(network: Network) -> Decoder:
    """A decoder of a network, with a plan or without."""
    return Drawer(network) if isinstance(network, PlannedTarget) else Decoder(network)
