"""SpecDec++'s acceptance head: predicts the probability that a draft model's next token will be accepted.

Huang et al., "SpecDec++: Boosting Speculative Decoding via Adaptive Candidate Lengths" (arXiv 2405.19715): residual
layers on the draft model's last state. The paper mixes tokens of the draft model into the target's answers and weights
rejections more. Ours learns the exact acceptance probability at every position of the answers (at temperature 0 whether
both models choose the same token), unweighted, so that its predictions are calibrated. The policy that uses it is
outrider.core.drafters.length_policies.Risk.
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
    """`layers` residual layers and one output, trained on the states of a frozen draft model, set by `watch`. `drafts`
    returns an AcceptanceHead."""

    def __init__(self, target: Any, *, layers: int = 1, temperature: float = 0.0) -> None:
        super().__init__()
        if layers < 0 or temperature < 0:
            raise InvalidOption(f"layers={layers}, temperature={temperature}: each must be 0 or more")
        self.config = {"layers": layers, "temperature": temperature}
        self.temperature, width = temperature, target.network.config.hidden_size
        self.layers: Any = nn.ModuleList(Matrix(width, width, bias=True, zero=True) for _ in range(layers))
        self.out = Matrix(width, 1, bias=True, zero=True)
        self._watched: list[SmallModel] = []  # in a list, so that it is not a submodule

    def watch(self, model: SmallModel) -> None:
        self._watched = [model]

    def logits(self, states: Tensor) -> Tensor:
        """States [..., D] -> logits [...]."""
        for layer in self.layers:
            states = states + F.silu(layer(states))
        logits: Tensor = self.out(states)[..., 0]
        return logits

    def _predicted(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Logits [N] and true acceptance probabilities [N] at the positions of the loss mask."""
        if not self._watched:
            raise InvalidOption("an acceptance head is trained on a draft model; set one with watch(model)")
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
        return self.logits(states), true

    def loss(self, batch: Batch, loss: Loss) -> Tensor:
        predicted, true = self._predicted(batch)
        return F.binary_cross_entropy_with_logits(predicted.float(), true, reduction="sum") / max(len(true), 1)

    def hits(self, batch: Batch, depth: int = 8) -> Tensor:
        """[B, T, 1] whether the prediction is right, as there is no draft to compare."""
        predicted, true = self._predicted(batch)
        right = torch.zeros(*batch.answer.shape, 1, dtype=torch.bool, device=batch.tokens.device)
        right[batch.loss_mask()] = ((predicted > 0) == (true > 0.5))[:, None]
        return right

    def drafts(self, target: Any) -> Any:
        """An AcceptanceHead in the target's precision."""
        network = target.network
        named = [(str(index), layer) for index, layer in enumerate(self.layers)] + [("out", self.out)]
        tensors = {}
        for name, layer in named:
            tensors[f"{name}.weight"] = layer.weight.detach().to(network.device, network.dtype)
            tensors[f"{name}.bias"] = layer.bias.detach().to(network.device, network.dtype)
        return AcceptanceHead(tensors)
