"""Draft heads for published image models: one command trains them on a small checkpoint of the class, and they are used
from Python and the command line. Greedy and gumbel-match output equals plain decoding, and the distribution, by
enumeration, is the target's."""

from __future__ import annotations

import json
import runpy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider import image
from outrider.app.cli import cli
from outrider.app.page.backends.image import ImageBackend
from outrider.app.page.backends.interface import ModelSpec, checked
from outrider.core.distribution import Sampling
from outrider.core.errors import OutriderError
from outrider.core.methods import DRAFTERS
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import (
    Case,
    enumerate_output,
    random_draft_head,
    target_distribution,
    total_variation,
)
from outrider.image.hub.model import published
from outrider.image.recipes import SHELF
from tests.rows_of_one_prompt import Rows

pytestmark = pytest.mark.slow
TESTS = Path(__file__).parents[2]
TINY = SimpleNamespace(**runpy.run_path(str(TESTS / "tiny_classes.py")))
LLAMAGEN = SimpleNamespace(**runpy.run_path(str(TESTS / "image" / "hub" / "test_llamagen.py")))
EMU3 = {"area": 64 * 64, "negative": "blue sky"}
WORDS = "a red heart\nblue sky on the hill\nthe cat\n"


def written(make: Callable[[], tuple[Any, Any]], folder: Path) -> Path:
    for part in make():
        part.save_pretrained(folder)
    return folder


# ---- checkpoint, prompts, options of the class
CLASSES: dict[str, tuple[Callable[[Path], Path], str, dict[str, Any]]] = {
    "imagegpt": (partial(written, partial(TINY.imagegpt, side=4)), WORDS, {}),
    "emu3": (partial(written, TINY.emu3), WORDS, EMU3),
    "llamagen": (lambda folder: LLAMAGEN.published(folder, 0, 2, False, "", 40), "1\n17\n", {}),
}


def trained(name: str, folder: Path) -> Path:
    """The class's folder; the command has trained heads for it into the cache."""
    make, words, options = CLASSES[name]
    model = make(folder / "model")
    (folder / "prompts.txt").write_text(words, encoding="utf-8")
    given = [f"--model-option={key}={value}" for key, value in options.items()]
    command = ["train", "image-medusa", "image-eagle", "--model", str(model), "--prompts", str(folder / "prompts.txt")]
    done = CliRunner().invoke(cli, [*command, *given, "--quiet", "--minutes", "0.02", "--batch-size", "4"])
    assert done.exit_code == 0, done.output
    return model


@pytest.mark.parametrize("name", CLASSES)
def test_heads_are_trained_by_one_command_and_change_no_token(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    model = trained(name, tmp_path)
    options = CLASSES[name][2]
    im = image.load(model, dtype="float32", **options)
    assert {"medusa", "eagle", "eagle2"} <= set(im.drafters.ready) and "spatial" not in im.drafters.ready
    prompt = CLASSES[name][1].splitlines()[0]
    for sampling in ({"temperature": 0.0}, {"rule": "gumbel-match", "seed": 3}):
        plain = im.generate(prompt, drafter=None, **sampling)
        for drafter in ("medusa", "eagle"):
            drawn = im.generate(prompt, drafter=drafter, **sampling)
            assert drawn.tokens == plain.tokens and drawn.trace.summary().drafted > 0
    with pytest.raises(OutriderError, match=r"outrider train image-spatial --model .* --prompts FILE"):
        im.generate(prompt, drafter="spatial")
    if name == "imagegpt":
        heads = SHELF.home_for(str(model), "image-medusa")
        assert json.loads((heads / "curve.json").read_text()) and (heads.parent / "images.json").is_file()
        command = ["image", prompt, "--model", str(model), "--weights", str(heads), "--dtype", "float32"]
        done = CliRunner().invoke(cli, [*command, "--drafter", "medusa", "-o", str(tmp_path / "drawn.png")])
        assert done.exit_code == 0 and "16 codes in" in done.output, done.output
        backend = ImageBackend(dtype="float32", spec=ModelSpec(model=str(model)))
        live = backend.begin(checked(backend, {"prompt": prompt, "drafter": "eagle"}))
        assert "spatial" not in backend.drafters() and sum(len(step.emitted) for step in live) == 16


FEW: dict[str, tuple[Callable[[Path], Any], str, int]] = {  # a class with three codes, a prompt, tokens
    "imagegpt": (lambda _: published(*doubled(TINY.imagegpt(0, 1, colours=3, side=2))), "cat", 3),
    "emu3": (lambda _: published(*doubled(TINY.emu3(0, 1, codes=3)), area=256), "a red heart", 4),
    "llamagen": (
        lambda folder: image.load(LLAMAGEN.published(folder / "model", 0, 2, False, "", 3), dtype="float32"),
        "1",
        3,
    ),
}


def doubled(made: tuple[Any, Any]) -> tuple[Any, Any]:
    return made[0].double(), made[1]


@pytest.mark.parametrize("drafter", ["medusa", "eagle"])
@pytest.mark.parametrize("name", FEW)
def test_heads_keep_the_distribution(name: str, drafter: str, tmp_path: Path) -> None:
    make, prompt, count = FEW[name]
    one = make(tmp_path)
    one = getattr(one, "published", one)
    asked, method, sampling = one.read(prompt), DRAFTERS[drafter], Sampling()
    target = Rows(lambda rows: one.target([asked] * rows, one.guidance))
    expected = target_distribution(target, (0,), sampling, count)  # type: ignore[arg-type]
    head = random_draft_head(method, one, heads=2) if drafter == "medusa" else random_draft_head(method, one)
    case = Case(
        target=lambda: target,  # type: ignore[arg-type, return-value]
        drafter=lambda: method.make(head),
        rule=Exact(),
        prompts=[[0]],
        sampling=sampling,
        limits=[count],
    )
    (drawn,) = enumerate_output(case)
    assert total_variation(drawn, expected) < (1e-5 if name == "llamagen" else 1e-12)
