"""Measures of quality: against other computations of the same numbers, and where the answer is known."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm
from torch import Tensor

from outrider.core.assets.store import ASSETS
from outrider.core.errors import InvalidOption
from outrider.image.evaluation.inception_lpips import Lpips
from outrider.image.evaluation.quality import Judges, fid, kid, nearest, precision_recall, tensors, usage
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.classifier import Classifier, agreement, taught
from outrider.image.training.data import Drawn, split


def drawn(count: int, width: int, shift: float = 0.0, spread: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) * spread + shift


def test_fid_is_that_of_the_roots_of_covariances() -> None:
    x, y = drawn(60, 5, seed=1), drawn(80, 5, 0.4, 1.5, seed=2)
    a, b = np.cov(x.numpy().T), np.cov(y.numpy().T)
    means = float((x.mean(0) - y.mean(0)).square().sum())
    wanted = means + float(np.trace(a + b - 2 * np.real(sqrtm(a @ b))))
    assert fid(x, y) == pytest.approx(wanted, rel=1e-9)
    assert fid(x, x) == pytest.approx(0, abs=1e-9)


def test_fid_of_two_gaussians_is_known() -> None:
    x, y = drawn(40_000, 1, seed=1), drawn(40_000, 1, 3.0, 2.0, seed=2)
    wanted = (x.mean() - y.mean()) ** 2 + (x.std() - y.std()) ** 2  # about 3^2 + 1^2
    some = torch.linspace(0, 39_999, 300).long()
    assert float(wanted) == pytest.approx(10, rel=0.05)
    x, y = x.sort(0).values[some], y.sort(0).values[some]
    wanted = (x.mean() - y.mean()) ** 2 + (x.std() - y.std()) ** 2
    assert fid(x, y) == pytest.approx(float(wanted), rel=1e-9)


def test_kid_sums_over_all_pairs_and_has_no_bias() -> None:
    x, y = drawn(7, 3, seed=1), drawn(9, 3, 0.5, seed=2)

    def kernel(one: Tensor, other: Tensor) -> float:
        return float((one @ other / 3 + 1) ** 3)

    def among(all_: Tensor) -> float:
        found = [kernel(a, b) for i, a in enumerate(all_) for j, b in enumerate(all_) if i != j]
        return sum(found) / len(found)

    across = sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))
    assert kid(x, y) == pytest.approx(among(x) + among(y) - 2 * across, rel=1e-9)
    same = [kid(drawn(50, 4, seed=2 * n), drawn(50, 4, seed=2 * n + 1)) for n in range(200)]
    assert abs(np.mean(same)) < 4 * np.std(same) / len(same) ** 0.5
    assert min(kid(drawn(50, 4, 1.0, seed=n), drawn(50, 4, seed=n + 9)) for n in range(20)) > 0.5


def test_precision_and_recall_tell_what_is_wrong() -> None:
    real = torch.cat([drawn(100, 2, 0.0, 0.1, seed=1), drawn(100, 2, 5.0, 0.1, seed=2)])
    one = drawn(100, 2, 0.0, 0.1, seed=3)  # half of what is real, and nothing else
    precision, recall = precision_recall(one, real)
    assert precision > 0.85 and 0.4 < recall < 0.52
    precision, recall = precision_recall(torch.cat([one, drawn(100, 2, -9.0, 0.1, seed=4)]), real)
    assert 0.4 < precision < 0.52
    assert precision_recall(real, real) == (1.0, 1.0)
    with pytest.raises(InvalidOption, match="can't be compared"):
        precision_recall(one[:3], real)


def test_codes_in_use() -> None:
    even, one = torch.arange(8), torch.zeros(8, dtype=torch.long)
    assert usage(even, even, 8) == pytest.approx({"codes": 8.0, "codes apart": 0.0})
    apart = usage(even[:4], even[4:], 8)
    assert apart["codes"] == pytest.approx(4) and apart["codes apart"] == pytest.approx(np.log(2))
    assert usage(one, even, 8)["codes"] == pytest.approx(1)


def test_the_nearest_learned_picture() -> None:
    learned = torch.stack([torch.full((3, 4, 4), value) for value in (-1.0, 0.0, 1.0)])
    found = nearest(torch.stack([learned[1], learned[2] - 0.25]), learned)
    torch.testing.assert_close(found, torch.tensor([0.0, 0.25]), atol=1e-3, rtol=0)


def test_agreement_looks_among_common_names_for_common_ones() -> None:
    names, features = ("red heart", "blue square", "pizza", "Fire"), drawn(24, 12, seed=3).float()
    made = Classifier.fitted(names, features, torch.arange(24) % 4, width=8)
    assert made.place("Red Heart!") == 0 and made.place("green square") is None
    assert made.common == [0, 2, 3]
    said = made.says(features[:3])
    ranks = made.ranks(features[:3], ["pizza", "blue square", "nothing of the kind"])
    assert int(ranks[0]) == int((said[0, [0, 2, 3]] > said[0, 2]).sum())
    assert int(ranks[1]) == int((said[1] > said[1, 1]).sum()) and int(ranks[2]) == -1
    assert agreement(torch.tensor([0, 4, 5, -1])) == pytest.approx({"top-1": 1 / 3, "top-5": 2 / 3})
    assert agreement(torch.tensor([-1])) == {}


def test_a_judge_overlooks_what_differs_within_names() -> None:
    """Names differ a little in five directions, pictures of the same name a lot in all others."""
    named = torch.arange(400) % 5
    features = drawn(400, 30, spread=3.0, seed=1)
    features[:, :5] = torch.nn.functional.one_hot(named, 5) + drawn(400, 5, spread=0.05, seed=2)
    names = [f"name {place}" for place in range(5)]
    near = torch.cdist(features[300:], torch.stack([features[:300][named[:300] == one].mean(0) for one in range(5)]))
    made = Classifier.fitted(names, features[:300], named[:300], width=30, shrink=0.001)
    right = (made.says(features[300:].float()).argmax(1) == named[300:]).float().mean()
    assert right > 0.9 and (near.argmin(1) == named[300:]).float().mean() < 0.5


def test_a_judge_is_judged_on_styles_it_has_not_seen(codec: Tokenizer) -> None:
    def drawing(name: str, red: int, place: int) -> Drawn:
        return dataclasses.replace(square(red, place), name=name)

    common = [("red heart", 240, 4), ("pizza", 140, 20), ("fire", 60, 34), ("sun", 10, 12)]
    sets = {style: [drawing(name, red, place + n) for name, red, place in common] for n, style in enumerate("abc")}

    def look(pictures: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(pictures, 8).flatten(1)

    judge, right = taught(split(sets), codec, look, width=16)
    assert judge.names == ("red heart", "pizza", "fire", "sun") == tuple(judge.names[one] for one in judge.common)
    assert right["common names, real pictures"] == {"top-1": 1.0, "top-5": 1.0}
    assert right["held-out names, real pictures"] == {}
    with pytest.raises(InvalidOption, match="two styles"):
        taught(split({"a": sets["a"]}), codec, look)


def square(red: int, place: int) -> Drawn:
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[place : place + 24, place : place + 24] = (red, 20, 30)
    return Drawn(f"square {red} {place}", (), pixels)


@pytest.mark.skipif(not ASSETS["lpips"].here, reason="the weights of LPIPS are not here")
def test_lpips_is_about_looks() -> None:
    eyes = Lpips.fetched()
    pictures = tensors([Image.fromarray(square(red, 8).pixels) for red in (220, 120)])
    assert eyes.apart(pictures, pictures).tolist() == [0, 0]
    moved, other = eyes.apart(pictures, pictures.roll(1, -1)), eyes.apart(pictures, pictures.roll(24, -1))
    recoloured = eyes.apart(pictures[:1], pictures[1:])
    assert float(moved.max()) < 0.1 < float(other.min()) and float(moved.max()) < float(recoloured) * 2


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["lpips"].here or not ASSETS["inception"].here, reason="the judges are not here")
def test_judges_tell_real_pictures_from_noise(
    codec: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = [square(red, place) for red in (40, 120, 220) for place in (4, 12, 20, 30)]
    pictures = split({"noto": drawn})
    named = [one.name for one in drawn]
    classifier = Classifier(names=tuple(named)).eval()
    judges = Judges(pictures, codec, classifier, "noto")
    monkeypatch.setattr("outrider.image.evaluation.inception_lpips.cache_folder", lambda: tmp_path)
    images = [Image.fromarray(one.pixels) for one in drawn]
    noise = [Image.fromarray(one) for one in np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), np.uint8)]
    codes = codec.encode(tensors(images))
    good, bad = judges.judge(images, codes, named, images), judges.judge(noise, codes[:8], named[:8], images[:8])
    assert good["LPIPS"] == 0 and good["KID"] < bad["KID"] and good["FID"] < bad["FID"]
    assert good["precision"] > 0.5 > bad["precision"] and bad["LPIPS"] > 0.3
    assert good["nearest"] < 0.05 < bad["nearest"] and {"top-1", "top-5", "codes"} <= set(good)
    assert len(list((tmp_path / "features").glob("*.npy"))) == 1
