"""Quality metrics of images: compared with real images, with plain decoding's of the same seeds, and with their
prompts.

Metrics of Inception features (FID, arXiv 1706.08500; KID, arXiv 1801.01401; precision and recall, arXiv 1904.06991) are
comparable within one table only, because hundreds of images are few for them and the network is a repackaged copy.
Independent of decoding.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InvalidOption
from outrider.image.classifier import Classifier, top_k_accuracy
from outrider.image.inception_lpips import Inception, Lpips, cached_features
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.data import HELD_NAME, TRAIN, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from outrider.image.stream import Result

MAX_REAL = 1024  # real images to compare features with
_NEIGHBOURS = 3  # precision and recall: a ball reaches to the third nearest neighbour of its centre


def fid(generated: Tensor, real: Tensor) -> float:
    """The Frechet distance of Gaussians fitted to features [N, D] and [M, D]. The trace of the square root of the
    product of the covariances equals the sum of the singular values of X Y^T [N, M], so no D x D root is computed."""
    x, y = _checked_pair(generated, real)
    means = (x.mean(0) - y.mean(0)).square().sum()
    x, y = ((features - features.mean(0)) / max(len(features) - 1, 1) ** 0.5 for features in (x, y))
    return float(means + x.square().sum() + y.square().sum() - 2 * torch.linalg.svdvals(x @ y.T).sum())


def kid(generated: Tensor, real: Tensor) -> float:
    """The squared maximum mean discrepancy of features under the kernel (x y / D + 1)^3. The unbiased estimate uses all
    pairs, where the paper averages over blocks; it can be slightly negative."""
    x, y = _checked_pair(generated, real)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        return (a @ b.T / a.shape[1] + 1) ** 3

    def within(a: Tensor) -> Tensor:
        values = kernel(a, a)
        return (values.sum() - values.diagonal().sum()) / (len(a) * (len(a) - 1))

    return float(within(x) + within(y) - 2 * kernel(x, y).mean())


def precision_recall(generated: Tensor, real: Tensor, neighbours: int = _NEIGHBOURS) -> tuple[float, float]:
    """The share of generated images within the k-nearest-neighbour balls of real ones, and the converse."""
    x, y = _checked_pair(generated, real, minimum=neighbours + 1)
    return _covered(x, y, neighbours), _covered(y, x, neighbours)


def _covered(points: Tensor, centres: Tensor, neighbours: int) -> float:
    """The share of points within the ball of a centre, whose radius is the distance to its k-th nearest other
    centre."""
    radii = torch.cdist(centres, centres).kthvalue(neighbours + 1, dim=1).values  # the nearest is the centre itself
    return float((torch.cdist(points, centres) <= radii).any(1).double().mean())


def _checked_pair(generated: Tensor, real: Tensor, minimum: int = 2) -> tuple[Tensor, Tensor]:
    if min(len(generated), len(real)) < minimum:
        raise InvalidOption(
            f"there are {len(generated)} generated and {len(real)} real images; the metric takes {minimum} of each"
        )
    return generated.double().cpu(), real.double().cpu()


def code_usage(codes: Tensor, real: Tensor, size: int) -> dict[str, float]:
    """The perplexity of the code frequencies ("codes"), and their Jensen-Shannon divergence in nats from those of real
    images ("code divergence")."""
    p, q = (torch.bincount(ids.flatten().cpu(), minlength=size).double() / ids.numel() for ids in (codes, real))
    middle = (p + q) / 2

    def entropy(distribution: Tensor) -> Tensor:
        return -torch.xlogy(distribution, distribution).sum()

    divergence = entropy(middle) - (entropy(p) + entropy(q)) / 2
    return {"codes": float(entropy(p).exp()), "code divergence": float(divergence)}


def nearest_distance(pictures: Tensor, training: Tensor) -> Tensor:
    """The root-mean-square pixel distance [N] of each image [N, ...] to the nearest training image."""
    x, y = pictures.flatten(1).float(), training.flatten(1).float()
    parts = [torch.cdist(part, y).amin(1) for part in torch.split(x, 64)]
    return torch.cat(parts) / math.sqrt(x.shape[1])


def to_tensor(images: Sequence[Image]) -> Tensor:
    """PIL images -> pixels [N, 3, H, W] in [-1, 1]."""
    pixels = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


@dataclass(eq=False)
class QualityMetrics:
    """All metrics, on images of one style or of all styles. Networks and features of real images load on first
    use."""

    pictures: Pictures
    codec: Tokenizer
    classifier: Classifier
    style: str | None = None
    device: torch.device | str = "cpu"

    @cached_property
    def _inception(self) -> Inception:
        return Inception.pretrained(self.device)

    @cached_property
    def _lpips(self) -> Lpips:
        return Lpips.pretrained(self.device)

    def _sample(self, split: int, limit: int) -> Tensor:
        """Up to `limit` real images of a split, the same ones each time."""
        indices = self.pictures.indices(split)
        if self.style is not None:
            indices = indices[self.pictures.style[indices] == self.pictures.styles.index(self.style)]
        sample = np.random.default_rng(0).permutation(indices)[:limit]
        pixels: Tensor = self.pictures.tensor[torch.from_numpy(sample)]
        return pixels.float() / 127.5 - 1

    @cached_property
    def _real(self) -> Tensor:
        return self._sample(TRAIN, MAX_REAL)

    @cached_property
    def _real_features(self) -> Tensor:
        return cached_features(self._real, lambda: self._inception)

    @cached_property
    def _real_codes(self) -> Tensor:
        device = self.codec.codebook.device
        with torch.no_grad():
            return torch.cat([self.codec.encode(part.to(device)).cpu() for part in torch.split(self._real, 64)])

    @cached_property
    def _training(self) -> Tensor:
        return self._sample(TRAIN, len(self.pictures))

    @cached_property
    def reference(self) -> dict[str, float]:
        """The metrics of held-out real images."""
        held_out = self._sample(HELD_NAME, MAX_REAL // 2)
        metrics = {"nearest distance": float(nearest_distance(held_out, self._training).mean())}
        if len(held_out) > _NEIGHBOURS:
            features = self._inception.features(held_out)
            metrics |= {"FID": fid(features, self._real_features), "KID": kid(features, self._real_features)}
        return metrics

    def of_results(self, results: Sequence[Result], plain: Sequence[Result]) -> dict[str, float]:
        """The metrics of results, given plain decoding's of the same prompts and seeds."""
        codes = torch.stack([result.grid for result in results])
        images, plain_images = ([result.image for result in group] for group in (results, plain))
        return self.measure(images, codes, [result.prompt for result in results], plain_images)

    def measure(
        self, images: Sequence[Image], codes: Tensor, prompts: Sequence[str], plain: Sequence[Image]
    ) -> dict[str, float]:
        """The metrics of images with codes [N, ...] and prompts, given plain decoding's images of the same
        seeds."""
        pixels = to_tensor(images)
        features = self._inception.features(pixels)
        precision, recall = precision_recall(features, self._real_features)
        return {
            "KID": kid(features, self._real_features),
            "FID": fid(features, self._real_features),
            "precision": precision,
            "recall": recall,
            "LPIPS": float(self._lpips.distance(pixels, to_tensor(plain)).mean()),
            **top_k_accuracy(self.classifier.ranks(features, prompts)),
            **code_usage(codes, self._real_codes, self.codec.layout.codes),
            "nearest distance": float(nearest_distance(pixels, self._training).mean()),
        }
