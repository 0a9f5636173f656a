"""`outrider train image-...`: from nothing to weights. Pictures are fetched and drawn, or a prepared file of them is
taken; the tokenizer learns to bring them back, token models to say them.

The parts are outrider.image.data, outrider.image.recipes and outrider.core.fit; here they are put in order.
"""

from __future__ import annotations

import os
import random
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.errors import InvalidOption
from outrider.core.fit import Fit, Pace, forget
from outrider.core.trained import save
from outrider.image import recipes
from outrider.image.data import HELD_NAME, HELD_PAIR, LEARNED, Pictures, prepared
from outrider.image.names import LENGTH, Names, commonest, words
from outrider.image.recipes import MODEL, Recipe, home, recipe
from outrider.image.tokenizer import Layout, Tokenizer, loss, psnr
from outrider.image.tokens import TokenModel

WORDS = 1500  # that a token model knows at most
GUIDANCE = 3.0  # under which drafters learn
_JUDGED = (48, 512)  # pictures of each kind that judging goes through, on a CPU and elsewhere
_SHIFT = 2  # pixels that a picture is moved by at most
_NOISE = 0.15  # of what a token model reads of the picture is something else, at most
_FREE, _NO_STYLE = 0.1, 0.15  # how often nothing is asked for; no style
_TURNED = frozenset(("left", "right", "clockwise", "anticlockwise", "counterclockwise", "flag", "button", "letter"))


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What `outrider train` was told."""

    recipes: tuple[str, ...]
    device: str = "cpu"
    minutes: float = 30.0  # each
    steps: int | None = None
    out: Path | None = None
    data: Path | None = None  # prepared pictures; None: those in the cache, which are made if need be
    batch: int | None = None  # pictures
    rate: float | None = None
    seed: int = 0
    fresh: bool = False  # forget the checkpoint in the folder
    quiet: bool = False
    options: Mapping[str, Any] | None = None  # of the model, instead of the recipe's

    def __post_init__(self) -> None:
        if not self.recipes:
            raise InvalidOption("there is no recipe to train; `outrider train --list` names them")
        for name in self.recipes:
            recipe(name)
        if self.batch is not None and self.batch < 1:
            raise InvalidOption(f"a batch of {self.batch} pictures teaches nothing; it must be 1 or more")
        if self.out is not None and len(self.recipes) > 1:
            raise InvalidOption("several recipes go to a folder each; leave out= away, or train them one by one")


def train(wanted: Wanted, say: Callable[[str], None] = print) -> list[Path]:
    """Train one recipe after another, and give the files of weights."""
    pictures = prepared(wanted.data, say)
    say(pictures.describe())
    return [_train(recipe(name), pictures, wanted, say) for name in wanted.recipes]


def _train(chosen: Recipe, pictures: Pictures, wanted: Wanted, say: Callable[[str], None]) -> Path:
    rank = os.environ.get("LOCAL_RANK", "0")  # of several processes, each with a GPU of its own
    device = torch.device(f"cuda:{rank}" if wanted.device == "cuda" else wanted.device)
    out = wanted.out or home(chosen.name)
    if wanted.fresh and int(os.environ.get("RANK", "0")) == 0:
        forget(out)
    torch.manual_seed(wanted.seed)
    batch = wanted.batch or chosen.batch[device.type != "cpu"]
    facts: dict[str, Any] = {
        "recipe": chosen.name,
        "command": shlex.join(["outrider", *sys.argv[1:]]),
        "data": pictures.describe(),
        "batch": batch,
        "seed": wanted.seed,
    }
    if chosen.kind is not None:
        return _teach(chosen, pictures, wanted, device, out, batch, facts, say)
    model: nn.Module
    course: CodecCourse | TokensCourse
    if chosen.name == "image-tokenizer":
        codec = Tokenizer(Layout(**{**chosen.options, **(wanted.options or {})}))
        model, course = CodecLearning(codec), CodecCourse(pictures, batch, wanted.seed, device)
        file = out / "diffusion_pytorch_model.safetensors"

        def keep(learned: nn.Module, told: Mapping[str, Any]) -> None:
            assert isinstance(learned, CodecLearning)
            learned.codec.save(out, told)
    else:
        codec = recipes.tokenizer().to(device)
        names = Names(codec.layout.codes, pictures.styles, _words(pictures))
        told_names = {"codes": names.codes, "styles": names.styles, "words": names.words}
        tokens = TokenModel(**told_names, **{**chosen.options, **(wanted.options or {})})  # type: ignore[arg-type]
        model = TokensLearning(tokens)
        course = TokensCourse(pictures, codec, names, batch, wanted.seed, device)
        file = out / f"{chosen.name.removeprefix(recipes.PREFIX)}.safetensors"

        def keep(learned: nn.Module, told: Mapping[str, Any]) -> None:
            assert isinstance(learned, TokensLearning)
            save(learned.tokens, file, {"target": MODEL, **told})

    say(f"{chosen.name}: {sum(one.numel() for one in model.parameters()):,} parameters, batches of {batch} pictures")
    pace = Pace(
        minutes=wanted.minutes,
        steps=wanted.steps,
        rate=wanted.rate or chosen.rate,
        decay=chosen.decay,
        seed=wanted.seed,
        judgements=8 if device.type == "cpu" else 24,
    )
    fit = Fit(
        model.to(device), course, pace, out, keep, device=device, name=chosen.name, facts=facts, quiet=wanted.quiet
    )
    state = fit.run()
    say(f"{chosen.name}: {state.steps:,} steps, best {state.best:.4f}; weights, curve and checkpoint are in {out}")
    return file


def _teach(
    chosen: Recipe,
    pictures: Pictures,
    wanted: Wanted,
    device: torch.device,
    out: Path,
    batch: int,
    facts: dict[str, Any],
    say: Callable[[str], None],
) -> Path:
    """Heads and feature drafters learn from the guided model."""
    from outrider.core.engine.transformer import Decoder
    from outrider.core.trainer import Plan, Trainer
    from outrider.image.teaching import GuidedTeacher, Lessons

    assert chosen.kind is not None
    codec, tokens = recipes.tokenizer().to(device), recipes.tokens()
    network = tokens.network(torch.float32 if device.type == "cpu" else torch.bfloat16, device)
    teacher = GuidedTeacher(network, tokens.names, GUIDANCE)
    course = TokensCourse(pictures, codec, tokens.names, batch, wanted.seed, device)
    lessons = Lessons(teacher, course, _JUDGED[device.type != "cpu"])
    pupil = chosen.kind(Decoder(network), **{**chosen.options, **(wanted.options or {})}).to(device)
    name, length = chosen.name.removeprefix(recipes.PREFIX), 1 + len(lessons.held[0].answer)
    plan = Plan(
        minutes=wanted.minutes,
        steps=wanted.steps,
        tokens=batch * length,
        longest=length,
        rate=wanted.rate or chosen.rate,
        decay=chosen.decay,
        seed=wanted.seed,
    )
    facts = {"target": MODEL, "guidance": GUIDANCE, **facts}
    trainer = Trainer(teacher, {name: pupil}, lessons, lessons.held, plan, out, facts=facts, quiet=wanted.quiet)
    best = trainer.run().best
    say(f"{chosen.name}: {best.get(name, 0.0):.3f} codes a target call (simulated chains on held-out pictures)")
    return out / f"{name}.safetensors"


def _words(pictures: Pictures) -> tuple[str, ...]:
    """Those of what is learned from; of what is held out nothing is known."""
    learned = pictures.chosen(LEARNED)
    return commonest(((pictures.names[place], pictures.keywords[place]) for place in learned), WORDS)


class _Draws:
    """Which pictures make up a batch, and how they are moved: by its number alone."""

    def __init__(self, pictures: Pictures, batch: int, seed: int, device: torch.device) -> None:
        self.pictures, self.size, self.seed, self.device = pictures, batch, seed, device
        self.learned = pictures.chosen(LEARNED)
        if len(self.learned) < 1:
            raise InvalidOption("there are no pictures to learn from")
        self._pixels = pictures.tensor.to(device)
        self._epoch, self._order = -1, self.learned

    def places(self, number: int) -> np.ndarray:
        """[B] each picture once an epoch, in an order of its own."""
        found: list[int] = []
        start = number * self.size
        while len(found) < self.size:
            epoch, at = divmod(start + len(found), len(self.learned))
            if epoch != self._epoch:
                self._epoch = epoch
                self._order = np.random.default_rng([self.seed, epoch]).permutation(self.learned)
            found += self._order[at : at + self.size - len(found)].tolist()
        return np.array(found)

    def read(self, places: np.ndarray) -> Tensor:
        """[B, 3, 64, 64] in [-1, 1]."""
        return self._pixels[torch.from_numpy(places).to(self.device)].float() / 127.5 - 1

    def moved(self, pictures: Tensor, generator: torch.Generator, flip: Tensor) -> Tensor:
        """Each picture moved by a few pixels, on white; mirrored where `flip` [B] says."""
        rows, _, height, width = pictures.shape
        padded = nn.functional.pad(pictures, (_SHIFT,) * 4, value=1.0)
        shifts = torch.randint(0, 2 * _SHIFT + 1, (2, rows, 1), generator=generator).to(self.device)
        y = shifts[0] + torch.arange(height, device=self.device)
        x = torch.arange(width, device=self.device).expand(rows, -1)
        x = shifts[1] + torch.where(flip.to(self.device)[:, None], width - 1 - x, x)
        which = torch.arange(rows, device=self.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[which, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)

    def generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{self.seed}/{number}").getrandbits(63))


class CodecLearning(nn.Module):
    """The tokenizer as something that has a loss."""

    def __init__(self, codec: Tokenizer) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, pictures: Tensor) -> Tensor:
        back, outside = self.codec(pictures)
        return loss(back.float(), pictures, outside.float())


class CodecCourse:
    """Bringing pictures back; colours are exchanged now and then."""

    def __init__(self, pictures: Pictures, batch: int, seed: int, device: torch.device) -> None:
        self.draws = _Draws(pictures, batch, seed, device)
        most = 2 * _JUDGED[device.type != "cpu"]
        held = np.flatnonzero(pictures.split != LEARNED)
        self.held = np.random.default_rng(0).permutation(held)[:most]

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        generator = self.draws.generator(number)
        places = self.draws.places(number)
        flip = torch.rand(len(places), generator=generator) < 0.5
        pictures = self.draws.moved(self.draws.read(places), generator, flip)
        exchanged = torch.rand(len(places), generator=generator).to(pictures.device) < 0.2
        order = torch.randperm(3, generator=generator).to(pictures.device)
        return (torch.where(exchanged[:, None, None, None], pictures[:, order], pictures),)

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, CodecLearning)
        lost, found, codes = [], [], []
        for part in np.array_split(self.held, max(len(self.held) // 64, 1)):
            pictures = self.draws.read(part)
            code = model.codec.encode(pictures)
            back = model.codec.decode(code).float()
            lost.append(loss(back, pictures, torch.zeros((), device=back.device)) * len(part))
            found.append(psnr(back, pictures))
            codes.append(code.flatten())
        decibels, used = torch.cat(found), torch.cat(codes)
        return {
            "held-out loss": float(sum(lost) / len(self.held)),
            "PSNR": float(decibels.mean()),
            "PSNR, 10th percentile": float(decibels.quantile(0.1)),
            "codes used": float(len(torch.unique(used))),
        }


class TokensLearning(nn.Module):
    """A token model as something that has a loss."""

    def __init__(self, tokens: TokenModel) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, ids: Tensor, codes: Tensor) -> Tensor:
        return self.tokens.surprise(ids, codes).mean()


class TokensCourse:
    """Saying pictures by their names and keywords. The tokenizer reads each picture anew, moved a little every time."""

    def __init__(
        self, pictures: Pictures, codec: Tokenizer, names: Names, batch: int, seed: int, device: torch.device
    ) -> None:
        self.draws = _Draws(pictures, batch, seed, device)
        self.codec, self.names = codec.eval().requires_grad_(False), names
        self._said = [
            (self._ids(name), [ids for keyword in keywords if (ids := self._ids(keyword))])
            for name, keywords in zip(pictures.names, pictures.keywords, strict=True)
        ]
        self._turned = torch.tensor([bool(_TURNED & set(words(name))) for name in pictures.names])
        most, order = _JUDGED[device.type != "cpu"], np.random.default_rng(0)
        self.held = {
            name: order.permutation(pictures.chosen(use))[:most]
            for name, use in (("held-out names", HELD_NAME), ("held-out pairs", HELD_PAIR), ("learned", LEARNED))
        }

    def _ids(self, text: str) -> list[int]:
        found = [self.names.known(one) for one in words(text)][:LENGTH]
        return [self.names.other if one is None else one for one in found]

    def asked(self, place: int, draw: random.Random) -> list[int]:
        """What one picture is asked for by: mostly its name, or some keywords, or a few of both; or nothing."""
        if draw.random() < _FREE:
            return self.names.free
        name, keywords = self._said[place]
        kind = draw.random()
        said = list(name)
        if keywords and kind < 0.15:
            said = [one for ids in draw.sample(keywords, min(len(keywords), draw.randint(1, 3))) for one in ids]
        elif keywords and kind < 0.3:
            said += draw.choice(keywords)
        elif kind < 0.4:
            draw.shuffle(said)
        style = None if draw.random() < _NO_STYLE else self.names.styles[self.draws.pictures.style[place]]
        said = said[:LENGTH]
        return [self.names.style(style), *said, *[self.names.nothing] * (LENGTH - len(said))]

    @torch.no_grad()
    def encode(self, pictures: Tensor) -> Tensor:
        """[B, 3, 64, 64] -> codes [B, N]."""
        with torch.autocast(pictures.device.type, enabled=False):
            return self.codec.encode(pictures).flatten(1)

    def rows(self, asked: Sequence[Sequence[int]], read: Tensor) -> Tensor:
        """Conditions and the codes that are read -> ids: what was asked for, the root, all codes but the last."""
        before = torch.tensor([list(one) for one in asked], device=read.device)
        root = torch.full_like(read[:, :1], self.codec.white)
        return torch.cat([before, root, read[:, :-1]], 1)

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        generator, draw = self.draws.generator(number), random.Random(f"{self.draws.seed}/asked/{number}")
        places = self.draws.places(number)
        flip = (torch.rand(len(places), generator=generator) < 0.25) & ~self._turned[torch.from_numpy(places)]
        codes = self.encode(self.draws.moved(self.draws.read(places), generator, flip))
        wrong = torch.rand(codes.shape, generator=generator) < _NOISE * torch.rand(len(codes), 1, generator=generator)
        order = torch.randperm(codes.numel(), generator=generator).to(codes.device)
        others = codes.flatten()[order].view_as(codes)
        read = torch.where(wrong.to(codes.device), others, codes)
        return self.rows([self.asked(int(place), draw) for place in places], read), codes

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, TokensLearning)
        found: dict[str, float] = {}
        ink = 0.0
        for name, places in self.held.items():
            if not len(places):
                continue
            each, codes = [], []
            for part in np.array_split(places, max(len(places) // 32, 1)):
                code = self.encode(self.draws.read(part))
                asked = [
                    self.names.encode(self.draws.pictures.names[one], self.names.styles[self.draws.pictures.style[one]])
                    for one in part
                ]
                each.append(model.tokens.surprise(self.rows(asked, code), code).float())
                codes.append(code)
            surprise, said = torch.cat(each), torch.cat(codes)
            found[f"NLL, {name}"] = float(surprise.mean())
            if name == "held-out names":
                ink = float(surprise[said != self.codec.white].mean().exp())
        if not found:
            return {"NLL": float("inf")}
        best = [value for name, value in found.items() if "held-out" in name] or list(found.values())
        return {"NLL": sum(best) / len(best), **found, "perplexity of ink": ink}
