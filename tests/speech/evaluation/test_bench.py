"""The speech benchmark: settings, the report, entropy, and quality metrics."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.assets.store import ASSETS
from outrider.core.bench.runner import Bench, Item
from outrider.core.bench.settings import Setting
from outrider.speech.audio import Sound
from outrider.speech.evaluation import bench, samples
from outrider.speech.evaluation.bench import Quality, SpeechBench, entropy, ladder, report, summarise
from outrider.speech.evaluation.metrics import SpeechMetrics
from outrider.speech.model import SpeechModel

ITEMS = [Item("0", "everyday", "Yes."), Item("1", "numbers", "Two.")]


@pytest.mark.slow
def test_a_report_has_all_settings_and_the_entropy(speaker: SpeechModel) -> None:
    chosen = [Setting(drafter="jacobi", rule="gumbel-match"), Setting(drafter="token-recycling", rule="tolerance")]
    speech = SpeechBench(speaker, chosen, seed=3, options={"temperature": 0.9})
    measuring = Bench(speech.contenders(), ITEMS[:1])
    assert sum(1 for _ in measuring.go()) == measuring.turns == 6
    result = report(measuring, speech, {}, about={"prompts": 1})
    plain, jacobi, tolerance = result["rows"]
    assert [row["drafter"] for row in result["rows"]] == ["plain", "jacobi", "token-recycling"]
    assert plain["tokens_per_pass"] == 1 and plain["speedup"] == 1 and jacobi["speedup"] > 0
    assert plain["lossless"] and not tolerance["lossless"] and jacobi["total_variation_per_token"] == 0
    assert tolerance["setting"] == "token-recycling tolerance" and tolerance["total_variation_per_token"] >= 0
    for row in result["rows"]:
        assert 0 < row["target_entropy"] < np.log(26)
        quality = row["quality"]
        assert quality["seconds_of_sound"] > 0 and quality["factor_vocoder"] > 0 and quality["first_sound_seconds"] > 0
    assert result["settings"]["temperature"] == 0.9 and result["judged"] == 0 and not result["ladder"]


def test_entropy_at_each_token(speaker: SpeechModel) -> None:
    result = speaker.generate("Yes.", seed=1, temperature=0.3)
    nats = entropy(speaker, result)
    assert len(nats) == len(result.tokens) and (nats > 0).all()
    speaker.network.head.weight.zero_()  # a uniform distribution
    np.testing.assert_allclose(entropy(speaker, result), np.log(26), rtol=1e-5)


def quality(errors: int, words: int, overall: float = 3.0, missing_end: bool = False) -> Quality:
    return Quality(words, errors, 5 * words, errors, 3.0, 4.0, overall, 0.9, 1.0, missing_end)


def test_differences_are_paired() -> None:
    rng = np.random.default_rng(0)
    plain = [quality(int(rng.integers(0, 8)), 10) for _ in range(60)]
    same = summarise(plain, plain)["word_error"]
    assert same["apart"] == same["apart_low"] == same["apart_high"] == 0 and same["low"] < same["value"] < same["high"]
    worse = summarise([quality(each.word_errors + 1, each.words, 2.8, True) for each in plain], plain)
    error = worse["word_error"]
    for bound in ("apart", "apart_low", "apart_high"):  # one more word of ten, in every sentence
        assert abs(error[bound] - 0.1) < 1e-9
    assert abs(worse["dnsmos"]["apart"] + 0.2) < 1e-9 and worse["missing_end"]["value"] == 1
    assert error["high"] - error["low"] > 0.05
    uneven = summarise([quality(0, 2), quality(9, 18)], [quality(0, 2), quality(0, 18)])["word_error"]
    assert uneven["value"] == 9 / 20  # per word, not per sentence


def test_the_curve_is_plotted(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    summary = summarise([quality(1, 10), quality(2, 10)], [quality(1, 10), quality(1, 10)])
    rows = [
        {"drafter": name, "rule": rule, "rule_options": options, "tokens_per_pass": tokens, "quality": summary}
        for name, rule, options, tokens in (
            ("plain", "exact", {}, 1.0),
            ("medusa", "tolerance", {"tau": 3}, 1.9),
            ("medusa", "tolerance", {"tau": 9}, 2.5),
        )
    ]
    assert bench.plot({"rows": rows, "ladder": {"teacher": summary}}, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").stat().st_size > 5000
    assert not bench.plot({"rows": [{"quality": {}}], "ladder": {}}, tmp_path / "none.png")


def test_unrated_sentences_are_left_out() -> None:
    rated = Quality(4, 1, 20, 2, 3.0, 4.0, 3.5, 0.9, 1.0, False)
    unrated = replace(rated, word_errors=3, signal=math.nan, background=math.nan, overall=math.nan)
    summary = summarise([rated, unrated, rated], [rated, rated, unrated])
    assert summary["dnsmos"]["value"] == 3.5 and summary["word_error"]["value"] == pytest.approx(5 / 12)
    assert math.isfinite(summary["dnsmos"]["low"]) and summary["dnsmos"]["apart"] == 0


@pytest.mark.slow
def test_samples_of_all_rungs_for_the_first_sentences(speaker: SpeechModel, tmp_path: Path) -> None:
    pytest.importorskip("av")
    speech = SpeechBench(speaker, [Setting(drafter="jacobi", rule="tolerance", rule_options={"tau": 2})])
    for _ in Bench(speech.contenders(), ITEMS).go():
        pass
    del speech.results["jacobi tolerance (tau=2)", "1"]  # the bench was stopped there
    reading = Sound((0.1 * np.sin(np.arange(22_050) / 9)).astype(np.float32))
    first, second = samples.write_samples(speech, ITEMS, lambda text: reading, tmp_path / "heard")
    assert first["text"] == "Yes." and second == {"text": "Two.", "files": {}}
    names = {"teacher": "1-teacher", "codec": "1-codec", "plain": "1-plain"}
    names["jacobi tolerance (tau=2)"] = "1-jacobi-tolerance-tau=2"
    assert first["files"] == {name: f"heard/{file}.ogg" for name, file in names.items()}
    for file in first["files"].values():
        assert (tmp_path / file).read_bytes().startswith(b"OggS")
    many = samples.write_samples(speech, [ITEMS[0]] * 9, None, tmp_path / "heard")
    assert len(many) == samples.COUNT and list(many[0]["files"]) == ["plain", "jacobi tolerance (tau=2)"]


@pytest.mark.slow
@pytest.mark.skipif(
    not all(ASSETS[name].here for name in ("whisper-base", "dnsmos", "resemblyzer")), reason="not fetched"
)
def test_the_ladder_has_every_rung(speaker: SpeechModel) -> None:
    pytest.importorskip("faster_whisper")
    speech = SpeechBench(speaker, [Setting(drafter="jacobi", rule="gumbel-match")])
    for _ in Bench(speech.contenders(), ITEMS[:1]).go():
        pass
    torch.manual_seed(0)
    tone = Sound((0.1 * torch.randn(22_050)).numpy())
    rungs = ladder(speech, ITEMS[:1], SpeechMetrics(), lambda text: tone)
    unrated = ladder(speech, ITEMS[:1], SpeechMetrics(), None, rated=0)["plain"]
    assert math.isnan(unrated[0].overall) and unrated[0].word_errors == rungs["plain"][0].word_errors
    assert list(rungs) == ["teacher", "codec", "plain", "jacobi gumbel-match"]
    assert abs(rungs["teacher"][0].speaker_similarity - 1) < 1e-5 and rungs["teacher"][0].duration_ratio == 1
    assert rungs["plain"][0].duration_ratio > 0 and rungs["teacher"][0].overall < 2  # noise
    assert all(qualities[0].words == 1 for qualities in rungs.values())
