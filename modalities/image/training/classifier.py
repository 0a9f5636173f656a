"""What a picture shows: a judge of whether it is what was asked for.

Features of pictures (Inception's, see outrider.image.evaluation.inception_lpips) are told apart by linear
discriminant analysis: turned so that pictures of the same thing in different styles lie close together, each name is
the middle of its pictures. It learns from real pictures and from what the tokenizer makes of them, since that is what
it will see, and may know names that the model of tokens doesn't. How often it is right on styles it has not seen is
the measure of the judge itself. Knows features and names, nothing of codes.
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

TokenStyle = Callable[[Tensor], Tensor]  # pictures [N, 3, 64, 64] in [-1, 1] -> features [N, F]


class Classifier(DraftHead):
    """Features [B, F] -> how alike they are to each of `names`. `target` is not looked at."""

    middle: Tensor  # [F]
    turn: Tensor  # [F, width]
    means: Tensor  # [names, width], of length 1

    def __init__(self, target: Any = None, *, names: Sequence[str], features: int = 2048, width: int = 256) -> None:
        super().__init__()
        self.names = tuple(names)
        self.config = {"names": list(names), "features": features, "width": width}
        self.register_buffer("middle", torch.zeros(features))
        self.register_buffer("turn", torch.zeros(features, width))
        self.register_buffer("means", torch.zeros(len(self.names), width))

    @classmethod
    @torch.no_grad()
    def fitted(
        cls, names: Sequence[str], seen: Tensor, named: Tensor, *, width: int = 256, shrink: float = 0.3
    ) -> Classifier:
        """Of features [N, F] and the place of each one's name [N]. What differs within names, and is to be overlooked,
        is known the worse the fewer pictures there are: `shrink` of it is taken to be the same in all directions."""
        seen = seen.double()
        middle = seen.mean(0)
        x = seen - middle
        width = min(width, len(x) - 1, x.shape[1])
        main = torch.linalg.svd(x, full_matrices=False).Vh[:width].T
        x = x @ main
        inner = x - _middles(x, named, len(names))[named]
        spread = inner.T @ inner / len(x)
        even = torch.eye(width, dtype=spread.dtype) * (spread.diagonal().mean() + 1e-12)
        root = torch.linalg.cholesky(torch.linalg.inv(spread + shrink * even))
        made = cls(names=names, features=seen.shape[1], width=width)
        made.middle.copy_(middle)
        made.turn.copy_(main @ root)
        made.means.copy_(F.normalize(_middles(F.normalize(x @ root, dim=1), named, len(names)), dim=1))
        return made.eval()

    @torch.no_grad()
    def says(self, features: Tensor) -> Tensor:
        """[B, F] -> cosines [B, names]."""
        turned = (features.to(self.middle.device) - self.middle) @ self.turn
        return F.normalize(turned, dim=1) @ self.means.T

    @cached_property
    def _places(self) -> dict[str, int]:
        return {plainly(name): place for place, name in enumerate(self.names)}

    def place(self, name: str) -> int | None:
        """Which of the names this is, if it is one."""
        return self._places.get(plainly(name))

    @cached_property
    def common(self) -> list[int]:
        """The places of what is asked for most."""
        return [place for name in COMMON if (place := self.place(name)) is not None]

    def ranks(self, features: Tensor, named: Sequence[str]) -> Tensor:
        """[B] how many names it finds likelier than the one given; among the common names where that is one of them,
        else among all; -1: the name isn't known to it."""
        said = self.says(features).cpu()
        common, found = set(self.common), []
        for row, name in zip(said, named, strict=True):
            place = self.place(name)
            if place is None:
                found.append(-1)
                continue
            others = row[self.common] if place in common else row
            found.append(int((others > row[place]).sum()))
        return torch.tensor(found)


def _middles(x: Tensor, named: Tensor, count: int) -> Tensor:
    """The mean of the rows [N, D] of each name [count, D]."""
    sums = torch.zeros(count, x.shape[1], dtype=x.dtype).index_add_(0, named, x)
    return sums / torch.bincount(named, minlength=count).clamp(min=1)[:, None]


def plainly(name: str) -> str:
    return " ".join(words(name))


def agreement(ranks: Tensor) -> dict[str, float]:
    """The share of pictures whose name stands first, and among the first five."""
    known = ranks[ranks >= 0]
    if not len(known):
        return {}
    return {"top-1": float((known == 0).float().mean()), "top-5": float((known < 5).float().mean())}


def judged(pictures: Pictures) -> np.ndarray:
    """Places of the pictures that a judge is to know: those of common names, and of names that were held out."""
    wanted = {plainly(name) for name in COMMON}
    wanted |= {plainly(pictures.names[place]) for place in pictures.chosen(HELD_NAME)}
    return np.array([place for place, name in enumerate(pictures.names) if plainly(name) in wanted], dtype=np.int64)


def taught(
    pictures: Pictures, codec: Tokenizer, look: TokenStyle, *, width: int = 256, shrink: float = 0.3
) -> tuple[Classifier, dict[str, dict[str, float]]]:
    """A judge of all pictures it is to know; and how often one is right that did not see their style, on real pictures
    and on what the tokenizer makes of them: of the common names, and of all that it knows."""
    places = judged(pictures)
    if len(np.unique(pictures.style[places])) < 2:
        raise InvalidOption("a judge learns from pictures of the same names in two styles at least")
    real = pictures.tensor[torch.from_numpy(places)].float() / 127.5 - 1
    device = codec.codebook.device
    with torch.no_grad():
        back = [codec.decode(codec.encode(part.to(device))).clamp(-1, 1).cpu() for part in torch.split(real, 64)]
    seen = [look(real), look(torch.cat(back))]
    said = [pictures.names[place] for place in places]
    names = tuple(dict.fromkeys(plainly(name) for name in said))
    named = torch.tensor([names.index(plainly(name)) for name in said])
    style = torch.from_numpy(np.asarray(pictures.style)[places])

    def of(rows: Tensor) -> Classifier:
        both = torch.cat([one[rows] for one in seen])
        return Classifier.fitted(names, both, named[rows].repeat(2), width=width, shrink=shrink)

    found: dict[str, list[Tensor]] = {}
    for one in np.unique(style):
        elsewhere = torch.isin(named, named[style != one])
        others, unseen = of(style != one), torch.nonzero((style == one) & elsewhere)[:, 0]
        common = torch.isin(named[unseen], torch.tensor(others.common, dtype=torch.long))
        for which, features in zip(("real pictures", "from codes"), seen, strict=True):
            ranks = others.ranks(features[unseen], [said[row] for row in unseen.tolist()])
            found.setdefault(f"common names, {which}", []).append(ranks[common])
            found.setdefault(f"held-out names, {which}", []).append(ranks[~common])
    return of(torch.ones(len(named), dtype=torch.bool)), {
        one: agreement(torch.cat(all_)) for one, all_ in found.items()
    }
