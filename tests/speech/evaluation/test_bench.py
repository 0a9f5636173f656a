"""Measuring speech: contenders in turns, how open distributions are, and what is said of what judges heard."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.assets.store import ASSETS
from outrider.core.bench.runner import Bench, Item
from outrider.core.errors import InvalidOption
from outrider.speech.audio import Sound
from outrider.speech.evaluation import bench, samples
from outrider.speech.evaluation.bench import Heard, Setting, Speech, entropy, ladder, measured, report, settings
from outrider.speech.evaluation.metrics import Judges
from outrider.speech.model import SpeechModel

ITEMS = [Item("0", "everyday", "Yes."), Item("1", "numbers", "Two.")]


def test_settings_are_every_drafter_under_every_rule() -> None:
    given = {"tolerance.tau": [1, 3], "length": 4}
    found = settings(["jacobi", "prompt-lookup"], ["exact", "tolerance"], {"length": 4}, {"tolerance.tau": [1, 3]})
    assert [one.name for one in found if one.drafter == "prompt-lookup"] == [
        "prompt-lookup (length=4)",
        "prompt-lookup tolerance (length=4, tau=1)",
        "prompt-lookup tolerance (length=4, tau=3)",
    ]
    with pytest.raises(InvalidOption, match=r"'tolerance\.tau' belongs to none"):
        settings(["jacobi"], ["exact"], {}, given)


@pytest.mark.slow
def test_a_report_has_everybody_and_how_open_the_laws_are(speaker: SpeechModel) -> None:
    chosen = [Setting(drafter="jacobi", rule="gumbel-match"), Setting(drafter="token-recycling", rule="tolerance")]
    speech = Speech(speaker, chosen, seed=3, options={"temperature": 0.9})
    measuring = Bench(speech.contenders(), ITEMS[:1])
    assert sum(1 for _ in measuring.go()) == measuring.turns == 6
    found = report(measuring, speech, {}, about={"prompts": 1})
    plain, jacobi, tolerance = found["rows"]
    assert [row["drafter"] for row in found["rows"]] == ["plain", "jacobi", "token-recycling"]
    assert plain["tokens_per_pass"] == 1 and plain["speedup"] == 1 and jacobi["speedup"] > 0
    assert plain["lossless"] and not tolerance["lossless"] and jacobi["price_per_token"] == 0
    assert tolerance["setting"] == "token-recycling tolerance" and tolerance["price_per_token"] >= 0
    for row in found["rows"]:
        assert 0 < row["target_entropy"] < np.log(26)
        told = row["quality"]
        assert told["seconds_of_sound"] > 0 and told["factor_vocoder"] > 0 and told["first_heard"] > 0
    assert found["settings"]["temperature"] == 0.9 and found["judged"] == 0 and not found["ladder"]


def test_entropy_is_that_of_the_law_at_every_token(speaker: SpeechModel) -> None:
    said = speaker.generate("Yes.", seed=1, temperature=0.3)
    found = entropy(speaker, said)
    assert len(found) == len(said.tokens) and (found > 0).all()
    speaker.network.head.weight.zero_()  # all tokens alike
    np.testing.assert_allclose(entropy(speaker, said), np.log(26), rtol=1e-5)


def heard(wrong: int, words: int, overall: float = 3.0, unended: bool = False) -> Heard:
    return Heard(words, wrong, 5 * words, wrong, 3.0, 4.0, overall, 0.9, 1.0, unended)


def test_differences_are_paired() -> None:
    draw = np.random.default_rng(0)
    plain = [heard(int(draw.integers(0, 8)), 10) for _ in range(60)]
    same = measured(plain, plain)["word_error"]
    assert same["apart"] == same["apart_low"] == same["apart_high"] == 0 and same["low"] < same["value"] < same["high"]
    worse = measured([heard(one.wrong + 1, one.words, 2.8, True) for one in plain], plain)
    error = worse["word_error"]
    for bound in ("apart", "apart_low", "apart_high"):  # one more word of ten, in every sentence
        assert abs(error[bound] - 0.1) < 1e-9
    assert abs(worse["dnsmos"]["apart"] + 0.2) < 1e-9 and worse["missing_end"]["value"] == 1
    assert error["high"] - error["low"] > 0.05
    uneven = measured([heard(0, 2), heard(9, 18)], [heard(0, 2), heard(0, 18)])["word_error"]
    assert uneven["value"] == 9 / 20  # of all words, not of sentences


def test_a_curve_is_drawn_of_what_was_judged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quality = measured([heard(1, 10), heard(2, 10)], [heard(1, 10), heard(1, 10)])
    rows = [
        {"drafter": name, "rule": rule, "rule_options": told, "tokens_per_pass": calls, "quality": quality}
        for name, rule, told, calls in (
            ("plain", "exact", {}, 1.0),
            ("medusa", "tolerance", {"tau": 3}, 1.9),
            ("medusa", "tolerance", {"tau": 9}, 2.5),
        )
    ]
    assert bench.plot({"rows": rows, "ladder": {"teacher": quality}}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert not bench.plot({"rows": [{"quality": {}}], "ladder": {}}, tmp_path / "none.png")


def test_what_is_not_rated_does_not_count() -> None:
    one = Heard(4, 1, 20, 2, 3.0, 4.0, 3.5, 0.9, 1.0, False)
    other = replace(one, wrong=3, signal=math.nan, background=math.nan, overall=math.nan)
    found = measured([one, other, one], [one, one, other])
    assert found["dnsmos"]["value"] == 3.5 and found["word_error"]["value"] == pytest.approx(5 / 12)
    assert math.isfinite(found["dnsmos"]["low"]) and found["dnsmos"]["apart"] == 0


@pytest.mark.slow
def test_samples_are_of_everybody_and_of_few(speaker: SpeechModel, tmp_path: Path) -> None:
    pytest.importorskip("av")
    speech = Speech(speaker, [Setting(drafter="jacobi", rule="tolerance", rule_options={"tau": 2})])
    for _ in Bench(speech.contenders(), ITEMS).go():
        pass
    del speech.said["jacobi tolerance (tau=2)", "1"]  # stopped there
    reading = Sound((0.1 * np.sin(np.arange(22_050) / 9)).astype(np.float32))
    first, second = samples.written(speech, ITEMS, lambda text: reading, tmp_path / "heard")
    assert first["text"] == "Yes." and second == {"text": "Two.", "files": {}}
    names = {"teacher": "1-teacher", "codec": "1-codec", "plain": "1-plain"}
    names["jacobi tolerance (tau=2)"] = "1-jacobi-tolerance-tau=2"
    assert first["files"] == {name: f"heard/{file}.ogg" for name, file in names.items()}
    for file in first["files"].values():
        assert (tmp_path / file).read_bytes().startswith(b"OggS")
    many = samples.written(speech, [ITEMS[0]] * 9, None, tmp_path / "heard")
    assert len(many) == samples.COUNT and list(many[0]["files"]) == ["plain", "jacobi tolerance (tau=2)"]


@pytest.mark.slow
@pytest.mark.skipif(
    not all(ASSETS[name].here for name in ("whisper-base", "dnsmos", "resemblyzer")), reason="not fetched"
)
def test_the_ladder_has_every_rung(speaker: SpeechModel) -> None:
    pytest.importorskip("faster_whisper")
    speech = Speech(speaker, [Setting(drafter="jacobi", rule="gumbel-match")])
    for _ in Bench(speech.contenders(), ITEMS[:1]).go():
        pass
    torch.manual_seed(0)
    tone = Sound((0.1 * torch.randn(22_050)).numpy())
    found = ladder(speech, ITEMS[:1], Judges(), lambda text: tone)
    unrated = ladder(speech, ITEMS[:1], Judges(), None, rated=0)["plain"]
    assert math.isnan(unrated[0].overall) and unrated[0].wrong == found["plain"][0].wrong
    assert list(found) == ["teacher", "codec", "plain", "jacobi gumbel-match"]
    assert abs(found["teacher"][0].alike - 1) < 1e-5 and found["teacher"][0].ratio == 1
    assert found["plain"][0].ratio > 0 and found["teacher"][0].overall < 2  # noise is no speech
    assert all(one[0].words == 1 for one in found.values())
