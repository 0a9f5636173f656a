"""The page on methods and their papers: a row for every method, whose test exists and whose number is the measured
one."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from outrider.core.methods import DRAFTERS, RULES
from outrider.core.methods.measured import fewer, verdict
from outrider.core.methods.row import Method
from outrider.text.rag.methods import METHODS

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "guides" / "methods-and-papers.md").read_text(encoding="utf-8")
PUBLISHED = [name for name, method in METHODS.items() if method.systems]
FILES = {"text": ("text/rules-1", "text/rules-3"), "image": ("image/relaxed",), "speech": ("speech/relaxed",)}
NUMBER = re.compile(r"(text|image|speech) ([\d.]+)(?: / ([\d.]+))?")


def section(title: str) -> dict[str, list[str]]:
    """The rows of the first table under a title, by method."""
    lines = PAGE.partition(f"\n## {title}\n")[2].partition("\n#")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| `")]
    assert len({row[0] for row in rows}) == len(rows), "a method has two rows"
    return {row[0].strip("`"): row[1:] for row in rows}


@pytest.mark.parametrize(
    ("title", "names"), [("Drafters", DRAFTERS), ("Rules", RULES), ("Answers from documents", PUBLISHED)]
)
def test_every_method_has_a_row_and_a_test(title: str, names: list[str]) -> None:
    rows = section(title)
    assert list(rows) == list(names)
    for name, (deviation, test, _) in rows.items():
        assert deviation, name
        assert (ROOT / test.strip("`")).is_file(), f"{name}: {test} does not exist"


def test_the_numbers_are_those_of_the_report_and_of_the_pins() -> None:
    report = (ROOT / "REPORT.md").read_text(encoding="utf-8")
    table = report.partition("## Tokens per target pass")[2].partition("![")[0]
    measured = {line.split("|")[1].strip(): line for line in table.splitlines() if line.startswith("| ")}
    pins = json.loads((ROOT / "tests" / "tokens-per-call.json").read_text(encoding="utf-8"))["tokens_per_call"]
    pair = json.loads((ROOT / "reports" / "text" / "pair-2.json").read_text(encoding="utf-8"))["rows"]
    for name, (_, _, number) in section("Drafters").items():
        found = NUMBER.findall(number)
        assert found, f"{name}: {number}"
        for modality, first, second in found:
            if "(pinned)" in number:
                assert f"{pins[modality][name]:.2f}" == first, name
            elif "(pair)" in number:
                assert first in {f"{row['tokens_per_pass']:.2f}" for row in pair if row["drafter"] == name}
            else:
                assert f"{first} / {second}" in measured[name], name
    for name, (_, _, number) in section("Rules").items():
        for modality, *values in NUMBER.findall(number):
            for value, file in zip(values, FILES[modality], strict=False):
                found = {f"{row['tokens_per_pass']:.2f}" for row in rows_of(file, name)}
                assert value in found, f"{name}, {file}"


def rows_of(file: str, rule: str) -> list[dict[str, Any]]:
    """The rows of a report's file under a rule."""
    rows = json.loads((ROOT / "reports" / f"{file}.json").read_text(encoding="utf-8"))["rows"]
    return [row for row in rows if row["rule"] == rule and row["drafter"] != "plain"]


def rows_of_default(file: str, rule: Method) -> list[dict[str, Any]]:
    """The rows of a report with a rule's default options; of Jacobi windows, in the widest one."""
    default = {**rule.options, **rule.with_defaults(file.partition("/")[0])}
    kept = []
    for row in rows_of(file, rule.name):
        given = dict(row.get("rule_options") or row.get("options") or {})
        window = given.pop("window", None)
        usual = all(default.get(name) == value for name, value in given.items())
        if row["drafter"] in ("jacobi", "draft-model") and usual and window in (None, 32):
            kept.append(row)
    return kept


@pytest.mark.parametrize("name", [name for name, rule in RULES.items() if rule.measured])
def test_rules_quote_what_the_reports_measured_of_their_defaults(name: str) -> None:
    rule = RULES[name]
    for modality, value in rule.measured.items():
        (row,) = rows_of_default(FILES[modality][0], rule)
        assert f"{row['tokens_per_pass']:.2f}" == f"{value:.2f}"
        judged = modality != "text" and not rule.lossless and rows_of_default(f"{modality}/judged", rule)
        assert (modality in rule.as_good) == bool(judged)
        assert ("not recommended" in verdict(rule, modality)) == fewer(rule, modality)


def test_what_is_judged_close_is_close() -> None:
    """Pictures: within 1 % of plain decoding in KID and FID, and no fewer recognised among five. Speech: at most half a
    point more of words wrong, DNSMOS within 0.05, and no interval that excludes no difference."""
    rows = json.loads((ROOT / "reports" / "image" / "judged.json").read_text(encoding="utf-8"))["rows"]
    plain = [row["quality"] for row in rows if row["drafter"] == "plain"]
    for name, rule in RULES.items():
        if "image" in rule.as_good:
            (found,) = (row["quality"] for row in rows if row["rule"] == name)
            assert all(found[part] < 1.01 * max(one[part] for one in plain) for part in ("KID", "FID"))
            assert found["top-5"] >= min(one["top-5"] for one in plain)
    for name, rule in RULES.items():
        if "speech" in rule.as_good:
            for found in (row["quality"] for row in rows_of_default("speech/judged", rule)):
                assert found["word_error"]["apart"] <= 0.005 and found["dnsmos"]["apart"] >= -0.05
                for part in ("word_error", "dnsmos", "speaker_similarity"):
                    assert found[part]["apart_low"] <= 0 <= found[part]["apart_high"], (name, part)


def test_rules_with_fewer_tokens_than_exact_are_said_to_be() -> None:
    assert {name for name, rule in RULES.items() if fewer(rule, "speech")} == {"threshold", "top-beta", "bild"}
    assert "judged close to plain decoding" in verdict(RULES["annealed"], "image")
    assert verdict(RULES["exact"], "image") == "" and "not measured" in verdict(RULES["grouped"], "text")
