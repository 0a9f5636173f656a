"""What `model.drafters` and `model.rules` show of each method."""

from __future__ import annotations

import pytest

from outrider.core.methods import DRAFTERS, RULES
from outrider.core.methods.listing import Listing
from outrider.image.resolve_drafter import listed_drafters as of_images
from outrider.speech.resolve_drafter import listed_drafters as of_speech
from outrider.text.resolve_drafter import listed_drafters as of_text


def listing() -> Listing:
    return Listing(DRAFTERS.values(), lambda method: ("a head",) if method.draft_head is not None else ())


def test_it_is_a_mapping_of_names_that_says_what_each_needs() -> None:
    found = listing()
    assert list(found) == list(DRAFTERS) and "medusa" in found and len(found) == len(DRAFTERS)
    entry = found["medusa"]
    assert not entry.ready and entry.missing == ("a head",)
    assert entry.needs == {"head": "a draft head trained on the target"}
    assert entry.topology == DRAFTERS["medusa"].topology and entry.summary == DRAFTERS["medusa"].summary
    assert found["suffix"].ready and "suffix" in found.ready and "medusa" not in found.ready
    with pytest.raises(KeyError):
        found["no-such"]


def test_its_repr_has_a_line_for_each_and_an_entry_s_all_there_is_to_know() -> None:
    found = listing()
    lines = repr(found).splitlines()
    assert len(lines) == len(found) and max(map(len, lines)) <= 100
    assert all(line.startswith(name) for line, name in zip(lines, found, strict=True))
    assert next(line for line in lines if line.startswith("eagle3 ")).split("  ")[-1] == "missing: a head"
    shown = repr(found["sequoia"])
    assert DRAFTERS["sequoia"].summary in shown and "model: a smaller model" in shown and "ready" in shown
    assert "verifies chain" in repr(Listing(RULES.values())["block"])


@pytest.mark.parametrize(
    ("found", "absent"),
    [
        (of_text("smollm2-135m"), {"rest": "store=", "cross-vocabulary": "model="}),
        (of_text("another"), {"eagle2": "outrider train eagle --model another", "draft-model": "model="}),
        (
            of_images(published="another", draft=False),
            {"specexec": "load(..., draft_model=...)", "medusa": "outrider train image-medusa --model"},
        ),
        (of_speech(draft=False), {"draft-model": "outrider train speech-draft"}),
    ],
)
def test_modalities_say_what_is_missing(found: Listing, absent: dict[str, str]) -> None:
    for name, words in absent.items():
        assert not found[name].ready and words in " ".join(found[name].missing), name
    assert {"prompt-lookup", "suffix", "ensemble"} <= set(found.ready)
