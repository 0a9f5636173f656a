"""SpecDec++'s acceptance head: says of a draft model's next token, before it is drawn, how likely it is to be accepted.

Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths" (arXiv 2405.19715): residual
layers on the draft model's last state, trained on its drafts against the target. The paper draws tokens of the draft
model into the target's answers and weighs rejections more; ours learns at every place of the answers, where all before
it was accepted, the very chance of acceptance (at temperature 0 whether both choose alike), unweighted, so that it can
be taken at its word. The policy that stops by it is outrider.core.drafters.length_policies.Risk.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.drafters.length_policies import AcceptanceHead
from outrider.core.drafters.trained.distilled import SmallModel
from outrider.core.engine.trainable.block import Matrix
from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import Batch, DraftHead
from outrider.core.training.losses import Loss


class AcceptanceChance(DraftHead):
    """`layers` residual layers, then a number. Learns of the draft model that it `watches`, whose states it reads and
    leaves as they are; drafts as an AcceptanceHead."""

    def __init__(self, target: Any, *, layers: int = 1, temperature: float = 0.0) -> None:
        super().__init__()
        if layers < 0 or temperature < 0:
            raise InvalidOption(f"layers={layers}, temperature={temperature}: each must be 0 or more")
        self.config = {"layers": layers, "temperature": temperature}
        self.temperature, width = temperature, target.network.config.hidden_size
        self.layers: Any = nn.ModuleList(Matrix(width, width, bias=True, zero=True) for _ in range(layers))
        self.out = Matrix(width, 1, bias=True, zero=True)
        self._watched: list[SmallModel] = []  # in a list: no part of this module

    def watch(self, model: SmallModel) -> None:
        self._watched = [model]

    def chances(self, states: Tensor) -> Tensor:
        """States [..., D] -> logits [...]."""
        for layer in self.layers:
            states = states + F.silu(layer(states))
        found: Tensor = self.out(states)[..., 0]
        return found

    def _judged(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """What it says at the places that count, as logits [N], and what is true of them [N]."""
        if not self._watched:
            raise InvalidOption("an acceptance head learns of a draft model's drafts; let it watch one")
        model = self._watched[0]
        with torch.no_grad():
            states = model.states(batch)[batch.loss_mask()].float()
            logits = model.words.logits(states)
            ids = model.words.vocabulary
            if self.temperature:
                distribution = (batch.teacher_log_probs(batch.answer) / self.temperature).softmax(-1)
                distribution = distribution if ids is None else distribution.index_select(-1, ids)
                true = torch.minimum(distribution, (logits.float() / self.temperature).softmax(-1)).sum(-1).clamp(0, 1)
            else:
                best = logits.argmax(-1)
                true = ((best if ids is None else ids[best]) == batch.labels()[batch.loss_mask()]).float()
        return self.chances(states), true

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        said, true = self._judged(batch)
        return F.binary_cross_entropy_with_logits(said.float(), true, reduction="sum") / max(len(true), 1)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        """Whether its judgement is right, place by place: it drafts nothing."""
        said, true = self._judged(batch)
        found = torch.zeros(*batch.answer.shape, 1, dtype=torch.bool, device=batch.tokens.device)
        found[batch.loss_mask()] = ((said > 0) == (true > 0.5))[:, None]
        return found

    def drafts(self, target: Any) -> Any:
        """In the target's precision."""
        network = target.network
        named = [(str(index), layer) for index, layer in enumerate(self.layers)] + [("out", self.out)]
        tensors = {}
        for name, layer in named:
            tensors[f"{name}.weight"] = layer.weight.detach().to(network.device, network.dtype)
            tensors[f"{name}.bias"] = layer.bias.detach().to(network.device, network.dtype)
        return AcceptanceHead(tensors)
