"""A classifier of images by name, which measures whether a generated image shows what its prompt names.

Linear discriminant analysis of Inception features (outrider.image.inception_lpips): features are projected so that
images of one name in different styles lie close together, and a name is the mean of its images. Independent of
codes; outrider.image.training.classifier has its training set.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.training.draft_head import DraftHead
from outrider.image.prompt_encoder import COMMON, words


class Classifier(DraftHead):
    """Features [B, F] -> their similarity to each of `names`. `target` is unused."""

    middle: Tensor  # [F] mean of the features
    turn: Tensor  # [F, width] projection
    means: Tensor  # [names, width] unit vectors

    def __init__(self, target: Any = None, *, names: Sequence[str], features: int = 2048, width: int = 256) -> None:
        super().__init__()
        self.names = tuple(names)
        self.config = {"names": list(names), "features": features, "width": width}
        self.register_buffer("middle", torch.zeros(features))
        self.register_buffer("turn", torch.zeros(features, width))
        self.register_buffer("means", torch.zeros(len(self.names), width))

    @classmethod
    @torch.no_grad()
    def fit(
        cls, names: Sequence[str], features: Tensor, labels: Tensor, *, width: int = 256, shrink: float = 0.3
    ) -> Classifier:
        """Fit to features [N, F] with labels [N], which index `names`. The covariance within names is estimated from
        few images, so `shrink` times its mean variance is added in every direction."""
        features = features.double()
        mean = features.mean(0)
        x = features - mean
        width = min(width, len(x) - 1, x.shape[1])
        principal = torch.linalg.svd(x, full_matrices=False).Vh[:width].T
        x = x @ principal
        residuals = x - _class_means(x, labels, len(names))[labels]
        covariance = residuals.T @ residuals / len(x)
        isotropic = torch.eye(width, dtype=covariance.dtype) * (covariance.diagonal().mean() + 1e-12)
        whitening = torch.linalg.cholesky(torch.linalg.inv(covariance + shrink * isotropic))
        classifier = cls(names=names, features=features.shape[1], width=width)
        classifier.middle.copy_(mean)
        classifier.turn.copy_(principal @ whitening)
        means = _class_means(F.normalize(x @ whitening, dim=1), labels, len(names))
        classifier.means.copy_(F.normalize(means, dim=1))
        return classifier.eval()

    @torch.no_grad()
    def similarities(self, features: Tensor) -> Tensor:
        """[B, F] -> cosines [B, names]."""
        projected = (features.to(self.middle.device) - self.middle) @ self.turn
        return F.normalize(projected, dim=1) @ self.means.T

    @cached_property
    def _indices(self) -> dict[str, int]:
        return {normalise_name(name): index for index, name in enumerate(self.names)}

    def index(self, name: str) -> int | None:
        """The index of a name, or None if it is unknown."""
        return self._indices.get(normalise_name(name))

    @cached_property
    def common(self) -> list[int]:
        """The indices of the common names (outrider.image.prompt_encoder.COMMON)."""
        return [index for name in COMMON if (index := self.index(name)) is not None]

    def ranks(self, features: Tensor, names: Sequence[str]) -> Tensor:
        """The rank [B], from 0, of each image's own name by similarity; -1 if the name is unknown. A common name is
        ranked among the common names only."""
        similarities = self.similarities(features).cpu()
        common, ranks = set(self.common), []
        for row, name in zip(similarities, names, strict=True):
            index = self.index(name)
            if index is None:
                ranks.append(-1)
                continue
            others = row[self.common] if index in common else row
            ranks.append(int((others > row[index]).sum()))
        return torch.tensor(ranks)


def _class_means(x: Tensor, labels: Tensor, count: int) -> Tensor:
    """The mean of the rows [N, D] of each label -> [count, D]."""
    sums = torch.zeros(count, x.shape[1], dtype=x.dtype).index_add_(0, labels, x)
    return sums / torch.bincount(labels, minlength=count).clamp(min=1)[:, None]


def normalise_name(name: str) -> str:
    return " ".join(words(name))


def top_k_accuracy(ranks: Tensor) -> dict[str, float]:
    """The share of images whose name ranks first, and among the first five; unknown names are left out."""
    known = ranks[ranks >= 0]
    if not len(known):
        return {}
    return {"top-1": float((known == 0).float().mean()), "top-5": float((known < 5).float().mean())}
