"""The tokenizer's loss, batches and validation measures.

Its batches are mirrored, turned, shifted, recoloured and lightened images, and flat shapes, whose colour must come back
exact. With `only_decoder` the encoder is frozen, so that codes keep their meaning. Independent of recipes and files.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from outrider.image.tokenizer import Tokenizer, psnr, reconstruction_loss
from outrider.image.training.data import SIZE, TRAIN, Pictures
from outrider.image.training.objectives import VALIDATION_SIZE, Batches

_FLAT = 12  # one image in so many is a flat shape
_ORDERS = ((0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0))  # of the colour channels
_UPSIDE_DOWN, _TURNED, _RECOLOURED, _LIGHTER = 0.15, 0.15, 0.35, 0.15  # shares of the images
_DECIBELS, _EDGES = 0.03, 0.02  # weights of the logarithms of the error and of the energy of edges


class CodecObjective(nn.Module):
    """The tokenizer and its loss: the reconstruction loss, the logarithm of each image's squared error (its decibels),
    and the squared logarithm of how much energy its edges lost."""

    def __init__(self, codec: Tokenizer, *, only_decoder: bool = False) -> None:
        super().__init__()
        self.codec, self.only_decoder = codec, only_decoder
        for part in (codec.encoder, codec.quant_conv):
            part.requires_grad_(not only_decoder)

    def forward(self, pictures: Tensor) -> Tensor:
        if self.only_decoder:
            with torch.no_grad():
                codes = self.codec.encode(pictures)
            reconstruction, out_of_range = self.codec.decode(codes), torch.zeros((), device=pictures.device)
        else:
            reconstruction, out_of_range = self.codec(pictures)
        reconstruction = reconstruction.float()
        error = (reconstruction - pictures).square().mean((1, 2, 3))
        lost = (edge_energy(reconstruction) + 3).log() - (edge_energy(pictures) + 3).log()
        loss = reconstruction_loss(reconstruction, pictures, out_of_range.float())
        return loss + _DECIBELS * (error + 3e-4).log().mean() + _EDGES * lost.square().clamp(max=4).mean()


def edge_energy(pictures: Tensor) -> Tensor:
    """The sum [B] of squared differences of neighbouring pixels."""
    return pictures.diff(dim=-1).square().sum((1, 2, 3)) + pictures.diff(dim=-2).square().sum((1, 2, 3))


class CodecTask:
    """Reconstructs images and flat shapes."""

    def __init__(self, pictures: Pictures, batch: int, seed: int, device: torch.device) -> None:
        self.batches = Batches(pictures, batch, seed, device)
        limit = 2 * VALIDATION_SIZE[device.type != "cpu"]
        held_out = np.flatnonzero(pictures.split != TRAIN)
        self.held_out = np.random.default_rng(0).permutation(held_out)[:limit]

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        generator = self.batches.generator(number)
        indices = self.batches.indices(number)
        count, flat = len(indices), len(indices) // _FLAT
        draws = torch.rand(6, count, 1, 1, 1, generator=generator)
        pictures = self.batches.augment(self.batches.pixels(indices), generator, draws[0].flatten() < 0.5)
        order = torch.randint(len(_ORDERS), (count,), generator=generator) * (draws[3].flatten() < _RECOLOURED)
        channels = torch.tensor(_ORDERS)[order].to(pictures.device)[:, :, None, None]
        draws = draws.to(pictures.device)
        pictures = torch.where(draws[1] < _UPSIDE_DOWN, pictures.flip(-2), pictures)
        pictures = torch.where(draws[2] < _TURNED, pictures.transpose(-1, -2), pictures)
        pictures = pictures.gather(1, channels.expand_as(pictures))
        strength = torch.where(draws[4] < _LIGHTER, 0.5 + draws[5] / 2, 1.0)
        pictures = 1 - (1 - pictures) * strength
        return (torch.cat([pictures[: count - flat], flat_shapes(flat, generator).to(pictures.device)]),)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, CodecObjective)
        losses, decibels, codes, energies = [], [], [], []
        for indices in np.array_split(self.held_out, max(len(self.held_out) // 64, 1)):
            pictures = self.batches.pixels(indices)
            grids = model.codec.encode(pictures)
            decoded = model.codec.decode(grids).float()
            loss = reconstruction_loss(decoded, pictures, torch.zeros((), device=decoded.device))
            losses.append(loss * len(indices))
            decibels.append(psnr(decoded, pictures))
            codes.append(grids.flatten())
            energies.append(edge_energy(decoded.clamp(-1, 1)) / edge_energy(pictures).clamp(min=1))
        all_decibels = torch.cat(decibels)
        return {
            "held-out loss": float(sum(losses) / len(self.held_out)),
            "PSNR": float(all_decibels.mean()),
            "PSNR, 10th percentile": float(all_decibels.quantile(0.1)),
            "edge energy": float(torch.cat(energies).median()),
            "codes used": float(len(torch.unique(torch.cat(codes)))),
        }


def flat_shapes(count: int, generator: torch.Generator) -> Tensor:
    """Rectangles, rounded squares and ellipses [B, 3, 64, 64] of one colour, on white or on a second colour; a third of
    the images have one colour throughout."""
    draws = torch.rand(count, 12, 1, 1, generator=generator)
    place, size, kind = 0.25 * SIZE * (1 + 2 * draws[:, 0:2]), 6 + 24 * draws[:, 2:4], draws[:, 4]
    y, x = torch.arange(SIZE, dtype=torch.float32)[:, None], torch.arange(SIZE, dtype=torch.float32)
    power = torch.where(kind < 0.3, 2.0, torch.where(kind < 0.6, 6.0, 60.0))
    across = ((x - place[:, 0]) / size[:, 0]).abs().clamp(max=3) ** power
    down = ((y - place[:, 1]) / size[:, 1]).abs().clamp(max=3) ** power
    inside = (across + down <= 1) | (draws[:, 5] < 1 / 3)
    colour, ground = 2 * draws[:, 6:9] - 1, 2 * draws[:, 9:12] - 1
    ground = torch.where(kind[:, None] < 0.75, torch.ones_like(ground), ground)
    shapes = torch.where(inside[:, None], colour, ground)
    return (shapes * 127.5 + 127.5).round() / 127.5 - 1
