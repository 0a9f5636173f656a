"""The image training set: emoji with names and keywords from four open sets, rendered at 64x64 on white.

Names are made equal across the sets, so that a name can be held out of all of them. Variants that differ in skin tone
only are left out. Independent of tokens and models.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from torch import Tensor

from outrider.core.assets import npz
from outrider.core.assets.npz import NpzError
from outrider.core.assets.store import fetch
from outrider.core.errors import OutriderError, install_command
from outrider.core.paths import cache_folder
from outrider.image.prompt_encoder import COMMON, words

SIZE = 64  # pixels
_MAX_SIDE = 4096  # pixels of an image that is read
TRAIN, HELD_NAME, HELD_PAIR = 0, 1, 2  # splits: held out in all styles by name, or by (style, name) pair
_HELD_OUT_EVERY = 16  # one name in 16 is held out, then one (style, name) pair in 16
_SEED = "outrider"


class DataError(OutriderError):
    """The training set cannot be rendered or read."""


@dataclass(frozen=True)
class Picture:
    """One image of a set."""

    name: str
    keywords: tuple[str, ...]
    pixels: np.ndarray  # [64, 64, 3] uint8, on white


@dataclass(frozen=True)
class Pictures:
    """All images of the training set with their splits."""

    pixels: np.ndarray  # [N, 64, 64, 3] uint8
    styles: tuple[str, ...]
    style: np.ndarray  # [N] indices into `styles`
    names: tuple[str, ...]  # one per image
    keywords: tuple[tuple[str, ...], ...]  # one tuple per image
    split: np.ndarray  # [N] TRAIN, HELD_NAME or HELD_PAIR

    def __len__(self) -> int:
        return len(self.names)

    @cached_property
    def tensor(self) -> Tensor:
        """[N, 3, 64, 64] uint8."""
        return torch.from_numpy(np.ascontiguousarray(self.pixels.transpose(0, 3, 1, 2)))

    def indices(self, split: int) -> np.ndarray:
        """The indices of the images of one split."""
        return np.flatnonzero(self.split == split)

    def describe(self) -> str:
        counts = [f"{style} {int((self.style == index).sum()):,}" for index, style in enumerate(self.styles)]
        names, pairs = int((self.split == HELD_NAME).sum()), int((self.split == HELD_PAIR).sum())
        return f"{len(self):,} images ({', '.join(counts)}); held out {names:,} by name, {pairs:,} by style and name"

    def save(self, path: Path) -> None:
        """Write one compressed file of plain arrays, atomically."""
        metadata = {"styles": self.styles, "names": self.names, "keywords": self.keywords}
        style, split = self.style.astype(np.uint8), self.split.astype(np.uint8)
        npz.save(path, metadata, pixels=self.pixels, style=style, split=split)

    @classmethod
    def load(cls, path: Path) -> Pictures:
        try:
            metadata, arrays = npz.load(path, ("pixels", "style", "split"))
            pictures = cls(
                arrays["pixels"],
                tuple(map(str, metadata["styles"])),
                arrays["style"].astype(np.int64),
                tuple(map(str, metadata["names"])),
                tuple(tuple(map(str, keywords)) for keywords in metadata["keywords"]),
                arrays["split"].astype(np.int64),
            )
        except (NpzError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path} is not a prepared set of images: {str(error)[:200]}") from None
        shape, columns = pictures.pixels.shape, (pictures.style, pictures.names, pictures.keywords, pictures.split)
        if len(shape) != 4 or shape[1:] != (SIZE, SIZE, 3):
            raise DataError(f"{path} holds images of shape {shape[1:]}; expected ({SIZE}, {SIZE}, 3)")
        if any(len(column) != shape[0] for column in columns):
            raise DataError(f"{path} holds {shape[0]} images and {len(pictures.names)} names")
        return pictures


def load_or_render(path: Path | None = None, say: Callable[[str], None] = print) -> Pictures:
    """The training set from a file; without a path, from the cache folder, where the first call renders it."""
    path = path or cache_folder() / "pictures" / f"emoji-{SIZE}.npz"
    if not path.is_file():
        say("fetching and rendering four sets of emoji, once")
        render(say).save(path)
    return Pictures.load(path)


def render(say: Callable[[str], None] = print) -> Pictures:
    """Fetch and render all sets, and split them."""
    sets: dict[str, list[Picture]] = {}
    names = _Names()
    for style, read in SETS.items():
        sets[style] = _deduplicated(read(names))
        say(f"{style}: {len(sets[style]):,} images")
    return split(sets)


def split(sets: Mapping[str, Sequence[Picture]]) -> Pictures:
    """Split sets by style into training and held-out images, by a hash of their names."""
    styles = tuple(sets)
    rows = [(style, picture) for style, pictures in enumerate(sets.values()) for picture in pictures]
    counts = Counter(picture.name for _, picture in rows)
    splits = []
    for style, picture in rows:
        name = picture.name
        if name not in COMMON and _held_out(name):
            splits.append(HELD_NAME)
        elif counts[name] > 1 and _held_out(f"{styles[style]}: {name}"):
            splits.append(HELD_PAIR)
        else:
            splits.append(TRAIN)
    return Pictures(
        np.stack([picture.pixels for _, picture in rows]),
        styles,
        np.array([style for style, _ in rows]),
        tuple(picture.name for _, picture in rows),
        tuple(picture.keywords for _, picture in rows),
        np.array(splits),
    )


def _held_out(text: str) -> bool:
    """True for one text in `_HELD_OUT_EVERY`, by its hash."""
    return hashlib.sha256(f"{_SEED}/{text}".encode()).digest()[0] % _HELD_OUT_EVERY == 0


def _deduplicated(pictures: Iterable[Picture]) -> list[Picture]:
    """The images without repeated pixels or names. The first of equal images gets the names and keywords of the
    others as keywords."""
    by_pixels: dict[bytes, Picture] = {}
    names: set[str] = set()
    for picture in pictures:
        key = hashlib.sha256(picture.pixels.tobytes()).digest()
        if (first := by_pixels.get(key)) is not None:
            keywords = tuple(dict.fromkeys([*first.keywords, picture.name, *picture.keywords]))
            by_pixels[key] = replace(first, keywords=keywords)
        elif picture.name not in names:
            by_pixels[key] = picture
            names.add(picture.name)
    return list(by_pixels.values())


# ---- pixels


def on_white(data: bytes, size: int = SIZE) -> np.ndarray:
    """A PNG of any size -> pixels [size, size, 3] uint8, centred on white and composited over it."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=["PNG"]) as opened:
            if max(opened.size) > _MAX_SIDE:
                raise DataError(f"an image has {opened.width} x {opened.height} pixels; {_MAX_SIDE} a side are allowed")
            picture = opened.convert("RGBA")
    except DataError:
        raise
    except Exception as error:  # damaged images raise many kinds of errors
        raise DataError(f"an image can't be read: {' '.join(str(error).split())[:200]}") from None
    if max(picture.size) != size or picture.width != picture.height:
        scale = size / max(picture.size)
        canvas = Image.new("RGBA", (size, size), (255, 255, 255, 0))
        small = picture.resize((round(picture.width * scale), round(picture.height * scale)), Image.Resampling.LANCZOS)
        canvas.paste(small, ((size - small.width) // 2, (size - small.height) // 2))
        picture = canvas
    flat = Image.new("RGBA", picture.size, (255, 255, 255, 255))
    flat.alpha_composite(picture)
    return np.asarray(flat.convert("RGB"))


def _rasterise(svg: bytes) -> bytes:
    """An SVG -> a PNG of SIZE pixels."""
    try:
        from resvg import render, usvg
    except ImportError:
        raise DataError(f"rendering SVG files needs resvg: {install_command('train')}") from None
    head, mark, tail = svg.decode("utf-8").partition("<svg")
    attributes, end, body = tail.partition(">")
    attributes = re.sub(r'\s(width|height)="[^"]*"', "", attributes) + f' width="{SIZE}" height="{SIZE}"'
    tree = usvg.Tree.from_str("".join((head, mark, attributes, end, body)), usvg.Options.default())
    return bytes(render(tree, (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)))


@contextmanager
def _archive(asset: str) -> Iterator[dict[str, Callable[[], bytes]]]:
    """The files of a fetched package: path -> a function that reads the file."""
    (path,) = fetch(asset).glob("*.tgz")
    with tarfile.open(path) as opened:
        files = {member.name.partition("/")[2]: member for member in opened.getmembers() if member.isfile()}

        def reader(member: tarfile.TarInfo) -> Callable[[], bytes]:
            def read() -> bytes:
                file: IO[bytes] | None = opened.extractfile(member)
                if file is None:
                    raise DataError(f"{path.name} has no file {member.name}")
                return file.read()

            return read

        yield {name: reader(member) for name, member in files.items()}


# ---- names and keywords


def _key(code: str) -> str:
    """Code points such as "1F600-FE0F" in capitals, without variation selectors and joiners."""
    return "-".join(point.upper() for point in code.split("-") if point.upper() not in ("FE0F", "200D"))


def _normalise(name: str) -> str:
    """A name in lower case without punctuation."""
    text = unicodedata.normalize("NFKC", name).lower().replace("’", "'").replace("_", " ").replace("-", " ")
    return re.sub(r"\s+", " ", re.sub(r"[“”\"(),:!.⊛]", " ", text)).strip()


class _Names:
    """Names and keywords of emoji by code points: OpenMoji's, whose names are Unicode's, and emojilib's keywords."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.words: dict[str, list[str]] = {}
        with _archive("openmoji") as files:
            self.openmoji: list[dict[str, Any]] = json.loads(files["data/openmoji.json"]())
        with _archive("emojilib") as files:
            emojilib = json.loads(files["dist/emoji-en-US.json"]())
        for entry in self.openmoji:
            key = _key(entry["hexcode"])
            tags = [tag for field in ("tags", "openmoji_tags") for tag in str(entry.get(field) or "").split(",")]
            self.names[key] = _normalise(entry["annotation"])
            self.words[key] = [_normalise(tag) for tag in tags if tag.strip()]
        for emoji, keywords in emojilib.items():
            key = _key("-".join(f"{ord(character):X}" for character in emoji))
            self.words[key] = [*self.words.get(key, []), *map(_normalise, keywords)]
        self.keys = {name: key for key, name in self.names.items()}
        self._by_words = {"".join(words(name)): name for name in self.keys}

    def canonical(self, name: str) -> str:
        """Unicode's form of a name that differs from it in punctuation or stop words only."""
        return self._by_words.get("".join(words(name)), name)

    def keywords(self, name: str, key: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(word for word in self.words.get(key, []) if word and word != name))


# ---- the sets, each read as images

_TONE = re.compile(r"-(default|light|medium-light|medium|medium-dark|dark)$")


def _datasource(asset: str, folder: str) -> Callable[[_Names], Iterator[Picture]]:
    """A set of the emoji-datasource packages: PNG files and their list."""

    def read(names: _Names) -> Iterator[Picture]:
        with _archive(asset) as files:
            for entry in json.loads(files["emoji.json"]()):
                path, key = f"img/{folder}/64/{entry['image']}", _key(entry["unified"])
                if path in files and entry.get(f"has_img_{folder}", True) and "1F3F" not in entry["unified"]:
                    name = names.names.get(key) or _normalise(entry["name"] or entry["short_name"])
                    yield Picture(name, names.keywords(name, key), on_white(files[path]()))

    return read


def _openmoji(names: _Names) -> Iterator[Picture]:
    with _archive("openmoji") as files:
        for entry in names.openmoji:
            path = f"color/svg/{entry['hexcode']}.svg"
            if path in files and not entry.get("skintone"):
                key = _key(entry["hexcode"])
                name = names.names[key]
                yield Picture(name, names.keywords(name, key), on_white(_rasterise(files[path]())))


def _fluent(names: _Names) -> Iterator[Picture]:
    with _archive("fluent-emoji") as files:
        paths = {path.removeprefix("icons/flat/").removesuffix(".svg"): path for path in files if "/flat/" in path}
        for stem, path in sorted(paths.items()):
            base = _TONE.sub("", stem)
            if base != stem and f"{base}-default" in paths and not stem.endswith("-default"):
                continue
            name = names.canonical(_normalise(base if stem.endswith("-default") else stem))
            key = names.keys.get(name, "")
            yield Picture(name, names.keywords(name, key), on_white(_rasterise(files[path]())))


SETS: Mapping[str, Callable[[_Names], Iterator[Picture]]] = {
    "noto": _datasource("noto-emoji", "google"),
    "twemoji": _datasource("twemoji", "twitter"),
    "openmoji": _openmoji,
    "fluent": _fluent,
}
