"""A contact sheet: a panel for every setting, each picture in its place."""

from __future__ import annotations

import pytest
from PIL import Image

from outrider.core.errors import InvalidOption
from outrider.image.evaluation.bench import Setting
from outrider.image.evaluation.contact_sheet import Panel, panels, sheet, usual
from outrider.image.model import ImageModel


@pytest.mark.slow
def test_a_panel_for_each_setting(im: ImageModel) -> None:
    settings = [Setting(drafter=None), Setting(drafter="jacobi", rule="annealed")]
    found = panels(im, ["cat", "red heart", "house"], settings, guidance=1.0, batch=2)
    assert [panel.caption.split(":")[0] for panel in found] == ["plain", "jacobi annealed"]
    assert found[0].caption.endswith("a call a code") and "codes a call" in found[1].caption
    made = sheet(found, across=2, size=32)
    assert made.width == 2 * (2 * 32 + 24) and made.height == 2 * 32 + 26 + 12 + 12
    with pytest.raises(InvalidOption, match="no prompts"):
        panels(im, [], settings)


def test_pictures_stand_where_they_belong() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    made = sheet([Panel("colours", [Image.new("RGB", (64, 64), one) for one in colours])], across=2, size=16)
    assert [made.getpixel((12 + 8 + 16 * x, 26 + 8 + 16 * y)) for x, y in ((0, 0), (1, 0), (0, 1))] == colours


def test_the_usual_ones_are_plain_exact_and_relaxed() -> None:
    found = usual()
    assert found[0].drafter is None and found[1].rule == "exact" and len(found) == 6
