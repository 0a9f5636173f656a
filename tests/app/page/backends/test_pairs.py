"""The page accepts the pairs of drafter and rule that the core accepts, in every modality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gradio")

from outrider.app.page.backends.image import ImageBackend
from outrider.app.page.backends.interface import METHODS, Backend, checked, rules_for, selectable_drafters
from outrider.app.page.backends.speech import SpeechBackend
from outrider.app.page.backends.text import TextBackend
from outrider.core.errors import InvalidOption
from outrider.core.methods import RULES
from outrider.core.protocol import PLAIN
from outrider.image import resolve_drafter as image
from outrider.speech import resolve_drafter as speech
from outrider.text import resolve_drafter as text

BACKENDS: dict[str, tuple[Callable[[], Backend], Any]] = {
    "text": (TextBackend, text.listed_drafters("smollm2-135m")),
    "image": (ImageBackend, image.listed_drafters()),
    "speech": (SpeechBackend, speech.listed_drafters()),
}


@pytest.mark.parametrize("modality", BACKENDS)
def test_the_page_offers_what_is_ready(modality: str) -> None:
    make, listing = BACKENDS[modality]
    assert selectable_drafters(make()) == [PLAIN, *listing.ready]
    assert len(listing.ready) > 20


@pytest.mark.parametrize("modality", BACKENDS)
def test_the_page_accepts_the_pairs_that_the_core_accepts(modality: str) -> None:
    make, listing = BACKENDS[modality]
    backend, pairs = make(), 0
    for drafter in (PLAIN, *listing.ready):
        for rule in backend.rules():
            good = drafter == PLAIN or RULES[rule].can_verify(METHODS[drafter])
            settings = {"prompt": "a word", "drafter": drafter, "rule": rule}
            assert (rule in rules_for(backend, drafter)) == good
            if good:
                assert checked(backend, settings).drafter == drafter
            else:
                with pytest.raises(InvalidOption, match="cannot verify"):
                    checked(backend, settings)
            pairs += 1
    assert pairs > 300


def test_the_command_line_takes_the_names_that_the_core_takes() -> None:
    for drafter in text.drafters():
        for rule in text.rules():
            text.check_names(drafter, rule)


@pytest.mark.parametrize("drafter", ["triforce", "qspec", "bild", "specdec-plus-plus", "predrafted"])
def test_the_rule_for_blocks_takes_every_sampled_chain(drafter: str) -> None:
    assert "block" in rules_for(TextBackend(), drafter)
