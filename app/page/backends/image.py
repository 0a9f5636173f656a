"""The page's backend for images, with our text-to-emoji model or a published one."""

from __future__ import annotations

import io
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from outrider.app.page.backends.interface import Choice, Knob, LazyModel, ModelSpec, RunSettings
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


class ImageBackend:
    """Images by our model, by a published one (`spec`), or by the model that `load_` returns."""

    name: Modality = "image"
    title = "Image"
    prompt_label = "prompt"
    lessons: Mapping[str, str] = {}
    examples: tuple[str, ...] = ("red heart", "pizza", "cat with tears of joy", "rainbow", "panda", "rocket")
    default_temperature: float = 1.0
    default_drafter = JACOBI.name
    defaults: Modality | None = name
    is_server = False
    extra_options: tuple[Knob | Choice, ...] = (
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
        spec: ModelSpec | None = None,
    ) -> None:
        """`folder` contains weights of your own training for our model."""
        self.device = device
        self._spec, self._folder, self._given = spec, folder, load_ is not None
        self._lazy: LazyModel[ImageModel | PublishedModel]
        if spec is not None:  # with the model's own guidance
            self._lazy = LazyModel(lambda: spec.load(model.load, device, dtype), spec.model)
            self.examples, self.extra_options = ("a red fox in the snow", "a lighthouse at night"), ()
        else:
            load_own = load_ or (lambda: load(device=device, dtype=dtype, folder=folder))
            self._lazy = LazyModel(load_own, "the emoji model (64x64 pixels, 16x16 codes)")
            self.examples = self.examples if load_ is None else ("red heart", "cat", "house")

    @property
    def description(self) -> str:
        return self._lazy.description

    @property
    def loaded(self) -> bool:
        return self._lazy.loaded

    def load(self) -> ImageModel | PublishedModel:
        return self._lazy.get()

    def drafters(self) -> list[str]:
        if self._spec is not None:
            return listed_drafters(draft=self._spec.draft_model is not None, published=self._spec.model).ready
        return listed_drafters(draft=not self._given, folder=self._folder).ready

    def rules(self) -> list[str]:
        return rules()

    def begin(self, settings: RunSettings) -> ImageGeneration:
        return ImageGeneration(self.load(), settings)

    def similar(self, code: int, count: int = 12) -> list[tuple[int, str]]:
        """A code and the codes whose patches look most like its patch, each with the patch as a data URL."""
        im = self.load()
        near = [code, *im.neighbours[code, :count].tolist()]
        if isinstance(im, PublishedModel):  # some models decode whole images only: fill one with the code
            whole = torch.tensor(near)[:, None, None].expand(-1, im.raster.rows, im.raster.columns)
            drawn = [part.resize((48, 48)) for part in im.to_images(whole)]
            return [(neighbour, data_url(part)) for neighbour, part in zip(near, drawn, strict=True)]
        grids = torch.tensor(near)[:, None, None].expand(-1, 3, 3)
        size = im.codec.factor
        patches = [picture.crop((size, size, 2 * size, 2 * size)) for picture in im.to_images(grids)]
        return [
            (neighbour, data_url(patch.resize((48, 48), 0))) for neighbour, patch in zip(near, patches, strict=True)
        ]


def packed(picture: Image) -> str:
    """The image as a PNG file in base64."""
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return b64encode(file.getvalue()).decode()


def data_url(picture: Image) -> str:
    return "data:image/png;base64," + packed(picture)


class ImageGeneration:
    """An image in progress."""

    def __init__(self, im: ImageModel | PublishedModel, settings: RunSettings) -> None:
        self._im, self._settings = im, settings
        self._steps: list[Step] = []
        self._count = 0
        style = settings.extra.get("style")
        given: dict[str, Any] = {"style": style if style != ANY and style in im.styles else None}
        if "guidance_scale" in settings.extra:
            given["guidance_scale"] = settings.extra["guidance_scale"]
        self._stream = im.stream(settings.prompt, **settings.options(), **given, entropy=True)

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        piece = next(self._stream)
        self._steps.append(piece.step)
        self._count = piece.count
        return piece.step

    def close(self) -> None:
        self._stream.close()

    def preview(self) -> str:
        shape = self._im.raster.rows, self._im.raster.width
        drawn = image_grid.layered(packed(self._stream.image(0, self._count)), self._steps, *shape, overlays=False)
        return f'<div class="or-lane">{drawn}</div>'

    def recording(self) -> Recording:
        raster = self._im.raster
        picture = self._stream.results[0].image
        return Recording(
            "image",
            self._stream.trace,
            self._settings.prompt,
            rows=raster.rows,
            columns=raster.width,
            picture=packed(picture),
        )


def codes(steps: Sequence[Step]) -> list[int]:
    """An image's codes in raster order."""
    return [token for step in steps for token in step.emitted]
