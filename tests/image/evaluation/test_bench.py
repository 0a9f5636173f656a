"""The table of `outrider bench image`: its figures, options and plots. Plain decoding takes one pass per code."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from outrider.core.bench.settings import Setting
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.errors import InvalidOption
from outrider.image.evaluation.bench import Row, code_nll, measure, pareto_front, plot, to_json
from outrider.image.model import ImageModel
from outrider.image.stream import Result


@pytest.fixture(scope="module")
def rows(im: ImageModel) -> list[Row]:
    wanted = [
        Setting(drafter="jacobi", rule="gumbel-match", drafter_options={"renew": "gumbel"}),
        Setting(drafter="jacobi", rule="annealed", rule_options={"weight": 4.0}),
    ]
    return measure(im, ["cat", "red heart", "house"], wanted, guidance_scale=1.0, batch=2)


@pytest.mark.slow
def test_plain_decoding_takes_one_pass_per_code(rows: list[Row]) -> None:
    plain = rows[0]
    assert plain.name == "plain" and plain.lossless and plain.identical == 1
    assert plain.tokens_per_pass == plain.background_per_pass == plain.foreground_per_pass == 1
    assert plain.total_variation == plain.relaxed == 0 and plain.pictures == 3


@pytest.mark.slow
def test_drafting_saves_passes_and_relaxed_rules_have_a_total_variation(rows: list[Row]) -> None:
    _, exact, relaxed = rows
    assert exact.tokens_per_pass > 1 and exact.lossless and exact.total_variation == 0
    assert exact.name == "jacobi gumbel-match (renew=gumbel)"
    assert relaxed.tokens_per_pass > 1 and not relaxed.lossless and relaxed.total_variation > 0 and relaxed.relaxed > 0
    total = 3 * 256
    for row in rows:
        low, high = sorted((row.background_per_pass, row.foreground_per_pass))
        assert low - 1e-9 <= row.tokens_per_pass <= high + 1e-9 and total / row.tokens_per_pass >= 3


def test_code_nll_equals_that_of_plain_decoding(im: ImageModel) -> None:
    (result,) = im.generate(["cat"], drafter=None, guidance_scale=2.0, seed=1)
    nll = code_nll(im, [result], None, 2.0)
    assert nll.shape == (1, 256)
    target = im.target([im.read("cat")], 2.0)
    target.begin([[im.root, *result.tokens[:9]]], Sampling())
    distribution = target.score(Draft.empty(1)).distribution(torch.zeros(1, dtype=torch.long))
    assert float(nll[0, 9]) == pytest.approx(-float(distribution.probs[0, result.tokens[9]].log()), rel=1e-4)


def test_the_table_is_written_and_plotted(rows: list[Row], tmp_path: Path) -> None:
    table = to_json(rows, {"guidance": 1.0})
    assert json.loads(json.dumps(table))["rows"][1]["drafter"] == "jacobi"
    assert plot(rows, tmp_path / "speed.png") and (tmp_path / "speed.png").stat().st_size > 5000


def test_pareto_front() -> None:
    assert pareto_front([(1.0, 5.0), (2.0, 4.0), (1.5, 3.0), (3.0, 4.5), (3.0, 1.0)]) == [0, 3]


@pytest.mark.slow
def test_quality_is_compared_with_plain_decoding_of_other_seeds(im: ImageModel, tmp_path: Path) -> None:
    def quality(results: Sequence[Result], plain: Sequence[Result]) -> dict[str, float]:
        return {"LPIPS": sum(own.tokens != base.tokens for own, base in zip(results, plain, strict=True)) / 2}

    jacobi = Setting(drafter="jacobi", rule="annealed", rule_options={"weight": 2.0})
    rows = measure(im, ["cat", "house"], [jacobi], guidance_scale=1.0, quality=quality)
    assert [row.name for row in rows] == ["plain", "plain, other seeds", "jacobi annealed (weight=2.0)"]
    assert [row.quality["LPIPS"] for row in rows[:2]] == [0, 1] and rows[1].identical == 0
    assert rows[2].options == {"weight": 2.0}
    assert plot(rows, tmp_path / "judged.png")


def test_no_prompts_are_refused(im: ImageModel) -> None:
    with pytest.raises(InvalidOption, match="no prompts"):
        measure(im, [], [])
