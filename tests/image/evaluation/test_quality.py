"""Quality metrics against independent computations, and on inputs with a known answer."""

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
from outrider.image.classifier import Classifier, top_k_accuracy
from outrider.image.evaluation.quality import (
    QualityMetrics,
    code_usage,
    fid,
    kid,
    nearest_distance,
    precision_recall,
    to_tensor,
)
from outrider.image.inception_lpips import Lpips
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.classifier import train_classifier
from outrider.image.training.data import Picture, split


def normal(count: int, width: int, shift: float = 0.0, spread: float = 1.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator, dtype=torch.float64) * spread + shift


def test_fid_equals_the_formula_with_matrix_roots() -> None:
    x, y = normal(60, 5, seed=1), normal(80, 5, 0.4, 1.5, seed=2)
    a, b = np.cov(x.numpy().T), np.cov(y.numpy().T)
    means = float((x.mean(0) - y.mean(0)).square().sum())
    expected = means + float(np.trace(a + b - 2 * np.real(sqrtm(a @ b))))
    assert fid(x, y) == pytest.approx(expected, rel=1e-9)
    assert fid(x, x) == pytest.approx(0, abs=1e-9)


def test_fid_of_one_dimensional_gaussians() -> None:
    x, y = normal(40_000, 1, seed=1), normal(40_000, 1, 3.0, 2.0, seed=2)
    expected = (x.mean() - y.mean()) ** 2 + (x.std() - y.std()) ** 2  # about 3^2 + 1^2
    quantiles = torch.linspace(0, 39_999, 300).long()
    assert float(expected) == pytest.approx(10, rel=0.05)
    x, y = x.sort(0).values[quantiles], y.sort(0).values[quantiles]
    expected = (x.mean() - y.mean()) ** 2 + (x.std() - y.std()) ** 2
    assert fid(x, y) == pytest.approx(float(expected), rel=1e-9)


def test_kid_sums_over_all_pairs_and_is_unbiased() -> None:
    x, y = normal(7, 3, seed=1), normal(9, 3, 0.5, seed=2)

    def kernel(a: Tensor, b: Tensor) -> float:
        return float((a @ b / 3 + 1) ** 3)

    def within(rows: Tensor) -> float:
        values = [kernel(a, b) for i, a in enumerate(rows) for j, b in enumerate(rows) if i != j]
        return sum(values) / len(values)

    across = sum(kernel(a, b) for a in x for b in y) / (len(x) * len(y))
    assert kid(x, y) == pytest.approx(within(x) + within(y) - 2 * across, rel=1e-9)
    same = [kid(normal(50, 4, seed=2 * n), normal(50, 4, seed=2 * n + 1)) for n in range(200)]
    assert abs(np.mean(same)) < 4 * np.std(same) / len(same) ** 0.5
    assert min(kid(normal(50, 4, 1.0, seed=n), normal(50, 4, seed=n + 9)) for n in range(20)) > 0.5


def test_precision_and_recall() -> None:
    real = torch.cat([normal(100, 2, 0.0, 0.1, seed=1), normal(100, 2, 5.0, 0.1, seed=2)])
    half = normal(100, 2, 0.0, 0.1, seed=3)  # covers one of the two real clusters
    precision, recall = precision_recall(half, real)
    assert precision > 0.85 and 0.4 < recall < 0.52
    precision, recall = precision_recall(torch.cat([half, normal(100, 2, -9.0, 0.1, seed=4)]), real)
    assert 0.4 < precision < 0.52
    assert precision_recall(real, real) == (1.0, 1.0)
    with pytest.raises(InvalidOption, match="takes 4 of each"):
        precision_recall(half[:3], real)


def test_code_usage() -> None:
    uniform, constant = torch.arange(8), torch.zeros(8, dtype=torch.long)
    assert code_usage(uniform, uniform, 8) == pytest.approx({"codes": 8.0, "code divergence": 0.0})
    disjoint = code_usage(uniform[:4], uniform[4:], 8)
    assert disjoint["codes"] == pytest.approx(4) and disjoint["code divergence"] == pytest.approx(np.log(2))
    assert code_usage(constant, uniform, 8)["codes"] == pytest.approx(1)


def test_distance_to_the_nearest_training_picture() -> None:
    training = torch.stack([torch.full((3, 4, 4), value) for value in (-1.0, 0.0, 1.0)])
    distances = nearest_distance(torch.stack([training[1], training[2] - 0.25]), training)
    torch.testing.assert_close(distances, torch.tensor([0.0, 0.25]), atol=1e-3, rtol=0)


def test_common_names_are_ranked_among_common_names() -> None:
    names, features = ("red heart", "blue square", "pizza", "Fire"), normal(24, 12, seed=3).float()
    classifier = Classifier.fit(names, features, torch.arange(24) % 4, width=8)
    assert classifier.index("Red Heart!") == 0 and classifier.index("green square") is None
    assert classifier.common == [0, 2, 3]
    similarities = classifier.similarities(features[:3])
    ranks = classifier.ranks(features[:3], ["pizza", "blue square", "an unknown name"])
    assert int(ranks[0]) == int((similarities[0, [0, 2, 3]] > similarities[0, 2]).sum())
    assert int(ranks[1]) == int((similarities[1] > similarities[1, 1]).sum()) and int(ranks[2]) == -1
    assert top_k_accuracy(torch.tensor([0, 4, 5, -1])) == pytest.approx({"top-1": 1 / 3, "top-5": 2 / 3})
    assert top_k_accuracy(torch.tensor([-1])) == {}


def test_the_classifier_ignores_variance_within_names() -> None:
    """Names differ slightly in five dimensions, pictures of one name strongly in all others."""
    labels = torch.arange(400) % 5
    features = normal(400, 30, spread=3.0, seed=1)
    features[:, :5] = torch.nn.functional.one_hot(labels, 5) + normal(400, 5, spread=0.05, seed=2)
    names = [f"name {index}" for index in range(5)]
    means = torch.stack([features[:300][labels[:300] == label].mean(0) for label in range(5)])
    nearest_mean = torch.cdist(features[300:], means).argmin(1)
    classifier = Classifier.fit(names, features[:300], labels[:300], width=30, shrink=0.001)
    accuracy = (classifier.similarities(features[300:].float()).argmax(1) == labels[300:]).float().mean()
    assert accuracy > 0.9 and (nearest_mean == labels[300:]).float().mean() < 0.5


def test_the_classifier_is_evaluated_on_styles_left_out(codec: Tokenizer) -> None:
    def named_square(name: str, red: int, offset: int) -> Picture:
        return dataclasses.replace(square(red, offset), name=name)

    common = [("red heart", 240, 4), ("pizza", 140, 20), ("fire", 60, 34), ("sun", 10, 12)]
    sets = {
        style: [named_square(name, red, offset + n) for name, red, offset in common] for n, style in enumerate("abc")
    }

    def extract(pictures: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(pictures, 8).flatten(1)

    classifier, accuracy = train_classifier(split(sets), codec, extract, width=16)
    assert classifier.names == ("red heart", "pizza", "fire", "sun") and classifier.common == [0, 1, 2, 3]
    assert accuracy["common names, real images"] == {"top-1": 1.0, "top-5": 1.0}
    assert accuracy["held-out names, real images"] == {}
    with pytest.raises(InvalidOption, match="two styles"):
        train_classifier(split({"a": sets["a"]}), codec, extract)


def square(red: int, offset: int) -> Picture:
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[offset : offset + 24, offset : offset + 24] = (red, 20, 30)
    return Picture(f"square {red} {offset}", (), pixels)


@pytest.mark.skipif(not ASSETS["lpips"].here, reason="the weights of LPIPS are not here")
def test_lpips_grows_with_visible_differences() -> None:
    lpips = Lpips.pretrained()
    pictures = to_tensor([Image.fromarray(square(red, 8).pixels) for red in (220, 120)])
    assert lpips.distance(pictures, pictures).tolist() == [0, 0]
    near, far = lpips.distance(pictures, pictures.roll(1, -1)), lpips.distance(pictures, pictures.roll(24, -1))
    recoloured = lpips.distance(pictures[:1], pictures[1:])
    assert float(near.max()) < 0.1 < float(far.min()) and float(near.max()) < float(recoloured) * 2


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["lpips"].here or not ASSETS["inception"].here, reason="the networks are not here")
def test_metrics_tell_real_pictures_from_noise(
    codec: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    squares = [square(red, offset) for red in (40, 120, 220) for offset in (4, 12, 20, 30)]
    names = [picture.name for picture in squares]
    metrics = QualityMetrics(split({"noto": squares}), codec, Classifier(names=tuple(names)).eval(), "noto")
    monkeypatch.setattr("outrider.image.inception_lpips.cache_folder", lambda: tmp_path)
    images = [Image.fromarray(picture.pixels) for picture in squares]
    noise = [Image.fromarray(pixels) for pixels in np.random.default_rng(0).integers(0, 256, (8, 64, 64, 3), np.uint8)]
    codes = codec.encode(to_tensor(images))
    good, bad = metrics.measure(images, codes, names, images), metrics.measure(noise, codes[:8], names[:8], images[:8])
    assert good["LPIPS"] == 0 and good["KID"] < bad["KID"] and good["FID"] < bad["FID"]
    assert good["precision"] > 0.5 > bad["precision"] and bad["LPIPS"] > 0.3
    assert good["nearest distance"] < 0.05 < bad["nearest distance"] and {"top-1", "top-5", "codes"} <= set(good)
    assert len(list((tmp_path / "features").glob("*.npy"))) == 1
