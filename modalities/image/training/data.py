"""Emoji and pictograms with names and keywords, from four open sets: fetched, drawn at 64x64 on white, split and kept
as one file.

Pictures of the same thing have the same name in every set, so that a name can be held out in all of them. Skin tones
are left out. Knows nothing of tokens or models.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.assets import npz
from outrider.core.assets.npz import NpzError
from outrider.core.assets.store import fetch
from outrider.core.errors import OutriderError
from outrider.core.paths import cache_folder
from outrider.image.prompt_encoder import COMMON, words

SIZE = 64
LEARNED, HELD_NAME, HELD_PAIR = 0, 1, 2  # how a picture is used
_HELD = 16  # one name in so many is held out, and one (style, name) pair
_SEED = "outrider"


class DataError(OutriderError):
    """Pictures that can't be had or read."""


@dataclass(frozen=True)
class Drawn:
    """A picture as a set has it."""

    name: str
    keywords: tuple[str, ...]
    pixels: np.ndarray  # [64, 64, 3] uint8, on white


@dataclass(frozen=True)
class Pictures:
    """A prepared set of pictures."""

    pixels: np.ndarray  # [N, 64, 64, 3] uint8
    styles: tuple[str, ...]
    style: np.ndarray  # [N] places in `styles`
    names: tuple[str, ...]  # of each picture
    keywords: tuple[tuple[str, ...], ...]
    split: np.ndarray  # [N] LEARNED, HELD_NAME or HELD_PAIR

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def tensor(self) -> Tensor:
        """[N, 3, 64, 64] uint8."""
        return torch.from_numpy(np.ascontiguousarray(self.pixels.transpose(0, 3, 1, 2)))

    def chosen(self, split: int) -> np.ndarray:
        """Places of the pictures of one use."""
        return np.flatnonzero(self.split == split)

    def describe(self) -> str:
        counts = [f"{style} {int((self.style == place).sum()):,}" for place, style in enumerate(self.styles)]
        held = int((self.split == HELD_NAME).sum()), int((self.split == HELD_PAIR).sum())
        return (
            f"{len(self):,} pictures ({', '.join(counts)}); held out {held[0]:,} by name, {held[1]:,} by style and name"
        )

    def save(self, path: Path) -> None:
        """One compressed file of plain arrays, whole or not at all."""
        about = {"styles": self.styles, "names": self.names, "keywords": self.keywords}
        style, split = self.style.astype(np.uint8), self.split.astype(np.uint8)
        npz.save(path, about, pixels=self.pixels, style=style, split=split)

    @classmethod
    def load(cls, path: Path) -> Pictures:
        try:
            about, held = npz.load(path, ("pixels", "style", "split"))
            found = cls(
                held["pixels"],
                tuple(map(str, about["styles"])),
                held["style"].astype(np.int64),
                tuple(map(str, about["names"])),
                tuple(tuple(map(str, one)) for one in about["keywords"]),
                held["split"].astype(np.int64),
            )
        except (NpzError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is no prepared set of pictures: {str(error)[:200]}") from None
        if found.pixels.ndim != 4 or found.pixels.shape[1:] != (SIZE, SIZE, 3):
            raise DataError(f"{path} holds pictures of shape {found.pixels.shape[1:]}; expected ({SIZE}, {SIZE}, 3)")
        if not len(found.pixels) == len(found.style) == len(found.names) == len(found.keywords) == len(found.split):
            raise DataError(f"{path} holds {len(found.pixels)} pictures and {len(found.names)} names")
        return found


def prepared(path: Path | None = None, say: Callable[[str], None] = print) -> Pictures:
    """The pictures: of the file given, or of the one in the cache, which is made the first time."""
    path = path or cache_folder() / "pictures" / f"emoji-{SIZE}.npz"
    if not path.is_file():
        say("fetching and drawing four sets of emoji, once")
        found = gathered(say)
        found.save(path)
    return Pictures.load(path)


def gathered(say: Callable[[str], None] = print) -> Pictures:
    """All sets, drawn anew."""
    sets: dict[str, list[Drawn]] = {}
    known = _Known()
    for style, draw in SETS.items():
        sets[style] = _deduplicated(draw(known))
        say(f"{style}: {len(sets[style]):,} pictures")
    return split(sets)


def split(sets: Mapping[str, Sequence[Drawn]]) -> Pictures:
    """Sets by style -> pictures, with what is held out chosen by what they are called."""
    styles, rows = tuple(sets), [(place, one) for place, drawn in enumerate(sets.values()) for one in drawn]
    counts = Counter(one.name for _, one in rows)
    often = {name for name, count in counts.items() if count > 1}
    uses = []
    for place, one in rows:
        use = LEARNED
        if one.name not in COMMON and _chosen(one.name):
            use = HELD_NAME
        elif one.name in often and _chosen(f"{styles[place]}: {one.name}"):
            use = HELD_PAIR
        uses.append(use)
    return Pictures(
        np.stack([one.pixels for _, one in rows]),
        styles,
        np.array([place for place, _ in rows]),
        tuple(one.name for _, one in rows),
        tuple(one.keywords for _, one in rows),
        np.array(uses),
    )


def _chosen(text: str) -> bool:
    """One in so many, always the same ones."""
    return hashlib.sha256(f"{_SEED}/{text}".encode()).digest()[0] % _HELD == 0


def _deduplicated(drawn: Iterator[Drawn]) -> list[Drawn]:
    """Each picture once: of those that look alike the first, which takes over what the others were called."""
    found: dict[bytes, Drawn] = {}
    named: set[str] = set()
    for one in drawn:
        key = hashlib.sha256(one.pixels.tobytes()).digest()
        if key in found:
            old = found[key]
            found[key] = Drawn(old.name, tuple(dict.fromkeys([*old.keywords, one.name, *one.keywords])), old.pixels)
        elif one.name not in named:
            found[key] = one
            named.add(one.name)
    return list(found.values())


# ---- pictures


def on_white(data: bytes, size: int = SIZE) -> np.ndarray:
    """A PNG of any size, its transparent parts white -> [size, size, 3] uint8."""
    from PIL import Image

    with Image.open(io.BytesIO(data)) as opened:
        picture = opened.convert("RGBA")
    if max(picture.size) != size or picture.width != picture.height:
        scale = size / max(picture.size)
        around = Image.new("RGBA", (size, size), (255, 255, 255, 0))
        small = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
        around.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
        picture = around
    flat = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    flat.alpha_composite(picture)
    return np.asarray(flat.convert("RGB"))


def _rasterised(svg: bytes) -> bytes:
    """A drawing as a PNG."""
    try:
        from resvg import render, usvg
    except ImportError:
        raise DataError("drawing the pictures needs resvg: pip install 'outrider[train]'") from None
    head, mark, rest = svg.decode("utf-8").partition("<svg")
    attributes, end, body = rest.partition(">")
    attributes = re.sub(r'\s(width|height)="[^"]*"', "", attributes) + f' width="{SIZE}" height="{SIZE}"'
    tree = usvg.Tree.from_str("".join((head, mark, attributes, end, body)), usvg.Options.default())
    return bytes(render(tree, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))


@contextmanager
def _archive(asset: str) -> Iterator[dict[str, Callable[[], bytes]]]:
    """The files of a fetched package by their paths, each read when it is asked for."""
    (path,) = fetch(asset).glob("*.tgz")
    with tarfile.open(path) as opened:
        files = {one.name.partition("/")[2]: one for one in opened.getmembers() if one.isfile()}

        def reader(member: tarfile.TarInfo) -> Callable[[], bytes]:
            def read() -> bytes:
                file: IO[bytes] | None = opened.extractfile(member)
                if file is None:
                    raise DataError(f"{path.name} has no file {member.name}")
                return file.read()

            return read

        yield {name: reader(member) for name, member in files.items()}


# ---- what things are called


def _key(code: str) -> str:
    """Hexadecimal code points, in capitals, without what only chooses how a character is shown."""
    return "-".join(one.upper() for one in code.split("-") if one.upper() not in ("FE0F", "200D"))


def _plain(name: str) -> str:
    """A name in small letters."""
    found = unicodedata.normalize("NFKC", name).lower().replace("’", "'").replace("_", " ").replace("-", " ")
    return re.sub(r"\s+", " ", re.sub(r"[“”\"(),:!.⊛]", " ", found)).strip()


class _Known:
    """Names and keywords by character, and keywords by name: those of OpenMoji, whose names are Unicode's own, and
    those of emojilib."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.words: dict[str, list[str]] = {}
        with _archive("openmoji") as files:
            self.listed: list[dict[str, Any]] = json.loads(files["data/openmoji.json"]())
        with _archive("emojilib") as files:
            more = json.loads(files["dist/emoji-en-US.json"]())
        for one in self.listed:
            key = _key(one["hexcode"])
            tags = [tag for field in ("tags", "openmoji_tags") for tag in str(one.get(field) or "").split(",")]
            self.names[key] = _plain(one["annotation"])
            self.words[key] = [_plain(tag) for tag in tags if tag.strip()]
        for character, keywords in more.items():
            key = _key("-".join(f"{ord(one):X}" for one in character))
            self.words[key] = [*self.words.get(key, []), *map(_plain, keywords)]
        self.by_name = {name: key for key, name in self.names.items()}
        self._loose: dict[str, str] = {}

    def said(self, name: str) -> str:
        """A name as Unicode has it, where it only lacks marks or small words."""
        if not self._loose:
            self._loose = {"".join(words(one)): one for one in self.by_name}
        return self._loose.get("".join(words(name)), name)

    def of(self, name: str, key: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(one for one in self.words.get(key, []) if one and one != name))


# ---- the sets

_TONE = re.compile(r"-(default|light|medium-light|medium|medium-dark|dark)$")


def _sheet(asset: str, folder: str) -> Callable[[_Known], Iterator[Drawn]]:
    """A set of emoji-datasource: single pictures, and a list of them."""

    def draw(known: _Known) -> Iterator[Drawn]:
        with _archive(asset) as files:
            for one in json.loads(files["emoji.json"]()):
                path, key = f"img/{folder}/64/{one['image']}", _key(one["unified"])
                if path in files and one.get(f"has_img_{folder}", True) and "1F3F" not in one["unified"]:
                    name = known.names.get(key) or _plain(one["name"] or one["short_name"])
                    yield Drawn(name, known.of(name, key), on_white(files[path]()))

    return draw


def _openmoji(known: _Known) -> Iterator[Drawn]:
    with _archive("openmoji") as files:
        for one in known.listed:
            path = f"color/svg/{one['hexcode']}.svg"
            if path in files and not one.get("skintone"):
                key = _key(one["hexcode"])
                name = known.names[key]
                yield Drawn(name, known.of(name, key), on_white(_rasterised(files[path]())))


def _fluent(known: _Known) -> Iterator[Drawn]:
    with _archive("fluent-emoji") as files:
        paths = {one.removeprefix("icons/flat/").removesuffix(".svg"): one for one in files if "/flat/" in one}
        for stem, path in sorted(paths.items()):
            base = _TONE.sub("", stem)
            if base != stem and f"{base}-default" in paths and not stem.endswith("-default"):
                continue
            name = known.said(_plain(base if stem.endswith("-default") else stem))
            key = known.by_name.get(name, "")
            yield Drawn(name, known.of(name, key), on_white(_rasterised(files[path]())))


SETS: Mapping[str, Callable[[_Known], Iterator[Drawn]]] = {
    "noto": _sheet("noto-emoji", "google"),
    "twemoji": _sheet("twemoji", "twitter"),
    "openmoji": _openmoji,
    "fluent": _fluent,
}
