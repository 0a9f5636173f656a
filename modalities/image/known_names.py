"""Which styles have an image of which name; a prompt without a style is drawn in one that knows its name.

A JSON file beside the token model's weights, written when it is trained. Independent of models.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

from outrider.core.assets.files import AssetError, read_json, write_atomically
from outrider.image.prompt_encoder import words


@dataclass(frozen=True)
class KnownNames:
    """Names in the form of `_key`, with the indices of the styles that have an image of it."""

    styles: tuple[str, ...] = ()
    names: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    preferred: tuple[str, ...] = ()  # styles that the model draws best

    @classmethod
    def of(cls, styles: Sequence[str], pictures: Iterable[tuple[str, int]]) -> KnownNames:
        """From (name, index of its style) pairs."""
        found: dict[str, set[int]] = {}
        for name, style in pictures:
            found.setdefault(_key(name), set()).add(style)
        return cls(tuple(styles), {name: tuple(sorted(found[name])) for name in sorted(found)})

    def style(self, prompt: str, styles: Sequence[str]) -> str:
        """One of `styles` for a prompt: a hash chooses among those that know its name, or among all if none does; of
        these among the preferred ones, if there are any."""
        known = [self.styles[index] for index in self.names.get(_key(prompt), ())]
        candidates = [style for style in styles if style in known] or list(styles)
        candidates = [style for style in candidates if style in self.preferred] or candidates
        return candidates[crc32(" ".join(prompt.lower().split()).encode(errors="replace")) % len(candidates)]

    def save(self, path: Path) -> None:
        """Each name's styles are the bits of one number."""
        masks = {name: sum(1 << index for index in indices) for name, indices in self.names.items()}
        data = {"styles": self.styles, "preferred": self.preferred, "names": masks}
        write_atomically(path, json.dumps(data, separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: Path) -> KnownNames:
        data = read_json(path)
        styles, masks = data.get("styles"), data.get("names")
        if (
            not isinstance(styles, list)
            or not isinstance(masks, dict)
            or not all(type(m) is int for m in masks.values())
        ):
            raise AssetError(f"{path} is not a list of names by style; train image-tokens again")
        preferred = data.get("preferred", [])
        return cls(
            tuple(map(str, styles)),
            {name: tuple(n for n in range(len(styles)) if mask >> n & 1) for name, mask in masks.items()},
            tuple(map(str, preferred)) if isinstance(preferred, list) else (),
        )


def _key(name: str) -> str:
    return " ".join(words(name))
