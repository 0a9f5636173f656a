"""Pictures for the page: the text-to-emoji model, what it is asked, the picture as it fills, codes and their like."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.app.page.backends.interface import Asked, Choice, Held, Knob, Named
from outrider.app.page.recordings import Modality, Recording
from outrider.app.viz import image_grid
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.trace import Step
from outrider.image import ImageModel, PublishedModel, load
from outrider.image.hub import model
from outrider.image.resolve_drafter import listed_drafters, rules

if TYPE_CHECKING:
    from PIL.Image import Image

ANY = "any"


class Pictures:
    """The subject."""

    name: Modality = "image"
    title = "Image"
    what = "prompt"
    examples: tuple[str, ...] = ("red heart", "pizza", "cat with tears of joy", "rainbow", "panda", "rocket")
    heat: float = 1.0
    usual = JACOBI.name
    defaults: Modality | None = name
    fixed = False
    extras: tuple[Knob | Choice, ...] = (
        Knob("guidance_scale", 0, 8, 0.5, 3),
        Choice("style", (ANY, "noto", "twemoji", "openmoji", "fluent"), ANY),
    )

    def __init__(
        self,
        load_: Callable[[], ImageModel] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "bfloat16",
        folder: Path | None = None,
        named: Named | None = None,
    ) -> None:
        """Our own model, or the published one that is named."""
        self._named, self._folder, self._given = named, folder, load_ is not None
        self._held: Held[ImageModel | PublishedModel]
        if named is not None:  # it is guided as it usually is
            self._held = Held(lambda: named.opened(model.load, device, dtype))
            self.examples, self.extras = ("a red fox in the snow", "a lighthouse at night"), ()
        else:
            self._held = Held(load_ or (lambda: load(device=device, dtype=dtype, folder=folder)))
            self.examples = self.examples if load_ is None else ("red heart", "cat", "house")

    @property
    def about(self) -> str:
        if self.loaded:
            return repr(self._held.get()).strip("<>")
        return self._named.model if self._named is not None else "emoji of 64x64, as 16x16 codes"

    @property
    def loaded(self) -> bool:
        return self._held.there

    def load(self) -> ImageModel | PublishedModel:
        return self._held.get()

    def drafters(self) -> list[str]:
        if self._named is not None:
            return listed_drafters(trained=False, draft=self._named.draft_model is not None).ready
        return listed_drafters(draft=not self._given, folder=self._folder).ready

    def rules(self) -> list[str]:
        return rules()

    def begin(self, asked: Asked) -> LivePicture:
        return LivePicture(self.load(), asked)

    def like(self, code: int, most: int = 12) -> list[tuple[int, str]]:
        """The codes whose patches look most like this one's, itself first, each as a picture's address."""
        im = self.load()
        near = [code, *im.neighbours[code, :most].tolist()]
        if isinstance(im, PublishedModel):  # its class may draw whole pictures only
            whole = torch.tensor(near)[:, None, None].expand(-1, im.raster.rows, im.raster.columns)
            drawn = [part.resize((48, 48)) for part in im.pictures(whole)]
            return [(one, address(part)) for one, part in zip(near, drawn, strict=True)]
        grids = torch.tensor(near)[:, None, None].expand(-1, 3, 3)
        size = im.codec.factor
        patches = [one.crop((size, size, 2 * size, 2 * size)) for one in im.pictures(grids)]
        return [(one, address(patch.resize((48, 48), 0))) for one, patch in zip(near, patches, strict=True)]


def packed(picture: Image) -> str:
    """PNG in base64."""
    held = io.BytesIO()
    picture.save(held, "PNG", optimize=True)
    return b64encode(held.getvalue()).decode()


def address(picture: Image) -> str:
    return "data:image/png;base64," + packed(picture)


class LivePicture:
    """A picture under way."""

    def __init__(self, im: ImageModel | PublishedModel, asked: Asked) -> None:
        self._im, self._asked = im, asked
        self._steps: list[Step] = []
        self._count = 0
        style = asked.extra.get("style")
        given: dict[str, Any] = {
            "style": None if style == ANY or style not in im.styles else style
        }  # one that it was taught
        if "guidance_scale" in asked.extra:
            given["guidance_scale"] = asked.extra["guidance_scale"]
        self._stream = im.stream(asked.prompt, **asked.options(), **given, entropy=True)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        piece = next(self._stream)
        self._steps.append(piece.step)
        self._count = piece.count
        return piece.step

    def close(self) -> None:
        self._stream.close()

    def seen(self) -> str:
        shape = self._im.raster.rows, self._im.raster.width
        return image_grid.picture(packed(self._stream.picture(0, self._count)), self._steps, *shape, light=True)

    def recording(self) -> Recording:
        raster = self._im.raster
        whole = self._stream.results[0].image
        return Recording(
            "image",
            self._stream.trace,
            self._asked.prompt,
            rows=raster.rows,
            columns=raster.width,
            picture=packed(whole),
        )


def codes(steps: Sequence[Step]) -> list[int]:
    """A picture's codes in raster order."""
    return [token for step in steps for token in step.emitted]
