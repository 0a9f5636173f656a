"""Training of the image models: splits, files, every recipe, resuming a run, and batches."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from outrider.core.assets.store import ASSETS
from outrider.core.training.model_training import ModelTraining
from outrider.core.training.recipes import Shelf
from outrider.core.training.request import TrainingRequest
from outrider.core.training.trainer import Plan, Trainer
from outrider.image import recipes
from outrider.image.model import load
from outrider.image.prompt_encoder import COMMON, PromptEncoder
from outrider.image.token_model import TokenModel
from outrider.image.tokenizer import Tokenizer
from outrider.image.training.data import HELD_NAME, HELD_PAIR, TRAIN, DataError, Picture, Pictures, on_white, split
from outrider.image.training.objectives import Batches, ImitationObjective, ImitationTask, TokensTask
from outrider.image.training.run import _words, train
from outrider.image.training.tokenizer_objective import CodecObjective, CodecTask


def square(name: str, colour: tuple[int, int, int], side: int, offset: int = 16) -> Picture:
    pixels = np.full((64, 64, 3), 255, np.uint8)
    pixels[offset : offset + side, offset : offset + side] = colour
    return Picture(name, (f"{name.split()[0]} thing",), pixels)


COLOURS = {"red": (220, 20, 30), "green": (20, 180, 60), "blue": (30, 40, 220), "black": (20, 20, 20)}


@pytest.fixture(scope="module")
def pictures() -> Pictures:
    """Squares of four colours and eleven sizes, in two styles."""
    sets = {
        style: [
            square(f"{colour} square {side}", value, side, 12 + offset)
            for colour, value in COLOURS.items()
            for side in range(8, 40, 3)
        ]
        for style, offset in (("noto", 0), ("fluent", 8))
    }
    return split(sets)


def test_names_are_held_out_in_every_style(pictures: Pictures) -> None:
    splits: dict[str, set[int]] = {}
    for name, part in zip(pictures.names, pictures.split.tolist(), strict=True):
        splits.setdefault(name, set()).add(part)
    held_out = {name for name, parts in splits.items() if HELD_NAME in parts}
    assert held_out and all(splits[name] == {HELD_NAME} for name in held_out)
    assert any(HELD_PAIR in parts and TRAIN in parts for parts in splits.values())
    common = split({"noto": [square(name, (1, 2, 3), 8) for name in COMMON]})
    assert (common.split == TRAIN).all()  # common names of a single style are never held out


def test_a_prepared_file_reads_back(pictures: Pictures, tmp_path: Path) -> None:
    file = tmp_path / "pictures.npz"
    pictures.save(file)
    again = Pictures.load(file)
    assert again.names == pictures.names and again.keywords == pictures.keywords
    assert np.array_equal(again.pixels, pictures.pixels) and np.array_equal(again.split, pictures.split)
    assert "88 images (noto 44, fluent 44)" in again.describe()
    (tmp_path / "broken.npz").write_bytes(file.read_bytes()[:2000])
    with pytest.raises(DataError, match="not a prepared set"):
        Pictures.load(tmp_path / "broken.npz")


def test_transparent_pixels_become_white() -> None:
    import io

    from PIL import Image

    image = Image.new("RGBA", (72, 72), (0, 0, 0, 0))
    image.paste((255, 0, 0, 255), (20, 20, 52, 52))
    out = io.BytesIO()
    image.save(out, "PNG")
    pixels = on_white(out.getvalue())
    assert pixels.shape == (64, 64, 3)
    assert (pixels[0, 0] == 255).all() and pixels[32, 32].tolist() == [255, 0, 0]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pictures: Pictures) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(Shelf, "shipped", lambda _: tmp_path / "none")
    pictures.save(tmp_path / "pictures" / "emoji-64.npz")
    return tmp_path


SMALL = {"levels": (4, 3, 3), "channels": (8, 16, 16)}
TINY = {"width": 32, "layers": 2, "heads": 2, "hidden": 48, "plan": 8}


def curve_of(folder: Path, name: str) -> list[dict[str, float]]:
    return [row["models"][name] for row in json.loads((folder / "curve.json").read_text())]


@pytest.mark.slow
def test_every_recipe_trains_and_the_model_generates(cache: Path) -> None:
    said: list[str] = []
    wanted = {"steps": 40, "minutes": 5.0, "batch": 8, "quiet": True}
    train(TrainingRequest(recipes=("image-tokenizer",), options=SMALL, **wanted), said.append)  # type: ignore[arg-type]
    with pytest.raises(recipes.NoWeights, match="image-plan"):
        train(TrainingRequest(recipes=("image-tokens",), options=TINY, **wanted), said.append)  # type: ignore[arg-type]
    train(TrainingRequest(recipes=("image-plan",), options={"channels": 8}, **wanted), said.append)  # type: ignore[arg-type]
    plan = curve_of(recipes.home("image-plan"), "image-plan")
    assert plan[-1]["NLL, training"] < plan[0]["NLL, training"] - 0.5
    train(TrainingRequest(recipes=("image-tokens",), options=TINY, **wanted), said.append)  # type: ignore[arg-type]
    codec = recipes.home("image-tokenizer")
    curve = curve_of(codec, "image-tokenizer")
    assert curve[-1]["PSNR"] > curve[0]["PSNR"] + 3
    tokens = curve_of(recipes.home("image-tokens"), "image-tokens")
    assert tokens[-1]["NLL"] < tokens[0]["NLL"] - 0.5
    assert {"NLL, held-out names", "NLL, held-out pairs", "NLL, training", "foreground perplexity"} <= set(tokens[-1])
    for name, file in (("image-tokenizer", "diffusion_pytorch_model"), ("image-tokens", "tokens")):
        start, again = recipes.home(name) / f"{file}.safetensors", cache / "again" / name
        options = SMALL if name == "image-tokenizer" else TINY
        more = TrainingRequest(recipes=(name,), options=options, start=start, out=again, **{**wanted, "steps": 1})  # type: ignore[arg-type]
        train(more, said.append)
        second, first = (curve_of(folder, name) for folder in (again, start.parent))
        measure = "PSNR" if name == "image-tokenizer" else "NLL"
        assert second[0][measure] == pytest.approx(first[-1][measure], abs=0.1), "it starts from the given weights"
    assert any("tensors start from" in line for line in said)
    im = load("emoji", dtype="float32")
    assert im.styles == ("noto", "fluent") and "square" in im.prompt_encoder.words
    assert im.generate("red square", style="noto", seed=1).image.size == (64, 64)
    about = json.loads((recipes.home("image-tokens") / "tokens.json").read_text())
    assert about["provenance"]["recipe"] == "image-tokens" and about["bytes"] < 200_000
    plain = im.generate("red square", drafter=None, rule="gumbel-match", seed=2)
    parts = (("image-draft", TINY), ("image-medusa", None), ("image-spatial", None), ("image-eagle", None))
    for name, options in parts:
        train(TrainingRequest(recipes=(name,), options=options, **{**wanted, "steps": 4}), said.append)  # type: ignore[arg-type]
    im = load("emoji", dtype="float32")
    for drafter in ("draft-model", "medusa", "spatial", "eagle", "eagle2"):
        result = im.generate("red square", drafter=drafter, rule="gumbel-match", seed=2)
        assert result.tokens == plain.tokens and result.trace.method == drafter


@pytest.mark.slow
@pytest.mark.skipif(not ASSETS["inception"].here, reason="Inception is not here")
def test_the_classifier_is_fitted_and_loads_again(
    codec: Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "tokenizer", lambda: codec)
    monkeypatch.setattr("outrider.image.inception_lpips.cache_folder", lambda: tmp_path)
    sets = {
        style: [square("red heart", (240, 20, 30), 20 + n), square("pizza", (30, 90, 20 * n), 40, 4)]
        for n, style in enumerate(("noto", "fluent"))
    }
    split(sets).save(tmp_path / "pictures.npz")
    said: list[str] = []
    train(TrainingRequest(recipes=("image-classifier",), data=tmp_path / "pictures.npz", out=tmp_path), said.append)
    classifier = recipes.classifier(tmp_path)
    assert classifier.names == ("red heart", "pizza") and classifier.config["features"] == 2048
    about = json.loads((tmp_path / "classifier.json").read_text())["provenance"][recipes.ACCURACY]
    assert about["common names, real images"]["top-5"] == 1.0 and any("top-1" in line for line in said)
    assert len(list((tmp_path / "features").glob("*.npy"))) == 2


@pytest.mark.slow
def test_a_resumed_run_equals_an_uninterrupted_one(pictures: Pictures, tmp_path: Path) -> None:
    def run(out: Path, steps: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = CodecObjective(Tokenizer(recipes_layout()))
        task = CodecTask(pictures, 4, 0, torch.device("cpu"))
        plan = Plan(minutes=1e6, steps=steps, precision="no", warmup=0.0, floor=1.0, average=0.998, validations=1)
        Trainer(ModelTraining("codec", model, task, lambda model, facts: None), plan, out, quiet=True).run()
        return dict(model.state_dict())

    whole = run(tmp_path / "whole", 6)
    run(tmp_path / "parts", 3)
    state = json.loads((tmp_path / "parts" / "checkpoint" / "state.json").read_text())
    assert state["steps"] == 3
    parts = run(tmp_path / "parts", 6)
    state = json.loads((tmp_path / "parts" / "checkpoint" / "state.json").read_text())
    assert state["steps"] == 6 and len(state["history"]) == 3
    assert whole.keys() == parts.keys()
    assert all(torch.allclose(whole[name], parts[name], atol=1e-6) for name in whole)


def recipes_layout() -> object:
    from outrider.image.tokenizer import Layout

    return Layout(**SMALL)  # type: ignore[arg-type]


def test_a_batch_depends_on_its_number_alone(pictures: Pictures, codec: Tokenizer) -> None:
    encoder = PromptEncoder(36, pictures.styles, _words(pictures))
    task = TokensTask(pictures, codec, encoder, 8, 0, torch.device("cpu"))
    ids, codes = task.batch(3, 0.0)
    again = TokensTask(pictures, codec, encoder, 8, 0, torch.device("cpu")).batch(3, 0.7)
    assert torch.equal(ids, again[0]) and torch.equal(codes, again[1])
    assert not torch.equal(codes, task.batch(4, 0.0)[1])
    assert ids.shape == (8, encoder.length + 256) and codes.shape == (8, 256)
    assert (ids[:, encoder.length] == codec.white).all() and int(codes.max()) < 36
    assert (ids[:, : encoder.length] >= 36).all() and int(ids.max()) < encoder.size
    held_out = {pictures.names[index] for index in pictures.indices(HELD_NAME)}
    trained = {pictures.names[index] for number in range(40) for index in task.batches.indices(number)}
    assert not trained & held_out
    everything = Batches(pictures, 8, 0, torch.device("cpu"), hold_out=False)
    trained = {pictures.names[index] for number in range(40) for index in everything.indices(number)}
    assert held_out < trained and set(_words(pictures)) <= set(_words(pictures, hold_out=False))


@pytest.mark.slow
def test_a_small_model_imitates_the_large_one(pictures: Pictures, codec: Tokenizer, tokens: TokenModel) -> None:
    torch.manual_seed(0)
    tokens_task = TokensTask(pictures, codec, tokens.prompt_encoder, 4, 0, torch.device("cpu"))
    imitation = ImitationTask(tokens_task, tokens.network(), 2.0)
    other = {**tokens.config, "layers": 1, "drop": 0.0}
    model = ImitationObjective(TokenModel(**other), tokens)  # type: ignore[arg-type]
    own, again = imitation.batch(1, 0.0), imitation.batch(3, 0.0)
    assert torch.equal(own[0], again[0]) and not torch.equal(own[2], again[2])  # the same pictures, another guidance
    assert own[0].shape == own[1].shape == (4, tokens.prompt_encoder.length + 256)
    assert (own[1][:, : tokens.prompt_encoder.length] == tokens.prompt_encoder.empty).all()
    assert float(own[2].min()) >= 1 and float(own[2].max()) <= 3
    exact = ImitationObjective(tokens, tokens)
    assert float(exact(*own)) == pytest.approx(0, abs=1e-5)
    optimiser = torch.optim.AdamW(model.parameters(), 1e-2)
    with torch.no_grad():
        before = imitation.evaluate(model.eval())
    for number in range(16):
        optimiser.zero_grad()
        model.train()(*imitation.batch(number, 0.0)).backward()
        optimiser.step()
    with torch.no_grad():
        after = imitation.evaluate(model.eval())
    assert after["rejection rate"] < before["rejection rate"] - 0.02 and after["KL"] < before["KL"]
