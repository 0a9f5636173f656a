"""Pixels as pictures. Knows nothing of who drew them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


def images(pixels: Tensor) -> list[Image]:
    """[B, 3, H, W] in -1..1 as pictures."""
    from PIL import Image

    numbers = ((pixels.float().clamp(-1, 1) + 1) * 127.5).round().byte().permute(0, 2, 3, 1).cpu().numpy()
    return [Image.fromarray(one) for one in numbers]


def likeliest(codes: Tensor) -> int:
    """The one that there are most of."""
    return int(codes.flatten().mode().values)
