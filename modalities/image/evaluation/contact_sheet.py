"""A contact sheet: the same prompts and seeds by several settings, side by side on one picture.

Knows pictures and captions; what is drawn is outrider.image.model's affair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.core.errors import InvalidOption
from outrider.image.evaluation.bench import Setting, drawn
from outrider.image.model import ImageModel

if TYPE_CHECKING:
    from PIL.Image import Image

RELAXED = ("lantern", "lantern-plus-plus", "grouped", "annealed")
_MARGIN, _CAPTION = 12, 26  # pixels around a panel, and above it
_INK, _PALE = (40, 40, 40), (235, 235, 235)


@dataclass(frozen=True)
class Panel:
    """One setting's pictures."""

    caption: str
    images: Sequence[Image]


def usual(drafter: str = "jacobi") -> list[Setting]:
    """Plain decoding, a drafter that changes nothing, and every rule for codes at its default."""
    return [Setting(drafter=None), *(Setting(drafter=drafter, rule=rule) for rule in ("exact", *RELAXED))]


def panels(im: ImageModel, prompts: Sequence[str], settings: Sequence[Setting], **options: Any) -> list[Panel]:
    """Draw all prompts by each setting; the options are those of outrider.image.evaluation.bench.drawn."""
    if not prompts:
        raise InvalidOption("there are no prompts to draw")
    found = []
    for setting in settings:
        results = drawn(im, prompts, setting, **options)
        calls = sum(len(one.tokens) for one in results) / sum(len(one.trace.steps) for one in results)
        told = "a call a code" if setting.drafter is None else f"{calls:.1f} codes a call"
        found.append(Panel(f"{setting.name}: {told}", [one.image for one in results]))
    return found


def sheet(found: Sequence[Panel], *, across: int = 8, panels_across: int = 3, size: int = 48) -> Image:
    """All panels on one picture: `across` pictures of `size` pixels in a row of each."""
    from PIL import Image, ImageDraw, ImageFont

    most = max(len(panel.images) for panel in found)
    down = -(-most // across)
    width, height = across * size + 2 * _MARGIN, down * size + _CAPTION + _MARGIN
    columns = min(panels_across, len(found))
    made = Image.new("RGB", (columns * width, -(-len(found) // columns) * height + _MARGIN), "white")
    draw, font = ImageDraw.Draw(made), ImageFont.load_default(14)
    for number, panel in enumerate(found):
        left = number % columns * width + _MARGIN
        top = number // columns * height + _CAPTION
        draw.text((left, top - _CAPTION + 6), panel.caption, fill=_INK, font=font)
        for place, picture in enumerate(panel.images):
            at = left + place % across * size, top + place // across * size
            made.paste(picture.resize((size, size), Image.Resampling.LANCZOS), at)
        draw.rectangle((left - 1, top - 1, left + across * size, top + down * size), outline=_PALE)
    return made
