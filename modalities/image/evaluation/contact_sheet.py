"""A contact sheet: images of the same prompts and seeds under several settings, side by side in one image.
Independent of how images are generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.core.bench.settings import Setting
from outrider.core.errors import InvalidOption
from outrider.core.methods.parallel_decoding import JACOBI
from outrider.core.methods.rules import ANNEALED, EXACT, GROUPED, LANTERN, LANTERN_PLUS_PLUS
from outrider.image.evaluation.bench import generate_batches
from outrider.image.model import ImageModel

if TYPE_CHECKING:
    from PIL.Image import Image

RELAXED_RULES = tuple(rule.name for rule in (LANTERN, LANTERN_PLUS_PLUS, GROUPED, ANNEALED))
_MARGIN, _CAPTION = 12, 26  # pixels around a panel, and above it
_TEXT, _BORDER = (40, 40, 40), (235, 235, 235)


@dataclass(frozen=True)
class Panel:
    """The images of one setting."""

    caption: str
    images: Sequence[Image]


def default_settings(drafter: str = JACOBI.name) -> list[Setting]:
    """Plain decoding, then a drafter under the exact rule and under each relaxed rule with its default options."""
    return [Setting(), *(Setting(drafter=drafter, rule=rule) for rule in (EXACT.name, *RELAXED_RULES))]


def panels(im: ImageModel, prompts: Sequence[str], settings: Sequence[Setting], **options: Any) -> list[Panel]:
    """Generate all prompts under each setting; the options are those of
    outrider.image.evaluation.bench.generate_batches."""
    if not prompts:
        raise InvalidOption("there are no prompts to draw; give at least one")
    panels = []
    for setting in settings:
        results = generate_batches(im, prompts, setting, **options)
        tokens = sum(len(result.tokens) for result in results)
        rate = tokens / sum(len(result.trace.steps) for result in results)
        panels.append(Panel(f"{setting.name}: {rate:.1f} codes per pass", [result.image for result in results]))
    return panels


def sheet(panels: Sequence[Panel], *, across: int = 8, panels_across: int = 3, size: int = 48) -> Image:
    """All panels in one image, each with `across` images of `size` pixels per row."""
    from PIL import Image, ImageDraw, ImageFont

    down = -(-max(len(panel.images) for panel in panels) // across)
    width, height = across * size + 2 * _MARGIN, down * size + _CAPTION + _MARGIN
    columns = min(panels_across, len(panels))
    image = Image.new("RGB", (columns * width, -(-len(panels) // columns) * height + _MARGIN), "white")
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    for index, panel in enumerate(panels):
        left = index % columns * width + _MARGIN
        top = index // columns * height + _CAPTION
        draw.text((left, top - _CAPTION + 6), panel.caption, fill=_TEXT, font=font)
        for position, picture in enumerate(panel.images):
            corner = left + position % across * size, top + position // across * size
            image.paste(picture.resize((size, size), Image.Resampling.LANCZOS), corner)
        draw.rectangle((left - 1, top - 1, left + across * size, top + down * size), outline=_BORDER)
    return image
