"""A classifier of pictures by name, which measures whether a generated picture shows what the prompt names.

Linear discriminant analysis of Inception features (outrider.image.evaluation.inception_lpips): features are projected
so that pictures of one name in different styles lie close together, and a name is the mean of its pictures. It is
fitted on real pictures and on their reconstructions by the tokenizer, which is what it will classify, including names
held out from the token model. Its own accuracy is measured on styles left out of the fit. Knows nothing of codes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.errors import InvalidOption
from outrider.core.training.draft_head import DraftHead
from outrider.image.prompt_encoder import COMMON, words
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.data import HELD_NAME, Pictures

FeatureExtractor = Callable[[Tensor], Tensor]  # pictures [N, 3, 64, 64] in [-1, 1] -> features [N, F]


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
        few pictures, so `shrink` times its mean variance is added in every direction."""
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
        """The rank [B], from 0, of each picture's own name by similarity; -1 if the name is unknown. A common name is
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
    """The share of pictures whose name ranks first, and among the first five; unknown names are left out."""
    known = ranks[ranks >= 0]
    if not len(known):
        return {}
    return {"top-1": float((known == 0).float().mean()), "top-5": float((known < 5).float().mean())}


def train_classifier(
    pictures: Pictures, codec: Tokenizer, extract: FeatureExtractor, *, width: int = 256, shrink: float = 0.3
) -> tuple[Classifier, dict[str, dict[str, float]]]:
    """A classifier of the pictures of common and held-out names, and its accuracy by leaving out one style at a time:
    on common and on held-out names, each for real pictures and for their reconstructions from codes."""
    wanted = {normalise_name(name) for name in COMMON}
    wanted |= {normalise_name(pictures.names[index]) for index in pictures.indices(HELD_NAME)}
    indices = np.array([index for index, name in enumerate(pictures.names) if normalise_name(name) in wanted], np.int64)
    if len(np.unique(pictures.style[indices])) < 2:
        raise InvalidOption("the classifier needs pictures of common or held-out names in two styles or more")
    real = pictures.tensor[torch.from_numpy(indices)].float() / 127.5 - 1
    device = codec.codebook.device
    with torch.no_grad():
        decoded = [codec.decode(codec.encode(part.to(device))).clamp(-1, 1).cpu() for part in torch.split(real, 64)]
    features = {"real pictures": extract(real), "from codes": extract(torch.cat(decoded))}
    picture_names = [pictures.names[index] for index in indices]
    names = tuple(dict.fromkeys(normalise_name(name) for name in picture_names))
    labels = torch.tensor([names.index(normalise_name(name)) for name in picture_names])
    styles = torch.from_numpy(np.asarray(pictures.style)[indices])

    def fit(rows: Tensor) -> Classifier:
        both = torch.cat([part[rows] for part in features.values()])
        return Classifier.fit(names, both, labels[rows].repeat(2), width=width, shrink=shrink)

    ranks: dict[str, list[Tensor]] = {}
    for style in np.unique(styles):
        in_other_styles = torch.isin(labels, labels[styles != style])
        partial, rows = fit(styles != style), torch.nonzero((styles == style) & in_other_styles)[:, 0]
        common = torch.isin(labels[rows], torch.tensor(partial.common, dtype=torch.long))
        for source, part in features.items():
            style_ranks = partial.ranks(part[rows], [picture_names[row] for row in rows.tolist()])
            ranks.setdefault(f"common names, {source}", []).append(style_ranks[common])
            ranks.setdefault(f"held-out names, {source}", []).append(style_ranks[~common])
    accuracy = {name: top_k_accuracy(torch.cat(parts)) for name, parts in ranks.items()}
    return fit(torch.ones(len(labels), dtype=torch.bool)), accuracy
