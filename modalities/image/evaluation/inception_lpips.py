"""Networks of others that look at pictures: Inception's features, and LPIPS. Fetched through
outrider.core.assets.store.

Inception comes as a TorchScript archive, a graph that torch interprets; it is opened only as what its pinned checksum
says it is. LPIPS comes as weights alone, and its network is written here. Knows pixels, nothing of what is measured.
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

from outrider.core.assets.store import Checkpoint, fetch, unpickled
from outrider.core.paths import cache_folder

_SIDE = 299  # pixels that Inception looks at
_TOGETHER = 16  # pictures at a time


class Inception:
    """Features of Inception v3 as Google trained it on ImageNet (arXiv 1512.00567), those that FID is made of."""

    def __init__(self, network: Any, device: torch.device | str) -> None:
        self._network, self.device = network, device

    @classmethod
    def fetched(cls, device: torch.device | str = "cpu") -> Inception:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch would like another form of file
            network = torch.jit.load(str(fetch("inception") / "inception.pt"), map_location=device)  # type: ignore[no-untyped-call]
        return cls(network.eval(), device)

    @torch.no_grad()
    def features(self, pictures: Tensor) -> Tensor:
        """[N, 3, H, W] in [-1, 1] -> [N, 2048]."""
        found = []
        for part in torch.split(pictures, _TOGETHER):
            large = F.interpolate(part.to(self.device), (_SIDE, _SIDE), mode="bicubic", antialias=True)
            said = self._network(large.clamp(-1, 1))
            found.append((said.mean((2, 3)) if said.dim() == 4 else said).cpu())
        return torch.cat(found)


def kept(pictures: Tensor, eyes: Callable[[], Inception]) -> Tensor:
    """Features of pictures that are the same in every run: found once, and kept in the cache folder."""
    digest = hashlib.sha256(pictures.cpu().numpy().tobytes()).hexdigest()[:16]
    file = cache_folder() / "features" / f"inception-{digest}.npy"
    if file.is_file():
        return torch.from_numpy(np.load(file, allow_pickle=False))
    found = eyes().features(pictures)
    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_suffix(".partial.npy")
    np.save(partial, found.numpy())
    partial.replace(file)
    return found


class Lpips:
    """LPIPS ("The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", arXiv 1801.03924) on AlexNet, in
    the shift-tolerant form that blurs before it takes fewer pixels (arXiv 2207.13686)."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        self.weights = weights

    @classmethod
    def fetched(cls, device: torch.device | str = "cpu") -> Lpips:
        return cls({name: one.to(device) for name, one in Checkpoint(unpickled("lpips")).items()})

    def _conv(self, x: Tensor, name: str, padding: int) -> Tensor:
        return F.conv2d(x, self.weights[f"net.{name}.weight"], self.weights[f"net.{name}.bias"], padding=padding)

    def _halved(self, x: Tensor, name: str) -> Tensor:
        blur = self.weights[f"net.{name}.filt"]
        return F.conv2d(F.pad(x, (2, 2, 2, 2), mode="reflect"), blur, stride=2, groups=len(blur))

    def _taps(self, pictures: Tensor) -> list[Tensor]:
        """What five layers see, each place of unit length."""
        x = (pictures - self.weights["scaling_layer.shift"]) / self.weights["scaling_layer.scale"]
        taps = [self._halved(self._conv(x, "slice1.0", 2), "slice1.1").relu()]
        x = self._halved(F.max_pool2d(taps[-1], 3, 1), "slice2.4")
        taps.append(self._conv(x, "slice2.5", 2).relu())
        x = self._halved(F.max_pool2d(taps[-1], 3, 1), "slice3.8")
        for name in ("slice3.9", "slice4.11", "slice5.13"):
            taps.append(self._conv(x, name, 1).relu())
            x = taps[-1]
        return [one / (one.square().sum(1, keepdim=True).sqrt() + 1e-10) for one in taps]

    @torch.no_grad()
    def apart(self, one: Tensor, other: Tensor) -> Tensor:
        """[N, 3, H, W] twice, in [-1, 1] -> [N] how different they look; 0: the same."""
        found = []
        device = self.weights["lin0.model.1.weight"].device
        for a, b in zip(torch.split(one, _TOGETHER), torch.split(other, _TOGETHER), strict=True):
            pairs = zip(self._taps(a.to(device)), self._taps(b.to(device)), strict=True)
            off = [
                F.conv2d((x - y).square(), self.weights[f"lin{n}.model.1.weight"]).mean((1, 2, 3))
                for n, (x, y) in enumerate(pairs)
            ]
            found.append(torch.stack(off).sum(0).cpu())
        return torch.cat(found)
