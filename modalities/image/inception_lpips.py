"""Third-party networks for image metrics: Inception features and LPIPS, fetched through outrider.core.assets.store.

Inception is a TorchScript archive, which is opened only if its checksum matches the catalogue's. LPIPS is published as
weights; its network is written here. Independent of the metrics computed from the features.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from outrider.core.assets.store import Checkpoint, convert_pickle, fetch
from outrider.core.paths import cache_folder

_SIDE = 299  # pixels, the input size of Inception
_BATCH = 16  # images per pass


class Inception:
    """The pooled features of Inception v3 (arXiv 1512.00567), trained by Google on ImageNet, that FID is defined on."""

    def __init__(self, network: Any, device: torch.device | str) -> None:
        self._network, self.device = network, device

    @classmethod
    def pretrained(cls, device: torch.device | str = "cpu") -> Inception:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", DeprecationWarning
            )  # of torch.jit.load; no torch.export archive is published
            network = torch.jit.load(str(fetch("inception") / "inception.pt"), map_location=device)  # type: ignore[no-untyped-call]
        return cls(network.eval(), device)

    @torch.no_grad()
    def features(self, pictures: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] -> [N, 2048]."""
        chunks = []
        for part in torch.split(pictures, _BATCH):
            large = F.interpolate(part.to(self.device), (_SIDE, _SIDE), mode="bicubic", antialias=True)
            features = self._network(large.clamp(-1, 1))
            chunks.append((features.mean((2, 3)) if features.dim() == 4 else features).cpu())
        return torch.cat(chunks)


def cached_features(pictures: Tensor, inception: Callable[[], Inception]) -> Tensor:
    """Inception features of images, stored in the cache folder under the images' hash. `inception` is called only
    if they are not stored yet."""
    digest = hashlib.sha256(pictures.cpu().numpy().tobytes()).hexdigest()[:16]
    file = cache_folder() / "features" / f"inception-{digest}.npy"
    if file.is_file():
        return torch.from_numpy(np.load(file, allow_pickle=False))
    features = inception().features(pictures)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.npy")
    np.save(partial, features.numpy())
    partial.replace(file)
    return features


class Lpips:
    """LPIPS ("The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", arXiv 1801.03924) on AlexNet, in
    the shift-tolerant variant that blurs before downsampling (arXiv 2207.13686)."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    @classmethod
    def pretrained(cls, device: torch.device | str = "cpu") -> Lpips:
        return cls({name: tensor.to(device) for name, tensor in Checkpoint(convert_pickle("lpips")).items()})

    def _conv(self, x: Tensor, name: str, padding: int) -> Tensor:
        return F.conv2d(x, self.weights[f"net.{name}.weight"], self.weights[f"net.{name}.bias"], padding=padding)

    def _blur_pool(self, x: Tensor, name: str) -> Tensor:
        blur = self.weights[f"net.{name}.filt"]
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), blur, stride=2, groups=len(blur))

    def _activations(self, pictures: Tensor) -> list[Tensor]:
        """The activations of five layers, normalised over channels at each position."""
        x = (pictures - self.weights["scaling_layer.shift"]) / self.weights["scaling_layer.scale"]
        layers = [self._blur_pool(self._conv(x, "slice1.0", 2), "slice1.1").relu()]
        x = self._blur_pool(F.max_pool2d(layers[-1], 3, 1), "slice2.4")
        layers.append(self._conv(x, "slice2.5", 2).relu())
        x = self._blur_pool(F.max_pool2d(layers[-1], 3, 1), "slice3.8")
        for name in ("slice3.9", "slice4.11", "slice5.13"):
            layers.append(self._conv(x, name, 1).relu())
            x = layers[-1]
        return [layer / (layer.square().sum(1, keepdim=True).sqrt() + 1e-10) for layer in layers]

    @torch.no_grad()
    def distance(self, first: Tensor, second: Tensor) -> Tensor:
        """Two batches [N, 3, H, W] in [-1, 1] -> the perceptual distance [N] of each pair, 0 for equal images."""
        chunks = []
        device = self.weights["lin0.model.1.weight"].device
        for a, b in zip(torch.split(first, _BATCH), torch.split(second, _BATCH), strict=True):
            pairs = zip(self._activations(a.to(device)), self._activations(b.to(device)), strict=True)
            distances = [
                F.conv2d((x - y).square(), self.weights[f"lin{n}.model.1.weight"]).mean((1, 2, 3))
                for n, (x, y) in enumerate(pairs)
            ]
            chunks.append(torch.stack(distances).sum(0).cpu())
        return torch.cat(chunks)
