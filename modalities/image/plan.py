"""What a picture looks like from afar, before any of it is drawn: a small network turns what was asked for into a plan
of the whole grid, and each place is told its part of it.

A prompt's few words are read by every place through attention as well; but the way from a word to a shape is long
there, and words that stand with few pictures never find it. A plan is learned from all places at once. Knows prompts'
states, nothing of words.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.engine.network import Network
from outrider.core.engine.told import Informed
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.laws import Sampling
from outrider.core.target import Prefill, Prompts

_COARSE = 4  # places a side that it begins with


class Plan(nn.Module):
    """A style and words -> what each place of a grid is told."""

    def __init__(self, width: int, channels: int, side: int, drop: float) -> None:
        super().__init__()
        self.side, self.drop = side, drop
        self.start = nn.Linear(2 * width, channels * _COARSE * _COARSE)
        self.grow = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)])
        self.mix = nn.Conv2d(channels, channels, 3, padding=1)
        self.out = nn.Conv2d(channels, width, 1)
        self.place = nn.Parameter(torch.zeros(side * side, width))
        with torch.no_grad():  # nothing is told before it is learned
            for tensor in self.out.parameters():
                tensor.zero_()

    def forward(self, style: Tensor, words: Tensor, given: Tensor) -> Tensor:
        """[B, D], [B, W, D] and which words there are [B, W] -> [B, side^2, D]."""
        there = given[..., None].to(words.dtype)
        said = (words * there).sum(1) / there.sum(1).clamp(min=1).sqrt()
        x = F.dropout(F.gelu(self.start(torch.cat([style, said], -1))), self.drop, self.training)
        x = x.view(len(x), -1, _COARSE, _COARSE)
        for conv in self.grow:
            x = F.gelu(conv(F.interpolate(x, size=min(2 * x.shape[-1], self.side))))
        x = x + F.gelu(self.mix(x))
        told: Tensor = self.out(F.interpolate(x, size=self.side)).flatten(2).transpose(1, 2)
        return told + self.place.to(told.dtype)


class Planned(Network):
    """A network, and a plan of what it is to be told behind prompts of some `length`, in which `blank` is no word."""

    def __init__(self, network: Network, plan: Plan, length: int, blank: int) -> None:
        super().__init__(network.config, network.embedding, network.layers, network.norm, network.head)
        self.plan, self.length, self.blank = plan, length, blank

    @torch.no_grad()
    def told(self, prompts: Prompts) -> Tensor:
        ids = torch.tensor([list(one[: self.length]) for one in prompts], device=self.device)
        states = F.embedding(ids, self.embedding.to(self.wide))
        plan = self.plan(states[:, 0], states[:, 1:], ids[:, 1:] != self.blank)
        return F.pad(plan, (0, 0, self.length, 0))

    def run(self, *given: Any, **named: Any) -> Tensor:
        raise InvalidOption("this network draws by a plan; make its decoder with outrider.image.plan.decoder")


class Drawer(Informed):
    """A decoder that draws by the plan of what its prompts begin with."""

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        assert isinstance(self._whole, Planned)
        self.tell(self._whole.told(prompts))
        return super().begin(prompts, sampling, needs)


def decoder(network: Network) -> Decoder:
    """A decoder of a network, with a plan or without."""
    return Drawer(network) if isinstance(network, Planned) else Decoder(network)
