"""What the parts of the image model learn from: batches by number, and measures on what is held out.

Tasks of outrider.core.training.model_training: to reconstruct pictures, to model their codes given names, and to model
them as a larger model does. Knows nothing of recipes or files.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor, nn

from outrider.core.decode import decode
from outrider.core.engine.adapters.guidance import Guided
from outrider.core.engine.network import Network
from outrider.core.errors import InvalidOption
from outrider.core.rules.exact import Exact
from outrider.image.layout_planner import LayoutPlanner, decoder
from outrider.image.prompt_encoder import LENGTH, PromptEncoder, words
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Tokenizer, psnr, reconstruction_loss
from outrider.image.training.data import HELD_NAME, HELD_PAIR, LEARNED, SIZE, Pictures

JUDGED = (48, 512)  # pictures of each kind that judging goes through, on a CPU and elsewhere
_SHIFT = 2  # pixels that a picture is moved by at most
_MOVED = 0.25  # of the pictures that a token model learns are moved: it should know them best where they stand
_NOISE = 0.05  # of what a token model reads of the picture is something else, at most
_FREE, _NO_STYLE = 0.1, 0.15  # how often nothing is asked for; no style
_AGAIN = 32  # batches of pictures that the large model drew, before it draws others


class Draws:
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

    def moved(self, pictures: Tensor, generator: torch.Generator, flip: Tensor, share: float = 1.0) -> Tensor:
        """A share of the pictures moved by a few pixels, on white; mirrored where `flip` [B] says."""
        rows, _, height, width = pictures.shape
        padded = nn.functional.pad(pictures, (_SHIFT,) * 4, value=1.0)
        shifts = torch.randint(0, 2 * _SHIFT + 1, (2, rows, 1), generator=generator)
        shifts = torch.where(torch.rand(rows, 1, generator=generator) < share, shifts, _SHIFT).to(self.device)
        y = shifts[0] + torch.arange(height, device=self.device)
        x = torch.arange(width, device=self.device).expand(rows, -1)
        x = shifts[1] + torch.where(flip.to(self.device)[:, None], width - 1 - x, x)
        which = torch.arange(rows, device=self.device)[:, None, None]
        return padded.permute(0, 2, 3, 1)[which, y[:, :, None], x[:, None, :]].permute(0, 3, 1, 2)

    def generator(self, number: int) -> torch.Generator:
        return torch.Generator().manual_seed(random.Random(f"{self.seed}/{number}").getrandbits(63))


class CodecObjective(nn.Module):
    """The tokenizer as something that has a loss."""

    def __init__(self, codec: Tokenizer) -> None:
        super().__init__()
        self.codec = codec

    def forward(self, pictures: Tensor) -> Tensor:
        back, outside = self.codec(pictures)
        return reconstruction_loss(back.float(), pictures, outside.float())


class CodecTask:
    """Bringing pictures back; colours are exchanged now and then."""

    def __init__(self, pictures: Pictures, batch: int, seed: int, device: torch.device) -> None:
        self.draws = Draws(pictures, batch, seed, device)
        most = 2 * JUDGED[device.type != "cpu"]
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
        assert isinstance(model, CodecObjective)
        lost, found, codes = [], [], []
        for part in np.array_split(self.held, max(len(self.held) // 64, 1)):
            pictures = self.draws.read(part)
            code = model.codec.encode(pictures)
            back = model.codec.decode(code).float()
            lost.append(reconstruction_loss(back, pictures, torch.zeros((), device=back.device)) * len(part))
            found.append(psnr(back, pictures))
            codes.append(code.flatten())
        decibels, used = torch.cat(found), torch.cat(codes)
        return {
            "held-out loss": float(sum(lost) / len(self.held)),
            "PSNR": float(decibels.mean()),
            "PSNR, 10th percentile": float(decibels.quantile(0.1)),
            "codes used": float(len(torch.unique(used))),
        }


class PlanObjective(nn.Module):
    """A plan as something that has a loss."""

    def __init__(self, plan: LayoutPlanner) -> None:
        super().__init__()
        self.plan = plan

    def forward(self, asked: Tensor, codes: Tensor) -> Tensor:
        return self.plan.nll(asked, codes).mean()


class TokensObjective(nn.Module):
    """A token model as something that has a loss."""

    def __init__(self, tokens: TokenModel) -> None:
        super().__init__()
        self.tokens = tokens

    def forward(self, ids: Tensor, codes: Tensor) -> Tensor:
        return self.tokens.nll(ids, codes).mean()


class TokensTask:
    """Saying pictures by their names and keywords. The tokenizer reads each picture anew, moved a little every time."""

    def __init__(
        self, pictures: Pictures, codec: Tokenizer, names: PromptEncoder, batch: int, seed: int, device: torch.device
    ) -> None:
        self.draws = Draws(pictures, batch, seed, device)
        self.codec, self.names = codec.eval().requires_grad_(False), names
        self._said = [
            (self._ids(name), [ids for keyword in keywords if (ids := self._ids(keyword))])
            for name, keywords in zip(pictures.names, pictures.keywords, strict=True)
        ]
        most, order = JUDGED[device.type != "cpu"], np.random.default_rng(0)
        self.held = {
            name: order.permutation(pictures.chosen(use))[:most]
            for name, use in (("held-out names", HELD_NAME), ("held-out pairs", HELD_PAIR), ("learned", LEARNED))
        }

    def _ids(self, text: str) -> list[int]:
        found = [self.names.word_id(one) for one in words(text)][:LENGTH]
        return [self.names.unknown if one is None else one for one in found]

    def asked(self, place: int, draw: random.Random) -> list[int]:
        """What one picture is asked for by: mostly its name, or some keywords, or a few of both; or nothing."""
        if draw.random() < _FREE:
            return self.names.unconditional
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
        return [self.names.style_id(style), *said, *[self.names.empty] * (LENGTH - len(said))]

    def named(self, place: int) -> list[int]:
        """The same by its style and its whole name, as judging asks for it."""
        pictures = self.draws.pictures
        return self.names.encode(pictures.names[place], pictures.styles[pictures.style[place]])

    @property
    def length(self) -> int:
        """Codes of a picture."""
        side: int = SIZE // self.codec.factor
        return side * side

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
        flip = torch.zeros(len(places), dtype=torch.bool)  # plans don't know of mirrors
        codes = self.encode(self.draws.moved(self.draws.read(places), generator, flip, _MOVED))
        wrong = torch.rand(codes.shape, generator=generator) < _NOISE * torch.rand(len(codes), 1, generator=generator)
        order = torch.randperm(codes.numel(), generator=generator).to(codes.device)
        others = codes.flatten()[order].view_as(codes)
        read = torch.where(wrong.to(codes.device), others, codes)
        return self.rows([self.asked(int(place), draw) for place in places], read), codes

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, TokensObjective)
        found: dict[str, float] = {}
        ink = 0.0
        for name, places in self.held.items():
            if not len(places):
                continue
            each, codes = [], []
            for part in np.array_split(places, max(len(places) // 32, 1)):
                code = self.encode(self.draws.read(part))
                asked = [self.named(int(one)) for one in part]
                each.append(model.tokens.nll(self.rows(asked, code), code).float())
                codes.append(code)
            surprise, said = torch.cat(each), torch.cat(codes)
            found[f"NLL, {name}"] = float(surprise.mean())
            if name == "held-out names":
                ink = float(surprise[said != self.codec.white].mean().exp())
        if not found:
            return {"NLL": float("inf")}
        best = [value for name, value in found.items() if "held-out" in name] or list(found.values())
        return {"NLL": sum(best) / len(best), **found, "perplexity of ink": ink}


class PlanTask:
    """Foreseeing pictures from their names and keywords alone, as they stand: each is read once."""

    def __init__(self, course: TokensTask) -> None:
        self.course = course
        every = torch.arange(len(course.draws.pictures))
        self._codes = torch.cat([course.encode(course.draws.read(part.numpy())) for part in torch.split(every, 64)])

    def _given(self, places: np.ndarray, asked: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        codes = self._codes[torch.from_numpy(places).to(self._codes.device)]
        return torch.tensor([list(one) for one in asked], device=codes.device), codes

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        draw = random.Random(f"{self.course.draws.seed}/asked/{number}")
        places = self.course.draws.places(number)
        return self._given(places, [self.course.asked(int(place), draw) for place in places])

    def judge(self, model: nn.Module) -> dict[str, float]:
        assert isinstance(model, PlanObjective)
        found: dict[str, float] = {}
        for name, places in self.course.held.items():
            if len(places):
                asked, codes = self._given(places, [self.course.named(int(one)) for one in places])
                found[f"NLL, {name}"] = float(model.plan.nll(asked, codes).mean())
        return {"NLL": found.get("NLL, learned", float("inf")), **found}  # what it is to know by heart


class ImitationObjective(nn.Module):
    """A small token model beside the large one that it is to draft for, both under the same guidance: what it loses is
    the KL divergence of the guided distributions, and what counts is how often its draws would be accepted."""

    def __init__(self, tokens: TokenModel, teacher: TokenModel) -> None:
        super().__init__()
        self.tokens = tokens
        self._teacher = [teacher.eval().requires_grad_(False)]  # in a list: no part of this module

    def forward(self, asked: Tensor, free: Tensor, guidance: Tensor) -> Tensor:
        wanted, said = self.distributions(asked, free, guidance)
        return (wanted.exp() * (wanted - said)).sum(-1).mean()

    def distributions(self, asked: Tensor, free: Tensor, guidance: Tensor) -> tuple[Tensor, Tensor]:
        """The logarithms of the guided distributions of teacher and draft head at every code: rows [B, P + N] twice,
        with what was asked for and without, and a strength [B] each -> [B, N, codes]."""
        both = torch.cat([asked, free])
        with torch.no_grad():
            wanted = self._guided(self._teacher[0], both, guidance)
        return wanted, self._guided(self.tokens, both, guidance)

    def _guided(self, model: TokenModel, both: Tensor, guidance: Tensor) -> Tensor:
        codes = model.states(both)[:, self.tokens.prompt_encoder.length :]
        asked, free = model.logits(codes).float().chunk(2)
        return (free + guidance[:, None, None] * (asked - free)).log_softmax(-1)


class ImitationTask:
    """What the large model says of pictures: every other batch of those that it draws itself, as drafts will meet
    them, the others of real ones. The guidance is another one for every row, so that drafts fit whatever is set."""

    def __init__(self, course: TokensTask, network: Network, guidance: float) -> None:
        self.course, self.network, self.guidance = course, network, guidance
        self._drawn: tuple[int, Tensor] | None = None

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        course = self.course
        ids = self._own(number // 2 // _AGAIN) if number % 2 else course.batch(number, share)[0]
        free = torch.tensor(course.names.unconditional, device=ids.device).expand(len(ids), -1)
        strong = course.draws.generator(number)
        guidance = 1 + (2 * self.guidance - 2) * torch.rand(len(ids), generator=strong).to(ids.device)
        return ids, torch.cat([free, ids[:, course.names.length :]], 1), guidance

    @torch.no_grad()
    def _own(self, number: int) -> Tensor:
        """Pictures that the large model drew, the same for some batches."""
        if self._drawn is None or self._drawn[0] != number:
            course = self.course
            draw = random.Random(f"{course.draws.seed}/drawn/{number}")
            asked = [course.asked(int(place), draw) for place in course.draws.places(number)]
            target = Guided(decoder(self.network), asked, course.names.unconditional, self.guidance)
            rows: list[list[int]] = [[] for _ in asked]
            roots = [[course.codec.white]] * len(asked)
            seed = random.Random(f"{course.draws.seed}/codes/{number}").getrandbits(60)
            for step in decode(target, None, Exact(), roots, max_new_tokens=course.length, seed=seed):
                rows[step.row] += step.emitted
            codes = torch.tensor(rows, device=course.draws.device)
            self._drawn = number, course.rows(asked, codes)
        return self._drawn[1]

    def judge(self, model: nn.Module) -> dict[str, float]:
        """How often a draw of the draft head's would be refused, on held-out pictures, under the usual guidance."""
        assert isinstance(model, ImitationObjective)
        course, refused, lost, ink = self.course, [], [], []
        places = np.concatenate([course.held["held-out pairs"], course.held["held-out names"]])
        for part in np.array_split(places, max(len(places) // 16, 1)):
            code = course.encode(course.draws.read(part))
            ids = course.rows([course.named(int(one)) for one in part], code)
            free = torch.tensor(course.names.unconditional, device=ids.device).expand(len(ids), -1)
            rows = torch.cat([free, ids[:, course.names.length :]], 1)
            wanted, said = model.distributions(ids, rows, torch.full((len(ids),), self.guidance, device=ids.device))
            refused.append((wanted.exp() - said.exp()).abs().sum(-1) / 2)
            lost.append((wanted.exp() * (wanted - said)).sum(-1))
            ink.append(code != course.codec.white)
        far, drawn = torch.cat(refused), torch.cat(ink)
        return {
            "refused": float(far.mean()),
            "refused on ink": float(far[drawn].mean()) if bool(drawn.any()) else 0.0,
            "KL": float(torch.cat(lost).mean()),
        }
