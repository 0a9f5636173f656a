"""The teacher's states on disk: each row is computed once, and read back as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from outrider.core.decode import decode
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import InvalidOption
from outrider.core.rules.exact import Exact
from outrider.core.training.dataset import Lesson, TargetTeacher, read
from outrider.core.training.kept_states import KeptStates
from outrider.core.training.state_recorder import StateRecorder

NEEDS = frozenset({"layer.1"})
SHAPE = Config(
    hidden_size=64, intermediate_size=96, layers=3, heads=2, kv_heads=1, head_dim=32, vocabulary=96, context=64
)
ROWS = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


class Counted:
    """A teacher whose states say which token they are of, and that counts the rows it reads."""

    device, vocabulary, width = torch.device("cpu"), 32, 3

    def __init__(self) -> None:
        self.rows = 0

    def states(self, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Mapping[str, Tensor]:
        self.rows += len(rows)
        whole = torch.full((len(rows), max(map(len, rows)), self.width), 7.0)
        for row, ids in enumerate(rows):
            whole[row, : len(ids)] = torch.tensor(ids, dtype=torch.float32)[:, None] + torch.arange(self.width) / 8
        return {tap: (whole + place).bfloat16() for place, tap in enumerate(sorted(needs | {"last"}))}

    def logits(self, states: Tensor, vocabulary: Tensor | None) -> Tensor:
        return states


def kept(folder: Path, limit: int = 1 << 20, name: str = "one") -> tuple[Counted, KeptStates]:
    teacher = Counted()
    return teacher, KeptStates(teacher, folder, limit, name=name)


def same(made: KeptStates, rows: Sequence[Sequence[int]]) -> None:
    wanted, found = Counted().states(rows, NEEDS), made.states(rows, NEEDS)
    assert sorted(found) == sorted(wanted)
    for tap, states in found.items():
        assert states.dtype == torch.bfloat16 and states.shape == wanted[tap].shape
        for row, ids in enumerate(rows):
            assert torch.equal(states[row, : len(ids)], wanted[tap][row, : len(ids)])
            assert not states[row, len(ids) :].any()


def test_a_row_is_computed_once_in_this_run_and_the_next(tmp_path: Path) -> None:
    teacher, made = kept(tmp_path)
    same(made, ROWS[:2])
    same(made, ROWS[::-1])
    same(made, ROWS)
    assert teacher.rows == 3
    batch = read(made, [Lesson((1, 2), (3, 4))], NEEDS)
    assert teacher.rows == 3 and torch.equal(batch.taps["last"], made.states(ROWS[:1], NEEDS)["last"])
    later, again = kept(tmp_path)
    same(again, ROWS)
    same(again, ROWS)
    assert later.rows == 1, "one row shows that the teacher is the same"


def test_states_are_recorded_while_rows_of_unequal_length_are_decoded(tmp_path: Path) -> None:
    target = Decoder(random_network(SHAPE, 3, dtype=torch.bfloat16).map_linears(fastest))
    recorder, prompts = StateRecorder(NEEDS), [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3]]
    rows = [list(prompt) for prompt in prompts]
    for step in decode(target, recorder, Exact(), prompts, max_new_tokens=[1, 9, 4]):
        rows[step.row] += step.emitted
    assert [len(row) for row in rows] == [6, 11, 7]
    _, made = kept(tmp_path)
    for number, row in enumerate(rows):
        made.add(row, NEEDS, recorder.states(number, len(row)))
    found, wanted = made.states(rows, NEEDS), TargetTeacher(target).states(rows, NEEDS)
    for tap, states in found.items():
        for number, row in enumerate(rows):
            read = slice(0, len(row) - 1)
            assert (states[number, read] - wanted[tap][number, read]).abs().max() < 0.05
            assert not states[number, len(row) - 1 :].any()
    assert made.teacher.rows == 0  # type: ignore[attr-defined]


def test_states_of_another_teacher_or_of_other_taps_are_dropped(tmp_path: Path) -> None:
    same(kept(tmp_path)[1], ROWS)
    other, made = kept(tmp_path, name="two")
    same(made, ROWS)
    assert other.rows == 3
    more = made.states(ROWS, NEEDS | {"layer.2"})
    assert sorted(more) == ["last", "layer.1", "layer.2"] and other.rows == 6
    assert made.states(ROWS, NEEDS | {"layer.2"}).keys() == more.keys() and other.rows == 6


def test_states_of_weights_that_changed_in_place_are_dropped(tmp_path: Path) -> None:
    same(kept(tmp_path)[1], ROWS[:2])
    teacher, made = kept(tmp_path)
    teacher.states = lambda rows, needs: {  # type: ignore[method-assign]
        tap: -states for tap, states in Counted().states(rows, needs).items()
    }
    made.add(ROWS[2], NEEDS, torch.stack(list(teacher.states(ROWS[2:], NEEDS).values()))[:, 0])
    found, wanted = made.states(ROWS[1:], NEEDS), teacher.states(ROWS[1:], NEEDS)
    for tap, states in found.items():
        assert torch.equal(states[0, :2], wanted[tap][0, :2]) and torch.equal(states[1], wanted[tap][1])


def test_what_was_not_written_whole_is_computed_again(tmp_path: Path) -> None:
    _, made = kept(tmp_path)
    same(made, ROWS)
    whole = made.file.read_bytes()
    for damaged, left in ((whole[:-1], 1 + 1), (whole[:50], 2 + 1), (b"", 3)):  # and one that is compared
        made.file.write_bytes(damaged)
        teacher, again = kept(tmp_path)
        same(again, ROWS)
        assert teacher.rows == left
        same(kept(tmp_path)[1], ROWS)
    for text in ("", "{", '{"teacher": "one"}\n', made.index.read_text().replace("bfloat16", "nn")):
        made.index.write_text(text)
        teacher, again = kept(tmp_path)
        same(again, ROWS)
        assert teacher.rows == 3
        same(kept(tmp_path)[1], ROWS)


def test_no_more_than_the_limit_is_kept(tmp_path: Path) -> None:
    teacher, made = kept(tmp_path, limit=2 * 3 * 2 * 6)  # 6 tokens of two taps
    for _ in range(2):
        same(made, ROWS)
    assert teacher.rows == 4 and made.file.stat().st_size <= made.limit
    with pytest.raises(InvalidOption, match="1 or more"):
        kept(tmp_path, limit=0)
