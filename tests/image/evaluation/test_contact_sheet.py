"""Contact sheets: one panel per setting, and the positions of pictures."""

from __future__ import annotations

import pytest
from PIL import Image

from outrider.core.bench.settings import Setting
from outrider.core.errors import InvalidOption
from outrider.image.evaluation.contact_sheet import Panel, default_settings, panels, sheet
from outrider.image.model import ImageModel


@pytest.mark.slow
def test_a_panel_for_each_setting(im: ImageModel) -> None:
    settings = [Setting(), Setting(drafter="jacobi", rule="annealed")]
    drawn = panels(im, ["cat", "red heart", "house"], settings, guidance_scale=1.0, batch=2)
    assert [panel.caption.split(":")[0] for panel in drawn] == ["plain", "jacobi annealed"]
    assert drawn[0].caption.endswith("1.0 codes per pass") and "codes per pass" in drawn[1].caption
    image = sheet(drawn, across=2, size=32)
    assert image.width == 2 * (2 * 32 + 24) and image.height == 2 * 32 + 26 + 12 + 12
    with pytest.raises(InvalidOption, match="no prompts"):
        panels(im, [], settings)


def test_pictures_fill_a_panel_row_by_row() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    image = sheet([Panel("colours", [Image.new("RGB", (64, 64), colour) for colour in colours])], across=2, size=16)
    assert [image.getpixel((12 + 8 + 16 * x, 26 + 8 + 16 * y)) for x, y in ((0, 0), (1, 0), (0, 1))] == colours


def test_default_settings_are_plain_exact_and_relaxed() -> None:
    settings = default_settings()
    assert settings[0].drafter is None and settings[1].rule == "exact" and len(settings) == 6
