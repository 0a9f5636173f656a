"""From a drafter's name to the drafter: a short path through the modules, and back into none of them."""

from __future__ import annotations

import sys
from types import FrameType

import pytest

from outrider import text
from outrider.core.drafters.trained.drafter import Learned
from outrider.text.options import Options
from outrider.text.resolve_drafter import resolve_drafter

DATA = "outrider.core.methods.row"  # whose properties are read


@pytest.mark.slow
def test_the_path_from_a_name_to_a_drafter_is_short_and_does_not_turn_back() -> None:
    lm, options = text.load("smollm2-135m"), Options(drafter="eagle3")
    assert isinstance(resolve_drafter(lm, options).made, Learned)  # the weights are read now
    path: list[str] = []

    def seen(frame: FrameType, event: str, _: object) -> None:
        """A call from one module of ours into another, up to the drafter's own."""
        module, before = (str(each.f_globals.get("__name__")) for each in (frame, frame.f_back or frame))
        ours = module.startswith("outrider.") and module not in (before, DATA)
        if event == "call" and ours and path[-1:] not in ([module], [Learned.__module__]):
            path.append(module)

    sys.setprofile(seen)
    try:
        resolve_drafter(lm, options)
    finally:
        sys.setprofile(None)
    assert path[0] == "outrider.text.resolve_drafter" and path[-1] == Learned.__module__
    assert len(path) == len(set(path)) <= 5
