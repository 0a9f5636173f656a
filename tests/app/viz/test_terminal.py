"""Drawings in the terminal, and the terminal demo: they show the traces, in any terminal."""

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
STEP = Step(  # 5 is rejected, its sibling 7 accepted; 8 after it is rejected, and 9 is resampled
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


def test_rejected_tokens_come_before_the_token_in_their_place() -> None:
    assert list(token_styles.tokens_of(STEP)) == [(5, "rejected"), (7, "drafted"), (8, "rejected"), (9, "resampled")]


def test_nodes_after_the_end_of_a_truncated_step_are_not_shown_as_rejected() -> None:
    cut = replace(STEP, emitted=(7,), sources=("drafted",))
    assert list(token_styles.tokens_of(cut)) == [(5, "rejected"), (7, "drafted")]


def test_streamed_tokens_wrap_at_any_width() -> None:
    for width in (3, 7, 40):
        console = Console(file=io.StringIO(), width=width)
        assert terminal.stream(console, [STEP, STEP], "{:02d}".format) == [STEP, STEP]
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert text.split() == ["x05", "07", "x08", "*09"] * 2
        assert max(map(len, text.splitlines())) <= max(width, 4)


def test_the_tree_shows_accepted_rejected_and_untried_nodes() -> None:
    lines = shown(terminal.draft_tree(STEP, 3, "{:02d}".format)).splitlines()
    assert [re.sub(r"[^\w*()]+", " ", line).strip() for line in lines] == [
        "03",
        "x05 p 0 10 q 0 40 accept 0 25",
        "(1 not tried)",
        "07 p 0 60 q 0 30 accept 1 00",
        "x08 p 0 20 q 0 40 accept 0 50",
        "(1 not tried)",
        "*09",
    ]


def test_the_tree_in_a_narrow_terminal_has_numbers_without_names() -> None:
    assert "07 0.60 0.30 1.00" in shown(terminal.draft_tree(STEP, 3, "{:02d}".format, narrow=True), 40)


def test_every_kind_of_token_has_its_own_mark() -> None:
    assert len({style.mark for style in token_styles.STYLES.values()}) == len(token_styles.STYLES)
    assert all(style.description in shown(terminal.legend("41")) for style in token_styles.STYLES.values())


def test_charts_can_be_ascii_only() -> None:
    summary = Summary.of([STEP])
    assert "#" in shown(terminal.acceptance(summary, ascii_only=True))
    assert shown(terminal.acceptance(summary, ascii_only=True)).isascii()


def test_total_variation_is_shown_with_mean_maximum_and_sum() -> None:
    text = shown(terminal.total_variation([replace(STEP, total_variation=(0.1, 0.3)), STEP]))
    assert "0.100 per token on average, 0.300 at most, 0.40 in total" in text


@pytest.mark.slow
@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_demo_fits_its_terminal(width: int) -> None:
    text = played(Options(tokens=16), width)
    assert CODES not in text
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    words = " ".join(text.split())
    assert (
        words.count("Identical to plain decoding: greedy 16 of 16 tokens, gumbel-match (temperature 1) 16 of 16") == 2
    )
    for expected in ("tokens per pass", "acceptance rate", "by position", "Time: draft", "Total variation:"):
        assert expected in words


def test_without_colour_there_are_styles_and_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(terminal_demo, "_PAUSE", 0.0)
    monkeypatch.setenv("NO_COLOR", "1")
    text = played(Options(tokens=8), force_terminal=True)
    codes = {code for found in re.findall(r"\x1b\[([\d;]*)m", text) for code in found.split(";")}
    assert codes <= {"", "0", "1", "2", "3", "9"}, "only bold, dim, italic and strike"


def fast_subset(names: list[str]) -> list[Any]:
    """All names as parameters; all but every fourth are marked slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] if index % 4 else []) for index, name in enumerate(names)]


@pytest.mark.parametrize(
    "drafter", fast_subset([name for name, method in DRAFTERS.items() if {"model"}.issuperset(method.needs)])
)
def test_every_drafter_runs_in_the_demo(drafter: str) -> None:
    found = terminal_demo.traces(Options(drafter=drafter, tokens=12, temperature=0.0))
    assert [one.method for one in found] == ["plain", drafter] * 2
    for plain, fast in (found[:2], found[2:]):
        assert fast.tokens() == plain.tokens()
        assert Trace.from_json(fast.to_json()) == fast


@pytest.mark.slow
@pytest.mark.parametrize("rule", fast_subset(list(RULES)))
def test_every_rule_runs_in_the_demo_and_relaxed_ones_show_total_variation(rule: str) -> None:
    text = played(Options(rule=rule, tokens=8))
    relaxed = not RULES[rule].lossless
    assert text.count("Total variation: ") == (2 if relaxed else 1)
    assert ("with a relaxed rule" in text) is not relaxed


def test_the_seed_determines_the_tokens() -> None:
    def tokens(seed: int) -> list[list[int]]:
        return [one.tokens() for one in terminal_demo.traces(Options(seed=seed, tokens=12))]

    assert tokens(1) == tokens(1)
    assert tokens(1) != tokens(2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (Options(drafter="medusa-9"), "Known: .*draft-model"),
        (Options(rule="exactly"), "Did you mean 'exact'"),
        (Options(temperature=-1.0), "temperature is -1.0"),
        (Options(drafter="jacobi", rule="block"), "'block' needs a chain"),
        (Options(drafter="prompt-lookup", rule="block"), "'block' needs a chain"),
    ],
)
def test_wrong_options_fail_before_anything_is_printed(options: Options, message: str) -> None:
    console = Console(file=io.StringIO())
    with pytest.raises(OutriderError, match=message):
        terminal_demo.run(options, console)
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
