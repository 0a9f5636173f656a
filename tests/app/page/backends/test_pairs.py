"""The page accepts the pairs of drafter and rule that the core accepts, in every modality."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gradio")

from outrider.app.page.backends.image import Pictures
from outrider.app.page.backends.interface import METHODS, Backend, checked, offered, rules_for
from outrider.app.page.backends.speech import Speech
from outrider.app.page.backends.text import Text
from outrider.core.errors import InvalidOption
from outrider.core.methods import RULES
from outrider.core.protocol import PLAIN
from outrider.image import resolve_drafter as image
from outrider.speech import resolve_drafter as speech
from outrider.text import resolve_drafter as text

SUBJECTS: dict[str, tuple[Callable[[], Backend], Any]] = {
    "text": (Text, text.listed_drafters("smollm2-135m")),
    "image": (Pictures, image.listed_drafters()),
    "speech": (Speech, speech.listed_drafters()),
}


@pytest.mark.parametrize("modality", SUBJECTS)
def test_the_page_offers_what_is_ready(modality: str) -> None:
    make, listing = SUBJECTS[modality]
    assert offered(make()) == [PLAIN, *listing.ready]
    assert len(listing.ready) > 20


@pytest.mark.parametrize("modality", SUBJECTS)
def test_the_page_accepts_the_pairs_that_the_core_accepts(modality: str) -> None:
    make, listing = SUBJECTS[modality]
    subject, pairs = make(), 0
    for drafter in (PLAIN, *listing.ready):
        for rule in subject.rules():
            good = drafter == PLAIN or RULES[rule].judges(METHODS[drafter])
            asked = {"prompt": "a word", "drafter": drafter, "rule": rule}
            assert (rule in rules_for(subject, drafter)) == good
            if good:
                assert checked(subject, asked).drafter == drafter
            else:
                with pytest.raises(InvalidOption, match="can't judge"):
                    checked(subject, asked)
            pairs += 1
    assert pairs > 300


def test_the_command_line_takes_the_names_that_the_core_takes() -> None:
    for drafter in text.drafters():
        for rule in text.rules():
            text.check_names(drafter, rule)


@pytest.mark.parametrize("drafter", ["triforce", "qspec", "bild", "specdec-plus-plus", "predrafted"])
def test_the_rule_for_blocks_takes_every_sampled_chain(drafter: str) -> None:
    assert "block" in rules_for(Text(), drafter)
