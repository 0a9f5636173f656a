"""The layout planner predicts, from the prompt alone, which codes each position of the grid is likely to hold. The
token model receives the prediction as an input at every position.

The token model also reads the prompt through attention, but learns rare words poorly that way. The planner predicts all
positions at once, so it trains in minutes; the token model then learns how far to rely on it. Independent of pixels.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.distribution import Sampling
from outrider.core.engine.conditioned import ConditionedDecoder
from outrider.core.engine.network import Network
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.protocol import Prefill, Prompts
from outrider.core.training.draft_head import DraftHead
from outrider.image.prompt_encoder import PromptEncoder


class LayoutPlanner(DraftHead):
    """Predicts a distribution over the levels of each code dimension, at each position of the grid, from a style and
    words. It has its own word embeddings; `target` is unused."""

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
            raise InvalidOption(
                f"a plan needs an even side and levels whose product is the number of codes; "
                f"the side is {side}, the levels are {tuple(levels)}, and there are {codes:,} codes"
            )
        self.prompt_encoder = PromptEncoder(codes, tuple(styles), tuple(words))
        self.levels, self.drop = list(levels), drop
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
        self.embedding = nn.Parameter(torch.randn(self.prompt_encoder.size - codes, width) * 0.5)
        self.mix = nn.Linear(2 * width, hidden)
        self.start = nn.Linear(hidden, channels * self._coarse**2)
        self.convs = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3)])
        self.out = nn.Conv2d(channels, sum(levels), 1)
        self.place = nn.Parameter(torch.zeros(sum(levels), side, side))

    def features(self, prompt_ids: Tensor) -> Tensor:
        """Prompt ids [B, P] -> [B, channels, side, side]."""
        ids = prompt_ids - self.prompt_encoder.codes
        present = (prompt_ids[:, 1:] != self.prompt_encoder.empty)[..., None].to(self.embedding.dtype)
        x = F.dropout(F.embedding(ids, self.embedding), self.drop, self.training)
        words = (x[:, 1:] * present).sum(1) / present.sum(1).clamp(min=1).sqrt()
        x = F.gelu(self.mix(torch.cat([x[:, 0], words], -1)))
        x = self.start(F.dropout(x, self.drop, self.training)).view(len(x), -1, self._coarse, self._coarse)
        x = x + F.gelu(self.convs[0](F.gelu(x)))
        x = F.interpolate(x, size=self._side)
        for conv in self.convs[1:]:
            x = x + F.gelu(conv(F.gelu(x)))
        return x

    def logits(self, features: Tensor) -> Tensor:
        """[B, channels, side, side] -> logits [B, levels of all dimensions, side, side]."""
        logits: Tensor = self.out(features)
        return logits + self.place.to(logits.dtype)

    def nll(self, prompt_ids: Tensor, codes: Tensor) -> Tensor:
        """Negative log-likelihood of codes [B, N], whose dimensions are treated as independent."""
        logits = self.logits(self.features(prompt_ids)).float().flatten(2)
        total, rest = torch.zeros_like(codes, dtype=logits.dtype), codes
        for dimension in reversed(torch.split(logits, self.levels, 1)):
            count = dimension.shape[1]
            total = total + F.cross_entropy(dimension, rest % count, reduction="none")
            rest = rest // count
        return total


class PlanConditioning(nn.Module):
    """Projects a plan to one conditioning vector per position. The planner is frozen; with `shared` it belongs to
    another model and is not among this module's weights."""

    def __init__(self, planner: LayoutPlanner, width: int, *, shared: bool = False) -> None:
        super().__init__()
        self._shared = [planner] if shared else []  # a list hides it from nn.Module
        self.own = None if shared else planner.requires_grad_(False)
        channels, side = planner.config["channels"], planner.config["side"]
        self.out = nn.Conv2d(channels + sum(planner.levels), width, 1)
        self.place = nn.Parameter(torch.zeros(side * side, width))
        with torch.no_grad():  # the conditioning starts at zero
            for tensor in self.out.parameters():
                tensor.zero_()

    @property
    def planner(self) -> LayoutPlanner:
        return self.own or self._shared[0]

    def train(self, mode: bool = True) -> PlanConditioning:
        super().train(mode)
        self.planner.eval()
        return self

    def forward(self, prompt_ids: Tensor) -> Tensor:
        """Prompt ids [B, P] -> [B, side^2, D]."""
        planner = self.planner
        with torch.no_grad():
            features = planner.features(prompt_ids)
            logits = torch.split(planner.logits(features).float(), planner.levels, 1)
            plan = torch.cat([features, *(dimension.softmax(1).to(features.dtype) for dimension in logits)], 1)
        projected: Tensor = self.out(plan).flatten(2).transpose(1, 2)
        return projected + self.place.to(projected.dtype)


class PlannedNetwork(Network):
    """A network with the plan conditioning of its positions, which follow a prompt of `prompt_length` ids."""

    def __init__(self, network: Network, conditioning: PlanConditioning, prompt_length: int) -> None:
        super().__init__(network.config, network.embedding, network.layers, network.norm, network.head)
        self.conditioning, self.prompt_length = conditioning, prompt_length

    @torch.no_grad()
    def condition(self, prompts: Prompts) -> Tensor:
        """The vectors [B, T, D] to add at each position; zero at the prompt's own."""
        ids = torch.tensor([list(prompt[: self.prompt_length]) for prompt in prompts], device=self.device)
        return F.pad(self.conditioning(ids).to(self.residual_dtype), (0, 0, self.prompt_length, 0))

    def run(self, *args: Any, **kwargs: Any) -> Tensor:
        raise InvalidOption("this network needs a plan; make its decoder with outrider.image.layout_planner.decoder")


class PlannedDecoder(ConditionedDecoder):
    """A decoder that computes the plan from the start of its prompts when a generation begins."""

    def begin(self, prompts: Prompts, sampling: Sampling, needs: frozenset[str] = frozenset()) -> Prefill:
        assert isinstance(self._base, PlannedNetwork)
        self.set_conditioning(self._base.condition(prompts))
        return super().begin(prompts, sampling, needs)


def decoder(network: Network) -> Decoder:
    """A decoder of a network, with or without a plan."""
    return PlannedDecoder(network) if isinstance(network, PlannedNetwork) else Decoder(network)
