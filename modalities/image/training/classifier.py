"""Fits the classifier of images on the training set and measures its accuracy.

It is fitted on real images and on their reconstructions by the tokenizer, which is what it will classify, including
names held out from the token model. Its accuracy is measured on styles left out of the fit.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from outrider.core.errors import InvalidOption
from outrider.image.classifier import Classifier, normalise_name, top_k_accuracy
from outrider.image.prompt_encoder import COMMON
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.data import HELD_NAME, Pictures

FeatureExtractor = Callable[[Tensor], Tensor]  # images [N, 3, 64, 64] in [-1, 1] -> features [N, F]


def train_classifier(
    pictures: Pictures, codec: Tokenizer, extract: FeatureExtractor, *, width: int = 256, shrink: float = 0.3
) -> tuple[Classifier, dict[str, dict[str, float]]]:
    """A classifier of the images of common and held-out names, and its accuracy by leaving out one style at a time:
    on common and on held-out names, each for real images and for their reconstructions from codes."""
    wanted = {normalise_name(name) for name in COMMON}
    wanted |= {normalise_name(pictures.names[index]) for index in pictures.indices(HELD_NAME)}
    indices = np.array([index for index, name in enumerate(pictures.names) if normalise_name(name) in wanted], np.int64)
    if len(np.unique(pictures.style[indices])) < 2:
        raise InvalidOption("the classifier needs images of common or held-out names in two styles or more")
    real = pictures.tensor[torch.from_numpy(indices)].float() / 127.5 - 1
    device = codec.codebook.device
    with torch.no_grad():
        decoded = [codec.decode(codec.encode(part.to(device))).clamp(-1, 1).cpu() for part in torch.split(real, 64)]
    features = {"real images": extract(real), "from codes": extract(torch.cat(decoded))}
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
