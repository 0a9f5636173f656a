"""What a picture shows: a small convolutional judge of whether it is what was asked for.

It tells the names of the pictures that were learned from; how often it is right on pictures that were held out is the
measure of the judge itself. Trained by `outrider train image-classifier`, on real pictures and on what the tokenizer
makes of them, since that is what it will see. Knows pixels and names, nothing of codes.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from outrider.core.train import Pupil
from outrider.image.courses import JUDGED, Draws, turned
from outrider.image.data import HELD_PAIR, Pictures
from outrider.image.names import COMMON, words
from outrider.image.tokenizer import Tokenizer

_SMOOTH = 0.1  # of a label is shared among all names
_GROUPS = 8


class _Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(_GROUPS, before), nn.Conv2d(before, after, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(_GROUPS, after), nn.Conv2d(after, after, 3, padding=1)
        self.skip = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return cast(Tensor, inner + self.skip(x))


class Classifier(Pupil):
    """Pictures [B, 3, 64, 64] in [-1, 1] -> logits over `names`. `target` is not looked at."""

    def __init__(
        self, target: Any = None, *, names: Sequence[str], widths: Sequence[int] = (32, 64, 128, 192), drop: float = 0.2
    ) -> None:
        super().__init__()
        self.names = tuple(names)
        self.config = {"names": list(names), "widths": list(widths), "drop": drop}
        self.first = nn.Conv2d(3, widths[0], 4, stride=2, padding=1)
        before = (widths[0], *widths)
        self.blocks = nn.ModuleList(_Residual(before[n], width) for n, width in enumerate(widths))
        self.norm = nn.GroupNorm(_GROUPS, widths[-1])
        self.drop = nn.Dropout(drop)
        self.last = nn.Linear(widths[-1], len(names))

    def says(self, pictures: Tensor) -> Tensor:
        """[B, 3, 64, 64] -> logits [B, names]."""
        x = self.first(pictures)
        for n, block in enumerate(self.blocks):
            x = block(F.avg_pool2d(x, 2) if n else x)
        return cast(Tensor, self.last(self.drop(F.silu(self.norm(x)).mean((2, 3)))))

    @cached_property
    def _places(self) -> dict[str, int]:
        return {" ".join(words(name)): place for place, name in enumerate(self.names)}

    def place(self, name: str) -> int | None:
        """Which of the names this is, if it is one."""
        return self._places.get(" ".join(words(name)))

    @cached_property
    def common(self) -> list[int]:
        """The places of what is asked for most."""
        return [place for name in COMMON if (place := self.place(name)) is not None]

    @torch.no_grad()
    def ranks(self, pictures: Tensor, named: Sequence[str]) -> Tensor:
        """[B] how many names it finds likelier than the one given; among the common names where that is one of them,
        else among all; -1: the name isn't known to it."""
        said = torch.cat([self.says(part).float() for part in torch.split(pictures, 64)]).cpu()
        common, found = set(self.common), []
        for row, name in zip(said, named, strict=True):
            place = self.place(name)
            if place is None:
                found.append(-1)
                continue
            others = row[self.common] if place in common else row
            found.append(int((others > row[place]).sum()))
        return torch.tensor(found)


def agreement(ranks: Tensor) -> dict[str, float]:
    """The share of pictures whose name stands first, and among the first five."""
    known = ranks[ranks >= 0]
    if not len(known):
        return {}
    return {"top-1": float((known == 0).float().mean()), "top-5": float((known < 5).float().mean())}


class Naming(nn.Module):
    """The classifier as something that has a loss."""

    def __init__(self, classifier: Classifier) -> None:
        super().__init__()
        self.classifier = classifier

    def forward(self, pictures: Tensor, named: Tensor) -> Tensor:
        return F.cross_entropy(self.classifier.says(pictures).float(), named, label_smoothing=_SMOOTH)


class NamingCourse:
    """Saying what pictures show. Held out are pictures whose names are learned in other styles."""

    def __init__(self, pictures: Pictures, codec: Tokenizer, batch: int, seed: int, device: torch.device) -> None:
        self.draws, self.codec = Draws(pictures, batch, seed, device), codec.eval().requires_grad_(False)
        self.names = tuple(dict.fromkeys(pictures.names[place] for place in self.draws.learned))
        place = {name: n for n, name in enumerate(self.names)}
        self._back = torch.zeros_like(pictures.tensor, device=device)  # filled as pictures are first brought back
        self._known = torch.zeros(len(pictures.names), dtype=torch.bool)
        self._named = torch.tensor([place.get(name, -1) for name in pictures.names], device=device)
        self._turned = torch.tensor([turned(name) for name in pictures.names])
        held = np.array([one for one in pictures.chosen(HELD_PAIR) if pictures.names[one] in place], dtype=np.int64)
        order = np.random.default_rng(0).permutation(held)
        common = {" ".join(words(one)) for one in COMMON}
        first = [one for one in order if " ".join(words(pictures.names[one])) in common]
        others = [one for one in order if " ".join(words(pictures.names[one])) not in common]
        self.held = np.array([*first, *others], dtype=np.int64)[: 8 * JUDGED[device.type != "cpu"]]

    @torch.no_grad()
    def _brought_back(self, places: np.ndarray) -> Tensor:
        """[B, 3, 64, 64] what the tokenizer makes of pictures; each is asked of it once."""
        new = places[~self._known[places].numpy()]
        for part in np.array_split(new, -(-len(new) // 64)) if len(new) else ():
            with torch.autocast(self._back.device.type, enabled=False):
                back = self.codec.decode(self.codec.encode(self.draws.read(part))).clamp(-1, 1)
            self._back[torch.from_numpy(part).to(back.device)] = ((back + 1) * 127.5).round().to(torch.uint8)
            self._known[part] = True
        return self._back[torch.from_numpy(places).to(self._back.device)].float() / 127.5 - 1

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        generator, places = self.draws.generator(number), self.draws.places(number)
        flip = (torch.rand(len(places), generator=generator) < 0.5) & ~self._turned[torch.from_numpy(places)]
        half = len(places) // 2
        pictures = torch.cat([self.draws.read(places[:half]), self._brought_back(places[half:])])
        pictures = self.draws.moved(pictures, generator, flip)
        bright = 1 + 0.2 * (torch.rand(len(places), 3, 1, 1, generator=generator) - 0.5).to(pictures.device)
        inked = 1 - (1 - pictures) * bright  # colours a little stronger or weaker; white stays white
        return inked.clamp(-1, 1), self._named[torch.from_numpy(places).to(pictures.device)]

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, Naming)
        if not len(self.held):
            return {"held-out loss": float("inf")}
        pictures, named = self.draws.read(self.held), [self.draws.pictures.names[one] for one in self.held]
        said = torch.cat([model.classifier.says(part).float() for part in torch.split(pictures, 64)])
        wanted = self._named[torch.from_numpy(self.held).to(said.device)]
        back = self._brought_back(self.held)
        places = (said > said.gather(1, wanted[:, None])).sum(1).cpu()
        ranks, worse = model.classifier.ranks(pictures, named), model.classifier.ranks(back, named)
        common = torch.tensor([model.classifier.place(one) in set(model.classifier.common) for one in named])
        found = {"held-out loss": float(F.cross_entropy(said, wanted))}
        for about, some in (
            ("all names", places),
            ("common names", ranks[common]),
            ("common names, from codes", worse[common]),
        ):
            found |= {f"{name}, {about}": value for name, value in agreement(some).items()}
        return found | {"pictures": float(len(self.held)), "of common names": float(common.sum())}
