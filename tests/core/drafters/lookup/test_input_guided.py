"""Input-guided decoding: copies, stops at a mismatch, and finds its position again."""

from __future__ import annotations

from typing import Any

import pytest

from outrider.core.drafters.lookup.input_guided import InputGuided
from outrider.core.errors import InvalidOption

SOURCE = [*range(1, 49)]


def calls(say: Any, output: list[int], **options: Any) -> int:
    return len(say(InputGuided(source=SOURCE, **options), [[60, 61]], [output])[0])


def test_an_unchanged_input_is_copied_whole(say: Any) -> None:
    assert calls(say, SOURCE) == 2 and calls(say, SOURCE, length=16) == 3  # 48 tokens, 32 or 16 and one at a time


@pytest.mark.parametrize(
    "output",
    [
        [*SOURCE[:20], 55, *SOURCE[21:]],
        [*SOURCE[:20], 55, *SOURCE[20:]],
        [*SOURCE[:20], *SOURCE[23:]],
        [*SOURCE[:20], 55, 56, 57, *SOURCE[22:]],
    ],
    ids=["replaced", "put in", "left out", "rewritten"],
)
@pytest.mark.parametrize("hedge", [0, 4])
def test_copying_continues_after_a_change(say: Any, output: list[int], hedge: int) -> None:
    assert calls(say, output, hedge=hedge) <= 9
    assert len(output) / calls(say, output) >= 4.5


def test_hedging_bridges_a_single_change(say: Any) -> None:
    output = [*SOURCE[:20], 55, *SOURCE[21:43]]
    assert calls(say, output, hedge=4, length=16) < calls(say, output, hedge=0, length=16)


def test_nothing_is_drafted_without_an_anchor(say: Any) -> None:
    (steps,) = say(InputGuided(hedge=0), [SOURCE], [[50, 51, 52, 53, 10, 11, 12, 13, 14, 15]])
    assert [len(step.drafted) for step in steps[:5]] == [0] * 5
    assert len(steps) == 6, "ten tokens, the last five in one call"


def test_of_several_anchors_the_one_after_the_mismatch_is_taken(say: Any) -> None:
    source = [1, 2, 3, 10, 11, 12, 4, 2, 3, 20, 21, 22]
    output = [1, 2, 3, 10, 11, 12, 50, 2, 3, 20, 21, 22]
    (steps,) = say(InputGuided(source=source, hedge=0), [[60]], [output])
    assert steps[-1].emitted == (20, 21, 22) or steps[-1].emitted == (3, 20, 21, 22)


def test_the_next_best_position_is_drafted_too(say: Any) -> None:
    source = [9, 1, 2, 3, 4, 9, 5, 6, 7, 8]
    (steps,) = say(InputGuided(), [source], [[9, 1, 2, 3, 4, 30]])
    assert steps[1].emitted[:4] == (1, 2, 3, 4), "though the 9 that is nearer the end goes on otherwise"


def test_rows_copy_from_their_own_prompts(say: Any) -> None:
    one, two = [1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18]
    found = say(InputGuided(anchor=1), [one, two], [one, two])
    assert [len(steps) for steps in found] == [2, 2]


@pytest.mark.parametrize("options", [{"length": 0}, {"anchor": 0}, {"hedge": -1}])
def test_options_that_make_no_sense_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidOption):
        InputGuided(**options)
