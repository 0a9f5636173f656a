"""How good pictures are: beside real ones, beside plain decoding's of the same seeds, and beside their prompts.

Distances of Inception features (FID, arXiv 1706.08500; KID, arXiv 1801.01401; precision and recall, arXiv 1904.06991)
are good for differences between rows of one table only: the network is a copy that travels in a package, and hundreds
of pictures are few for it. Knows pictures and features, nothing of decoding.
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
from outrider.image.evaluation.inception_lpips import Inception, Lpips, kept
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.classifier import Classifier, agreement
from outrider.image.training.data import HELD_NAME, LEARNED, Pictures

if TYPE_CHECKING:
    from PIL.Image import Image

    from outrider.image.stream import Result

REAL = 1024  # real pictures, at most, that features are compared with
_NEIGHBOURS = 3  # whose distance is how far a picture's surroundings reach


def fid(found: Tensor, real: Tensor) -> float:
    """The Frechet distance of Gaussians fitted to features [N, D] and [M, D]. The trace of the root of the product of
    the covariances is the sum of the singular values of X Y^T, N by M, so that no D by D root is taken."""
    x, y = _pair(found, real)
    means = (x.mean(0) - y.mean(0)).square().sum()
    x, y = ((one - one.mean(0)) / max(len(one) - 1, 1) ** 0.5 for one in (x, y))
    return float(means + x.square().sum() + y.square().sum() - 2 * torch.linalg.svdvals(x @ y.T).sum())


def kid(found: Tensor, real: Tensor) -> float:
    """The squared maximum mean discrepancy of features under the kernel (x y / D + 1)^3, estimated without bias from
    all pairs at once (the paper averages over blocks of them); it may be a little below 0."""
    x, y = _pair(found, real)

    def kernel(one: Tensor, other: Tensor) -> Tensor:
        return (one @ other.T / one.shape[1] + 1) ** 3

    def within(one: Tensor) -> Tensor:
        all_ = kernel(one, one)
        return (all_.sum() - all_.diagonal().sum()) / (len(one) * (len(one) - 1))

    return float(within(x) + within(y) - 2 * kernel(x, y).mean())


def precision_recall(found: Tensor, real: Tensor, neighbours: int = _NEIGHBOURS) -> tuple[float, float]:
    """How many of the pictures lie in the surroundings of a real one, and how many real ones in those of a picture."""
    x, y = _pair(found, real, more=neighbours)
    return _covered(x, y, neighbours), _covered(y, x, neighbours)


def _covered(points: Tensor, centres: Tensor, neighbours: int) -> float:
    """The share of points that are no further from some centre than its k-th nearest other centre is."""
    far = torch.cdist(centres, centres).kthvalue(neighbours + 1, dim=1).values  # the first is itself
    return float((torch.cdist(points, centres) <= far).any(1).double().mean())


def _pair(found: Tensor, real: Tensor, more: int = 1) -> tuple[Tensor, Tensor]:
    if min(len(found), len(real)) <= more:
        raise InvalidOption(f"{len(found)} pictures and {len(real)} real ones can't be compared; take more")
    return found.double().cpu(), real.double().cpu()


def usage(codes: Tensor, real: Tensor, size: int) -> dict[str, float]:
    """How many codes are used, as the perplexity of their frequencies, and how far those are from real pictures' (the
    Jensen-Shannon divergence, in nats)."""
    p, q = (torch.bincount(one.flatten().cpu(), minlength=size).double() / one.numel() for one in (codes, real))
    middle = (p + q) / 2

    def entropy(distribution: Tensor) -> Tensor:
        return -torch.xlogy(distribution, distribution).sum()

    apart = entropy(middle) - (entropy(p) + entropy(q)) / 2
    return {"codes": float(entropy(p).exp()), "codes apart": float(apart)}


def nearest(found: Tensor, learned: Tensor) -> Tensor:
    """[N] how far each picture [N, ...] is from the learned one that is most like it: root mean square of pixels."""
    x, y = found.flatten(1).float(), learned.flatten(1).float()
    parts = [torch.cdist(part, y).amin(1) for part in torch.split(x, 64)]
    return torch.cat(parts) / math.sqrt(x.shape[1])


def tensors(images: Sequence[Image]) -> Tensor:
    """[N, 3, H, W] in [-1, 1]."""
    pixels = np.stack([np.asarray(one) for one in images])
    return torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 127.5 - 1


@dataclass(eq=False)
class Judges:
    """All measures, on pictures of one style or of all. Networks and features of real pictures are made once."""

    pictures: Pictures
    codec: Tokenizer
    classifier: Classifier
    style: str | None = None
    device: torch.device | str = "cpu"

    @cached_property
    def _inception(self) -> Inception:
        return Inception.fetched(self.device)

    @cached_property
    def _lpips(self) -> Lpips:
        return Lpips.fetched(self.device)

    def _chosen(self, split: int, most: int) -> Tensor:
        """Real pictures of one use, always the same ones."""
        places = self.pictures.chosen(split)
        if self.style is not None:
            places = places[self.pictures.style[places] == self.pictures.styles.index(self.style)]
        some = np.random.default_rng(0).permutation(places)[:most]
        found: Tensor = self.pictures.tensor[torch.from_numpy(some)]
        return found.float() / 127.5 - 1

    @cached_property
    def _real(self) -> Tensor:
        return self._chosen(LEARNED, REAL)

    @cached_property
    def _features(self) -> Tensor:
        """Of real pictures."""
        return kept(self._real, lambda: self._inception)

    @cached_property
    def _codes(self) -> Tensor:
        device = self.codec.codebook.device
        with torch.no_grad():
            return torch.cat([self.codec.encode(part.to(device)).cpu() for part in torch.split(self._real, 64)])

    @cached_property
    def _learned(self) -> Tensor:
        return self._chosen(LEARNED, len(self.pictures))

    @cached_property
    def usual(self) -> dict[str, float]:
        """What real pictures that nobody learned from get, and what the tokenizer alone costs."""
        held = self._chosen(HELD_NAME, REAL // 2)
        found = {"nearest": float(nearest(held, self._learned).mean())}
        if len(held) > _NEIGHBOURS:
            features = self._inception.features(held)
            found |= {"FID": fid(features, self._features), "KID": kid(features, self._features)}
        return found

    def of(self, found: Sequence[Result], plain: Sequence[Result]) -> dict[str, float]:
        """What a generation gave, beside plain decoding of the same prompts and seeds."""
        codes = torch.stack([one.grid for one in found])
        pictures, others = ([one.image for one in results] for results in (found, plain))
        return self.judge(pictures, codes, [one.prompt for one in found], others)

    def judge(
        self, images: Sequence[Image], codes: Tensor, named: Sequence[str], plain: Sequence[Image]
    ) -> dict[str, float]:
        """Pictures with their codes [N, ...] and prompts, and plain decoding's of the same seeds."""
        seen = tensors(images)
        features = self._inception.features(seen)
        precision, recall = precision_recall(features, self._features)
        return {
            "KID": kid(features, self._features),
            "FID": fid(features, self._features),
            "precision": precision,
            "recall": recall,
            "LPIPS": float(self._lpips.apart(seen, tensors(plain)).mean()),
            **agreement(self.classifier.ranks(features, named)),
            **usage(codes, self._codes, self.codec.layout.codes),
            "nearest": float(nearest(seen, self._learned).mean()),
        }
