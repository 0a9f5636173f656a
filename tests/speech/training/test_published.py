"""Draft heads for published models of speech: one command trains them on a small checkpoint, and they are used from
Python, the command line and the page. Greedy and gumbel-match output equals plain decoding, and the distribution, by
enumeration, is the target's."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from outrider import speech
from outrider.app.cli import cli
from outrider.app.page.backends.interface import ModelSpec, checked
from outrider.app.page.backends.speech import SpeechBackend
from outrider.core.distribution import Sampling
from outrider.core.drafters.trained.export_checkpoints import write_published
from outrider.core.engine.adapters.hf import TransformersTarget
from outrider.core.engine.transformer import Decoder
from outrider.core.errors import OutriderError
from outrider.core.kernels import native
from outrider.core.methods import DRAFTERS
from outrider.core.rules import native_walk
from outrider.core.rules.exact import Exact
from outrider.core.testing.conformance import Case, enumerate_output, target_distribution, total_variation
from outrider.core.training.dataset import Lesson, TargetTeacher
from outrider.speech.hub.model import published
from outrider.speech.recipes import RECIPES, SHELF, published_head, published_kind
from outrider.speech.training.published import StageTeacher

pytestmark = pytest.mark.slow
TINY = SimpleNamespace(**runpy.run_path(str(Path(__file__).parents[2] / "tiny_classes.py")))
HEADS = ("medusa", "hydra", "eagle3", "llasa-plus")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for compiled in (native, native_walk):
        compiled.library()  # in the usual cache
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    for name, layers in (("llasa", 4), ("smaller", 1)):
        model = TINY.llasa(layers=layers)
        model.config.max_position_embeddings = 64  # random weights seldom end a sentence
        for part in (model, model.tokenizer):
            part.save_pretrained(tmp_path / name)
    (tmp_path / "prompts.txt").write_text("good morning\nthe text\n", encoding="utf-8")
    return tmp_path


def test_heads_are_trained_by_one_command_and_change_no_token(folder: Path) -> None:
    model = str(folder / "llasa")
    recipes = [f"speech-{name}" for name in HEADS]
    command = ["train", *recipes, "--model", model, "--prompts", str(folder / "prompts.txt")]
    done = CliRunner().invoke(cli, [*command, "--quiet", "--minutes", "0.02", "--batch-size", "400"])
    assert done.exit_code == 0, done.output
    sp = speech.load(model, dtype="float32", draft_model=str(folder / "smaller"))
    assert isinstance(sp.published.target(), Decoder) and set(HEADS) <= set(sp.drafters.ready)  # type: ignore[attr-defined]
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "rule": "gumbel-match", "seed": 3}):
        plain = sp.generate("good morning", max_new_tokens=40, **sampling)
        for drafter in (*HEADS, "swift", "draft-model"):
            drawn = sp.generate("good morning", max_new_tokens=40, drafter=drafter, **sampling)
            assert drawn.tokens == plain.tokens and drawn.trace.summary().drafted > 0, drafter
    with pytest.raises(OutriderError, match=r"outrider train speech-medusa-6 --model .* --prompts FILE"):
        sp.generate("good morning", drafter="medusa", drafter_options={"head": "medusa-6"})
    head = published_head("eagle3", sp.published.target(), model)  # type: ignore[attr-defined]
    write_published(head, folder / "exported", model)
    others = {"head": str(folder / "exported")}
    same = sp.generate("good morning", drafter="eagle3", drafter_options=others, max_new_tokens=40)
    assert same.tokens == sp.generate("good morning", max_new_tokens=40).tokens
    with pytest.raises(OutriderError, match="holds a Eagle3Head, which 'medusa' can't use"):
        sp.generate("good morning", drafter="medusa", drafter_options=others)
    heads = SHELF.home_for(model, "speech-medusa")
    assert json.loads((heads / "curve.json").read_text()) and (heads.parent / "spoken.json").is_file()
    again = speech.load(model, dtype="float32", folder=heads)
    assert "medusa" in again.drafters.ready and "hydra" not in again.drafters.ready
    backend = SpeechBackend(dtype="float32", spec=ModelSpec(model=model))
    live = backend.begin(checked(backend, {"prompt": "good morning", "drafter": "eagle3", "max_new_tokens": 12}))
    assert "medusa" in backend.drafters() and "swift" not in backend.drafters()
    assert 0 < sum(len(step.emitted) for step in live) <= 12


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_llasa_is_quantized_as_a_language_model_is(folder: Path, dtype: str) -> None:
    sp = speech.load(folder / "llasa", dtype=dtype)
    plain = sp.generate("good morning", max_new_tokens=24)
    assert sp.generate("good morning", max_new_tokens=24, drafter="suffix").tokens == plain.tokens
    done = CliRunner().invoke(cli, ["speech", "hi", "--model", str(folder / "llasa"), "--dtype", "int2"])
    assert done.exit_code == 1 and "int4" in str(done.exception)


@pytest.mark.parametrize("drafter", HEADS)
def test_heads_keep_the_distribution(drafter: str) -> None:
    model = TINY.llasa(layers=4, codes=2, bare=True).double()
    target = published(model, model.tokenizer).target  # type: ignore[attr-defined]
    prompt, sampling, count = (0, 2, 3), Sampling(end=(1,)), 3
    torch.manual_seed(0)
    recipe = RECIPES[f"speech-{drafter}"]
    head = published_kind(recipe)(target(), vocabulary=torch.tensor([1, 2, 3]), **recipe.options).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    case = Case(
        target=target,
        drafter=lambda: DRAFTERS[drafter].make(head.drafts(target())),
        rule=Exact(),
        prompts=[list(prompt)],
        sampling=sampling,
        limits=[count],
    )
    (drawn,) = enumerate_output(case)
    expected = target_distribution(target(), prompt, sampling, count)
    assert total_variation(drawn, expected) < 1e-12


def test_a_teacher_of_transformers_has_the_states_of_our_decoder() -> None:
    model = TINY.llasa(layers=4)
    ours, theirs = published(model, model.tokenizer).target(), TransformersTarget(model)  # type: ignore[attr-defined]
    rows, needs = [[1, 2, 3, 4, 5], [6, 7, 8]], frozenset({"layer.1"})
    own, other = (TargetTeacher(target).states(rows, needs) for target in (ours, theirs))
    for tap in ("layer.1", "last"):
        for row, ids in enumerate(rows):
            torch.testing.assert_close(own[tap][row, : len(ids)], other[tap][row, : len(ids)], atol=1e-5, rtol=0)
    ids = torch.tensor([2, 5])
    states = own["last"][0]
    for vocabulary in (None, ids):
        mine, others = (TargetTeacher(target).logits(states, vocabulary) for target in (ours, theirs))
        torch.testing.assert_close(mine, others, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["csm", "musicgen", "bark"])
def test_frames_and_stages_have_heads_too(kind: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head reads the state before each codebook; a model of several stages has a head for each."""
    model = save_with_processor(kind, folder)
    if kind != "bark":
        monkeypatch.setattr(f"outrider.speech.hub.{kind}._MAX_FRAMES", 10)
    command = ["train", "speech-medusa", "speech-eagle3", "--model", model, "--prompts", str(folder / "prompts.txt")]
    done = CliRunner().invoke(cli, [*command, "--quiet", "--minutes", "0.1", "--batch-size", "200"])
    assert done.exit_code == 0, (done.output[-900:], done.exception)
    sp = speech.load(model, dtype="float32")
    assert {"medusa", "eagle3"} <= set(sp.drafters.ready) and "swift" not in sp.drafters
    for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "rule": "gumbel-match", "seed": 3}):
        plain = sp.generate("good morning", **sampling)
        for drafter in ("medusa", "eagle3"):
            drawn = sp.generate("good morning", drafter=drafter, **sampling)
            assert drawn.tokens == plain.tokens, drafter
            print(kind, drafter, drawn.trace.summary())
            assert drawn.trace.summary().accepted > 0, drafter
    weights = SHELF.home_for(model, "speech-medusa")
    stages = ("semantic", "coarse") if kind == "bark" else ("",)
    assert all((weights / stage / "medusa.safetensors").is_file() for stage in stages)


def test_a_teacher_under_guidance_has_the_precision_of_its_model() -> None:
    model = published(TINY.musicgen().to(torch.bfloat16))
    prompt = dict.fromkeys(("input_ids", "attention_mask"), torch.ones(1, 3, dtype=torch.long))
    stage = next(model.stages(prompt, 6))  # type: ignore[attr-defined]
    teacher = StageTeacher(stage.target(), [(stage, Lesson((0,), (1, 33, 66)))])
    states = teacher.states([[0, 1, 33, 66]], frozenset({"last"}))["last"]
    assert states.shape[:2] == (1, 4) and states.dtype == torch.bfloat16
    assert [teacher.logits(states[0], ids).shape[1] for ids in (None, torch.tensor([1, 2]))] == [132, 2]


def save_with_processor(kind: str, folder: Path) -> str:
    import transformers

    path, words = folder / kind, TINY.tokenizer({}, bare=kind != "csm")
    getattr(TINY, kind)().save_pretrained(path)
    sounds = [] if kind == "bark" else [transformers.EncodecFeatureExtractor()]
    name = f"{kind.capitalize()}Processor"
    getattr(transformers, name)(*sounds, words).save_pretrained(path)
    return str(path)


def test_other_classes_and_requests_are_refused(folder: Path) -> None:
    TINY.whisper().save_pretrained(folder / "whisper")
    for arguments, message in (
        (["speech-medusa", "--model", str(folder / "whisper")], "no draft heads for .*whisper"),
        (["speech-voice", "--model", str(folder / "llasa")], "a part of our own model; .* train speech-medusa"),
    ):
        done = CliRunner().invoke(cli, ["train", *arguments, "--prompts", str(folder / "prompts.txt")])
        assert done.exit_code == 1, done.output
        with pytest.raises(OutriderError, match=message):
            raise done.exception or OutriderError("nothing")
    done = CliRunner().invoke(cli, ["train", "speech-medusa", "--model", str(folder / "llasa")])
    assert done.exit_code == 1 and "need prompts" in str(done.exception)
    with pytest.raises(OutriderError, match="takes no draft heads"):
        speech.load(folder / "whisper", folder=folder)
