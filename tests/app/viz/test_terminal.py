"""The terminal demo: what is drawn is what the traces say, whatever the terminal."""

from __future__ import annotations

import io
import re
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from outrider.app.commands import terminal_demo
from outrider.app.commands.terminal_demo import Options
from outrider.app.viz import terminal, token_styles
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS, RULES
from outrider.core.trace import Step, Summary, Trace

CODES = "\x1b"
STEP = Step(  # 7 accepted, its sibling 5 rejected first; behind 7 the guess 8 rejected, 9 drawn instead
    row=0,
    index=0,
    drafted=(5, 7, 8, 6, 4),
    parents=(-1, -1, 1, 2, 0),
    fixed=(False, False, False, True, False),
    tried=(True, True, True, False, False),
    chance=(0.25, 1.0, 0.5, 0.0, 0.0),
    p=(0.1, 0.6, 0.2, 0.0, 0.0),
    q=(0.4, 0.3, 0.4, 0.0, 0.0),
    path=(1,),
    emitted=(7, 9),
    sources=("drafted", "resampled"),
)


def shown(draw: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(draw)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def played(options: Options, width: int = 80, **more: object) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False, **more)  # type: ignore[arg-type]
    terminal_demo.run(options, console)
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_a_step_is_told_with_its_rejections_where_they_happened() -> None:
    assert list(token_styles.told(STEP)) == [(5, "rejected"), (7, "drafted"), (8, "rejected"), (9, "resampled")]


def test_a_step_cut_short_does_not_show_as_rejected_what_was_only_cut() -> None:
    cut = replace(STEP, emitted=(7,), sources=("drafted",))
    assert list(token_styles.told(cut)) == [(5, "rejected"), (7, "drafted")]


def test_streamed_tokens_are_those_of_the_steps_in_any_width() -> None:
    for width in (3, 7, 40):
        console = Console(file=io.StringIO(), width=width)
        assert terminal.stream(console, [STEP, STEP], "{:02d}".format) == [STEP, STEP]
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert text.split() == ["x05", "07", "x08", "*09"] * 2
        assert max(map(len, text.splitlines())) <= max(width, 4)


def test_the_tree_shows_each_node_as_it_fared() -> None:
    lines = shown(terminal.draft_tree(STEP, 3, "{:02d}".format)).splitlines()
    assert [re.sub(r"[^\w*()]+", " ", line).strip() for line in lines] == [
        "03",
        "x05 p 0 10 q 0 40 chance 0 25",
        "(1 not tried)",
        "07 p 0 60 q 0 30 chance 1 00",
        "x08 p 0 20 q 0 40 chance 0 50",
        "(1 not tried)",
        "*09",
    ]


def test_the_tree_in_a_narrow_terminal_has_the_numbers_alone() -> None:
    assert "07 0.60 0.30 1.00" in shown(terminal.draft_tree(STEP, 3, "{:02d}".format, narrow=True), 40)


def test_every_kind_of_token_has_a_mark_of_its_own() -> None:
    assert len({look.mark for look in token_styles.LOOKS.values()}) == len(token_styles.LOOKS)
    assert all(look.words in shown(terminal.legend("41")) for look in token_styles.LOOKS.values())


def test_charts_keep_to_ascii_where_they_must() -> None:
    summary = Summary.of([STEP])
    assert "#" in shown(terminal.acceptance(summary, ascii_only=True))
    assert shown(terminal.acceptance(summary, ascii_only=True)).isascii()


def test_a_price_is_told_with_its_mean_and_its_worst() -> None:
    text = shown(terminal.total_variation([replace(STEP, total_variation=(0.1, 0.3)), STEP]))
    assert "0.100 a token on average, 0.300 at most, 0.40 in all" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_demo_fits_its_terminal_and_says_what_it_must(width: int) -> None:
    text = played(Options(tokens=16), width)
    assert CODES not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    said = " ".join(text.split())
    assert said.count("Identical to plain decoding: greedy 16 of 16 tokens, gumbel-match (temperature 1) 16 of 16") == 2
    for words in ("tokens per call", "acceptance rate", "by position", "Time: draft", "Price:"):
        assert words in said


def test_without_colours_styles_and_marks_remain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_demo, "_PAUSE", 0.0)
    monkeypatch.setenv("NO_COLOR", "1")
    text = played(Options(tokens=8), force_terminal=True)
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", text) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2", "3", "9"}, "bold, dim, italic and strike alone"


def mostly(names: list[str]) -> list[Any]:
    """All of them; every fourth in the fast part."""
    return [pytest.param(one, marks=[pytest.mark.slow] if place % 4 else []) for place, one in enumerate(names)]


@pytest.mark.parametrize(
    "drafter", mostly([name for name, method in DRAFTERS.items() if {"model"}.issuperset(method.needs)])
)
def test_every_drafter_can_be_shown(drafter: str) -> None:
    found = terminal_demo.traces(Options(drafter=drafter, tokens=12, temperature=0.0))
    assert [one.method for one in found] == ["plain", drafter] * 2
    for plain, fast in (found[:2], found[2:]):
        assert fast.tokens() == plain.tokens()
        assert Trace.from_json(fast.to_json()) == fast


@pytest.mark.slow
@pytest.mark.parametrize("rule", mostly(list(RULES)))
def test_every_rule_can_be_shown_and_a_relaxed_one_has_its_price(rule: str) -> None:
    text = played(Options(rule=rule, tokens=8))
    relaxed = not RULES[rule].lossless
    assert text.count("Price: ") == (2 if relaxed else 1)
    assert ("with a relaxed rule" in text) is not relaxed


def test_the_same_seed_shows_the_same_and_another_does_not() -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [one.tokens() for one in terminal_demo.traces(Options(seed=seed, tokens=12))]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (Options(drafter="medusa-9"), "Known: .*draft-model"),
        (Options(rule="exactly"), "Did you mean 'exact'"),
        (Options(temperature=-1.0), "temperature is -1.0"),
        (Options(drafter="jacobi", rule="block"), "'block' needs a chain"),
        (Options(drafter="prompt-lookup", rule="block"), "'block' needs a chain"),
    ],
)
def test_what_cannot_work_fails_before_anything_is_printed(options: Options, says: str) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(OutriderError, match=says):
        terminal_demo.run(options, console)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
