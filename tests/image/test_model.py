"""The public API of outrider.image: results, streams, options and errors."""

from __future__ import annotations

import asyncio
import inspect
import itertools
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.core.assets.files import AssetError
from outrider.core.constraint import Positions
from outrider.core.errors import InvalidOption
from outrider.core.trace import Trace
from outrider.core.training.recipes import NoWeights, Shelf
from outrider.image import PublishedModel
from outrider.image.known_names import KnownNames
from outrider.image.loading import load
from outrider.image.model import ImageModel
from outrider.image.options import Given, Options


def test_a_prompt_gives_a_picture_with_its_codes_and_trace(im: ImageModel) -> None:
    result = im.generate("red heart", style="noto", seed=3)
    assert result.image.size == (64, 64) and result.images == [result.image]
    assert result.grid.shape == (16, 16) and result.grid.flatten().tolist() == result.tokens
    assert result.finish_reason == "length" and result.trace.summary().tokens == 256
    assert result.trace.method == "jacobi" and result.trace.options["guidance_scale"] == 3.0
    assert Trace.from_json(result.trace.to_json()) == result.trace
    again = im.generate("red heart", style="noto", seed=3)
    assert again.tokens == result.tokens and im.generate("red heart", style="noto", seed=4).tokens != result.tokens


def test_a_list_of_prompts_gives_a_list_of_results(im: ImageModel) -> None:
    results = im.generate(["cat", "house"], guidance_scale=1.0, drafter=None, temperature=0.0)
    assert [result.prompt for result in results] == ["cat", "house"]
    assert all(result.trace.summary().tokens_per_pass == 1 for result in results)
    assert results[0].tokens == im.generate("cat", guidance_scale=1.0, drafter=None, temperature=0.0).tokens


def test_a_stream_has_partial_pictures(im: ImageModel) -> None:
    stream = im.stream("cat", seed=1)
    pieces = [next(stream) for _ in range(3)]
    assert 3 <= pieces[-1].count < 256 and pieces[-1].finish_reason is None
    assert pieces[-1].image().size == (64, 64)
    grid = stream.grid(0, pieces[-1].count).flatten()
    assert (grid[pieces[-1].count :] == im.white).all()
    stream.close()
    (partial,) = stream.results
    assert partial.finish_reason is None and len(partial.tokens) == pieces[-1].count


def test_an_async_stream_gives_the_same_codes(im: ImageModel) -> None:
    async def collected() -> list[int]:
        return [token async for piece in im.stream("cat", seed=1) for token in piece.step.emitted]

    assert asyncio.run(collected()) == im.generate("cat", seed=1).tokens


def test_processors_change_drafted_and_plain_decoding_alike(im: ImageModel) -> None:
    def no_repeats(ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        assert ids[0, 0] == im.white, "the code before the first one"
        logits[:, ids[0, -1]] = -torch.inf
        return logits

    options = {"rule": "gumbel-match", "seed": 3, "logits_processor": [no_repeats]}
    plain = im.generate("red cat", drafter=None, **options)  # type: ignore[call-overload]
    assert all(a != b for a, b in itertools.pairwise([im.white, *plain.tokens]))
    assert plain.trace.options["logits_processor"] == "no_repeats"
    assert im.generate("red cat", drafter="jacobi", **options).tokens == plain.tokens  # type: ignore[call-overload]


@pytest.mark.parametrize("drafter", ["jacobi", "prompt-lookup"])
def test_forced_codes_are_kept_and_guessed(im: ImageModel, drafter: str) -> None:
    """A border of given codes: the tokens of plain decoding under it, and fewer passes."""
    side = im.raster.columns
    border = [place % side in (0, side - 1) or place < side for place in range(side * side)]
    options = {"rule": "gumbel-match", "seed": 3, "constraint": Positions([(5,) if at else None for at in border])}
    plain = im.generate("red heart", drafter=None, **options)  # type: ignore[call-overload]
    out = im.generate("red heart", drafter=drafter, **options)  # type: ignore[call-overload]
    assert out.tokens == plain.tokens and {code for code, at in zip(out.tokens, border, strict=True) if at} == {5}
    assert out.trace.options["constraint"] == "Positions"
    assert len(out.trace.steps) <= side * side - sum(border) + 1
    with pytest.raises(InvalidOption, match="constraint is 3"):
        im.generate("red heart", constraint=3)  # type: ignore[call-overload]


@pytest.mark.slow
def test_greedy_drafting_changes_no_code(im: ImageModel) -> None:
    plain = im.generate("red cat", drafter=None, temperature=0.0)
    for drafter in ("jacobi", "draft-model", "suffix"):
        assert im.generate("red cat", drafter=drafter, temperature=0.0).tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "options"),
    [("lantern", {"delta": 0.3, "k": 10}), ("lantern-plus-plus", {}), ("grouped", {}), ("annealed", {"weight": 3.0})],
)
def test_relaxed_rules_report_their_total_variation(im: ImageModel, rule: str, options: dict[str, Any]) -> None:
    result = im.generate("red heart", rule=rule, rule_options=options, seed=2, guidance_scale=1.0)
    summary = result.trace.summary()
    assert not result.trace.lossless and summary.tokens == 256
    if rule != "grouped":
        assert summary.total_variation > 0 and summary.sources["relaxed"] > 0


def test_neighbours_are_sorted_by_distance(im: ImageModel) -> None:
    near = im.neighbours
    assert near.shape == (36, 35)
    distances = (im.code_vectors[near] - im.code_vectors[:, None]).square().sum(-1)
    assert (distances.diff(dim=-1) >= -1e-6).all()
    assert all(code not in row for code, row in enumerate(near.tolist()))


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "the prompt is empty"),
        ("zzz qqq", {}, "none of the words"),
        ([], {}, "no prompts"),
        ("cat", {"style": "apple"}, "unknown style 'apple'"),
        ("cat", {"guidance_scale": -1.0}, "guidance_scale is -1.0"),
        ("cat", {"guidance_scale": "much"}, "it must be a number"),
        ("cat", {"temperature": -1}, "temperature"),
        ("cat", {"drafter": "nobody"}, "unknown drafter"),
        ("cat", {"rule": "nothing"}, "unknown rule"),
        ("cat", {"colour": "red"}, "unknown option 'colour'"),
        ("cat", {"drafter_options": {"window": 0}}, "window is 0"),
    ],
)
def test_wrong_options_are_refused(im: ImageModel, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidOption, match=message):
        im.generate(prompt, **options)


def test_missing_weights_name_the_training_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, im: ImageModel
) -> None:

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(Shelf, "shipped", lambda _: tmp_path)
    with pytest.raises(NoWeights, match="outrider train image-tokenizer"):
        load("emoji")
    with pytest.raises(InvalidOption, match="unknown image model"):
        load("photographs")
    bare = ImageModel(im.network, im.prompt_encoder, im.codec, name="tiny")
    with pytest.raises(NoWeights, match="outrider train image-draft"):
        bare.generate("cat", drafter="draft-model")


def test_white_codes_decode_to_a_picture(im: ImageModel) -> None:
    blank = im.to_images(torch.full((1, 16, 16), im.white))[0]
    assert blank.size == (64, 64)


def test_the_name_chooses_the_style_unless_given(im: ImageModel) -> None:
    ids = im.read("Red  heart")
    assert ids == im.read("red heart") and ids in [im.read("red heart", style) for style in im.styles]
    for index, style in enumerate(im.styles):
        known = KnownNames.of(im.styles, [("red heart", index), ("house", 0), ("house", 1)])
        knowing = ImageModel(im.network, im.prompt_encoder, im.codec, name="tiny", known=known)
        assert knowing.read("Red hearts") == im.read("Red hearts"), "another name"
        assert knowing.read("the Red heart") == im.read("red heart", style), "the only style that has it"
        best = replace(known, preferred=(style,))
        assert best.style("house", im.styles) == best.style("cat", im.styles) == style


def test_known_names_are_read_back(tmp_path: Path) -> None:
    known = KnownNames.of(("noto", "fluent"), [("Red Heart", 1), ("house", 1), ("house", 0)])
    known.save(tmp_path / "names.json")
    assert KnownNames.load(tmp_path / "names.json") == known
    assert known.names == {"house": (0, 1), "red heart": (1,)}
    (tmp_path / "names.json").write_text('{"styles": [], "names": {"house": "x"}}')
    with pytest.raises(AssetError, match="not a list of names by style"):
        KnownNames.load(tmp_path / "names.json")


def test_a_negative_prompt_is_the_unconditional_half(im: ImageModel) -> None:
    options: dict[str, Any] = {"guidance_scale": 2.0, "seed": 3, "rule": "gumbel-match"}
    plain = im.generate("cat", drafter=None, negative_prompt="house", **options)
    assert plain.tokens != im.generate("cat", drafter=None, **options).tokens
    for drafter in ("jacobi", "draft-model"):
        assert im.generate("cat", drafter=drafter, negative_prompt="house", **options).tokens == plain.tokens
    assert plain.trace.options["negative_prompt"] == "house" and plain.trace.options["guidance_scale"] == 2.0
    same = im.generate("cat", drafter=None, negative_prompt="cat", style=None, guidance_scale=0.0, seed=3)
    assert same.finish_reason == "length"


def test_several_images_are_those_of_their_seeds(im: ImageModel) -> None:
    options: dict[str, Any] = {"drafter": "jacobi", "guidance_scale": 1.0}
    results = im.generate(["cat", "house"], num_images_per_prompt=2, seed=4, **options)
    assert [result.prompt for result in results] == ["cat", "cat", "house", "house"]
    alone = [im.generate(prompt, seed=seed, **options) for prompt in ("cat", "house") for seed in (4, 5)]
    assert [result.tokens for result in results] == [result.tokens for result in alone]
    assert [result.trace.seed for result in results] == [4, 5, 4, 5] and len(repr(results[0])) < 120
    (result,) = im.generate("cat", num_images_per_prompt=1, seed=5, **options)
    assert result.tokens == alone[1].tokens
    with pytest.raises(InvalidOption, match="num_images_per_prompt is 0"):
        im.generate("cat", num_images_per_prompt=0, **options)


def test_a_negative_prompt_needs_guidance(im: ImageModel) -> None:
    with pytest.raises(InvalidOption, match="negative_prompt needs guidance"):
        im.generate("cat", negative_prompt="house", guidance_scale=1.0)
    with pytest.raises(InvalidOption, match="none of the words"):
        im.generate("cat", negative_prompt="qwrtz")


def test_options_are_shown_by_help() -> None:
    names = {each.name for each in fields(Options)}
    assert names == set(Given.__annotations__)
    for kind in (ImageModel, PublishedModel):
        assert names < set(inspect.signature(kind.generate).parameters)
