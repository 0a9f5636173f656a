"""Training data of a tiny model, and `train` up to weights that draft."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from outrider import text
from outrider.core.engine.transformer import Config, Decoder
from outrider.core.errors import OutriderError
from outrider.core.training import checkpoint
from outrider.core.training.dataset import Lesson
from outrider.text import TextModel, recipes
from outrider.text.training import data
from outrider.text.training.run import TrainingRequest, divided, shared, train

PROMPTS = [
    f"the cat sat on {word} and the dog" for word in ("mats", "logs", "hens", "rain", "a plain", "lazy", "seven")
]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": prompt}) for prompt in PROMPTS) + "\n", encoding="utf-8")
    return path


def test_answers_are_the_targets_and_generation_resumes(lm: TextModel, tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    given = [("given", prompt) for prompt in PROMPTS]
    first = list(data.Writer(lm, path, limit=12, rows=3).answer(given[:4]))
    assert len(first) == 4 and data.read(path) == first
    for one in first:
        plain = lm.generate(list(one.prompt), drafter=None, max_new_tokens=12)
        assert tuple(plain.tokens) == one.answer
    with path.open("a") as file:
        file.write('{"prompt": [1, 2], "ans')  # an incomplete line
    more = list(data.Writer(lm, path, limit=12).answer(given))
    assert len(more) == 3 and len(data.read(path)) == 7
    assert list(data.Writer(lm, path, limit=12).answer(given)) == []


def test_the_target_writes_prompts(lm: TextModel, folder: Path) -> None:
    result = list(data.write_prompts(lm, 6, seed=1, batch=3))
    assert result and result == list(data.write_prompts(lm, 6, seed=1, batch=3))
    assert all(12 <= len(text) <= 1200 and "<|im_" not in text for text in result)


def test_a_model_without_a_template_cannot_write_prompts(tiny: SimpleNamespace, tmp_path: Path) -> None:
    plain = text.load(tiny.write(tmp_path / "plain", template=None), dtype="float32")
    with pytest.raises(OutriderError, match="not a chat model"):
        next(data.write_prompts(plain, 1))


def test_passages_are_prose(tmp_path: Path) -> None:
    prose = "A long enough sentence about the weather in the hills and the people who live there with their sheep. " * 2
    (tmp_path / "a.txt").write_text(prose + "\n\nx = [1, 2, 3]; y = {4: 5}\n\n" + prose)
    (tmp_path / "b.html").write_text(
        f"<html><style>p {{}}</style><p>{prose}</p><pre>code();</pre><p>{prose}</p></html>"
    )
    manual = tmp_path / "man" / "c.1.gz"
    manual.parent.mkdir()
    manual.write_bytes(gzip.compress(f".TH C 1\n.PP\n\\fBbold\\fP {prose}\n.PP\n{prose}".encode()))
    (tmp_path / "d.py").write_text("print('no prose')")
    result = list(data.passages([tmp_path], words=(50, 60)))
    assert len(result) == 3
    for one in result:
        assert (
            "sheep" in one
            and not any(sign in one for sign in ("<", "{", "code", "\\f", ".PP"))
            and len(one.split()) <= 60
        )
    jobs = list(data.tasks(result, [prose], 30, seed=2))
    assert {kind for kind, _ in jobs} >= {"summary", "translation"} and jobs == list(
        data.tasks(result, [prose], 30, seed=2)
    )


def test_every_token_of_ordinary_text_counts(lm: TextModel) -> None:
    lessons = list(data.ordinary(lm, [data.__doc__ or ""] * 3, 32))
    assert lessons and all(lesson.size == 32 and len(lesson.prompt) == 1 for lesson in lessons)
    joined = [token for lesson in lessons for token in (*lesson.prompt, *lesson.answer)]
    assert lm.tokens.decode(joined).startswith((data.__doc__ or "")[:40])


def test_a_reduced_vocabulary_keeps_the_commonest() -> None:
    lessons = [Lesson((1, 2), (200, 200, 7, 201)), Lesson((1, 3), (200, 9))]
    kept = data.commonest(lessons, 300, 8)
    assert len(kept) == 8 and kept.tolist() == sorted(set(kept.tolist()))
    assert {200, 7, 201, 9} <= set(kept.tolist())
    assert len(data.commonest(lessons, 300, 290)) == 290
    more = data.commonest(lessons, 300, 8, torch.tensor([5, 290]))
    assert len(more) == 8 and {5, 290, 200} <= set(more.tolist())


def test_the_common_prefix_of_prompts_is_not_trained() -> None:
    assert shared([Lesson((1, 2, 3, 4), (5,)), Lesson((1, 2, 4), (5,)), Lesson((1, 2, 3), (5,))]) == 2
    training, held_out = divided([Lesson((n,), (1,)) for n in range(5)])
    assert len(training) == 4 and len(held_out) == 1
    with pytest.raises(OutriderError, match="only one answer"):
        divided([Lesson((1,), (2,))])


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(one, marks=pytest.mark.slow) for one in (1, 2))])
def test_every_recipe_trains_weights_that_draft(
    part: int, folder: Path, prompts: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = tuple(recipes.RECIPES)[part::3]
    if any(recipes.RECIPES[name].watches not in (None, *names) for name in names):
        names = (*names, "draft-model")
    request = TrainingRequest(
        recipes=names,
        model=str(folder),
        prompts=(prompts,),
        minutes=5,
        steps=2,
        batch_size=256,
        draft_vocab_size=120,
        quiet=True,
    )
    files = train(request)
    assert {file.name for file in files} == {f"{name}.safetensors" for name in names}
    lm = text.load(folder, dtype="float32")
    prompt = PROMPTS[0]
    plain = lm.generate(prompt, drafter=None, max_new_tokens=24)
    for file in files:
        facts = json.loads(file.with_suffix(".json").read_text())
        assert facts["provenance"]["data"][0]["answers"] == len(PROMPTS) and facts["provenance"]["done"]["steps"] > 0
        need = "model" if file.stem == "draft-model" else "head"
        drafted = lm.generate(prompt, drafter=file.stem, drafter_options={need: str(file)}, max_new_tokens=24)
        assert drafted.tokens == plain.tokens
        drawn = lm.generate(
            prompt, drafter=file.stem, drafter_options={need: file}, max_new_tokens=8, temperature=1.0, seed=3
        )
        assert len(drawn.tokens) == 8
        assert recipes.find(lm.name, file.stem) == file  # trained with others
        assert lm.generate(prompt, drafter=file.stem, max_new_tokens=24).tokens == plain.tokens
    absent = next(name for name in recipes.RECIPES if name not in names and name != "draft-model")
    with pytest.raises(OutriderError, match=f"outrider train {absent}"):
        lm.generate(prompt, drafter=absent)


@pytest.mark.slow
def test_an_acceptance_head_uses_the_trained_draft_model(folder: Path, prompts: Path, cache: Path) -> None:
    request = TrainingRequest(
        recipes=("specdec-plus-plus",), model=str(folder), prompts=(prompts,), minutes=5, steps=60, quiet=True
    )
    with pytest.raises(OutriderError, match="outrider train draft-model"):
        train(request, say=lambda line: None)
    train(replace(request, recipes=("draft-model",), steps=20), say=lambda line: None)
    (file,) = train(request, say=lambda line: None)
    judged = json.loads(file.with_suffix(".json").read_text())["provenance"]["validation"]
    lm = text.load(folder, dtype="float32")
    steps = {}
    for threshold in (0.05, 0.95):
        options = {"threshold": threshold}
        out = lm.generate(PROMPTS[1], drafter="specdec-plus-plus", drafter_options=options, max_new_tokens=40)
        assert out.tokens == lm.generate(PROMPTS[1], drafter=None, max_new_tokens=40).tokens
        steps[threshold] = sum(len(step.drafted) for step in out.trace.steps)
    assert steps[0.05] < steps[0.95]
    assert judged["conditional"][0] > 0.55


@pytest.mark.slow
def test_training_continues_from_weights_and_extends_their_vocabulary(
    folder: Path, prompts: Path, tmp_path: Path
) -> None:
    request = TrainingRequest(
        recipes=("medusa", "draft-model"), model=str(folder), prompts=(prompts,), minutes=5, steps=2, quiet=True
    )
    first = train(replace(request, draft_vocab_size=120, out=tmp_path / "first"), say=lambda line: None)
    again = replace(request, recipes=("eagle3", "draft-model", "medusa"), start=tuple(first), out=tmp_path / "again")
    messages: list[str] = []
    files = {one.stem: one for one in train(replace(again, draft_vocab_size=60), say=messages.append)}
    before = [checkpoint.vocabulary(one) for one in first]
    assert all(torch.equal(checkpoint.vocabulary(one), before[0]) for one in (*files.values(), *first))  # type: ignore[arg-type]
    assert before[0] is not None and 120 <= len(before[0]) < 256
    assert sum(f"start from {one}" in line for one in first for line in messages) == 2
    wider = replace(again, recipes=("draft-model",), start=(first[1],), draft_vocab_size=200, out=tmp_path / "wider")
    (file,) = train(wider, say=messages.append)
    more = checkpoint.vocabulary(file)
    assert more is not None and len(more) >= 200 and torch.isin(before[0], more).all()
    assert any(f"start from {first[1]}" in line for line in messages[-3:])
    with pytest.raises(OutriderError, match="contains a MedusaHeads, which is none of eagle3"):
        train(replace(again, recipes=("eagle3",), out=tmp_path / "third"), say=lambda line: None)


def test_the_best_weights_of_several_runs_are_found(cache: Path) -> None:
    home = recipes.home("somebody/small")
    for run, worth in (("eagle", 1.4), ("eagle-medusa", 1.9), ("medusa", None), ("hydra-medusa", 1.2)):
        (home / run).mkdir(parents=True)
        for name in run.split("-"):
            (home / run / f"{name}.safetensors").write_bytes(b"")
            result = {
                "schema": 1,
                "architecture": "",
                "config": {},
                "provenance": {"validation": {"tokens_per_pass": worth}},
            }
            (home / run / f"{name}.json").write_text(json.dumps(result))
    (home / "broken").mkdir()
    (home / "broken" / "medusa.safetensors").write_bytes(b"")  # without metadata
    assert recipes.find("somebody/small", "eagle") == home / "eagle-medusa" / "eagle.safetensors"
    assert recipes.find("somebody/small", "eagle2") == home / "eagle-medusa" / "eagle.safetensors"
    assert recipes.find("somebody/small", "medusa") == home / "eagle-medusa" / "medusa.safetensors"
    assert recipes.find("somebody/small", "hydra") == home / "hydra-medusa" / "hydra.safetensors"
    assert recipes.find("somebody/small", "kangaroo") is None and recipes.find("another", "eagle") is None


@pytest.mark.slow
def test_weights_are_small() -> None:
    """Checks each recipe's weights for the default model in 16 bits, and all included weights."""
    shape = Config(
        vocabulary=9000,
        hidden_size=576,
        layers=8,
        heads=9,
        kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        tied=True,
        context=64,
    )
    target = Decoder.random(shape, dtype=torch.bfloat16)
    for recipe in recipes.RECIPES.values():
        state = recipe.make(target, torch.arange(8192)).state_dict().values()
        assert sum(part.numel() * (2 if part.is_floating_point() else 8) for part in state) < 15e6, recipe.name
    folder = Path(recipes.__file__).parent / "weights"
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 36e6


@pytest.mark.slow
def test_heads_train_on_their_own_outputs(folder: Path, prompts: Path, tmp_path: Path) -> None:
    for learn in ("on-policy", "served"):
        request = TrainingRequest(
            recipes=("draft-model",),
            model=str(folder),
            prompts=(prompts,),
            minutes=5,
            steps=2,
            batch_size=2048,
            train_on=learn,
            out=tmp_path / learn,
            quiet=True,
        )
        (file,) = train(request, say=lambda line: None)
        assert json.loads(file.with_suffix(".json").read_text())["provenance"]["done"]["positions"] > 0
    with pytest.raises(OutriderError, match="on-policy"):
        train(
            TrainingRequest(
                recipes=("medusa",),
                model=str(folder),
                prompts=(prompts,),
                minutes=5,
                steps=1,
                train_on="on-policy",
                quiet=True,
            )
        )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"recipes": ()}, "no recipe"),
        ({"recipes": ("medussa",)}, "medusa"),
        ({"recipes": ("medusa", "medusa")}, "twice"),
        ({"minutes": 0}, "minutes"),
        ({"train_on": "by heart"}, "on-policy"),
        ({"corpus_fraction": 1.0}, "corpus_fraction"),
        ({"options": {"medusa": {"heads": 2}}}, "draft-model"),
        ({"keep_states": -1.0}, "keep_states"),
    ],
)
def test_invalid_options_raise_first(change: dict[str, object], words: str) -> None:
    with pytest.raises(OutriderError, match=words):
        TrainingRequest(**({"recipes": ("draft-model",)} | change))  # type: ignore[arg-type]


@pytest.mark.slow
def test_heads_have_the_options_given_and_states_are_read_once(folder: Path, prompts: Path, tmp_path: Path) -> None:
    request = TrainingRequest(
        recipes=("medusa",),
        model=str(folder),
        prompts=(prompts,),
        minutes=5,
        steps=6,
        batch_size=256,
        options={"medusa": {"heads": 2}},
        keep_states=1.0,
        out=tmp_path / "kept",
        quiet=True,
    )
    (file,) = train(request, say=lambda line: None)
    assert json.loads(file.with_suffix(".json").read_text())["config"]["heads"] == 2
    (computed,) = train(replace(request, keep_states=0.0, out=tmp_path / "computed"), say=lambda line: None)
    weights = load_file(computed)
    for name, found in load_file(file).items():
        assert torch.allclose(found.float(), weights[name].float(), atol=2e-3), name
    assert len((tmp_path / "kept" / "states-0" / "states.index").read_text().splitlines()) > len(PROMPTS)
    with pytest.raises(OutriderError, match="option of medusa"):
        train(replace(request, options={"medusa": {"head": 2}}), say=lambda line: None)


@pytest.mark.slow
def test_weights_of_another_target_raise(folder: Path, tiny: SimpleNamespace, prompts: Path, tmp_path: Path) -> None:
    request = TrainingRequest(
        recipes=("draft-model",),
        model=str(folder),
        prompts=(prompts,),
        minutes=5,
        steps=1,
        out=tmp_path / "out",
        quiet=True,
    )
    (file,) = train(request, say=lambda line: None)
    lm = text.load(folder, dtype="float32")
    with pytest.raises(OutriderError, match="no file"):
        lm.generate("hello", drafter="draft-model", drafter_options={"model": str(tmp_path / "none.safetensors")})
    torch.save({}, tmp_path / "x.safetensors")
    (tmp_path / "x.json").write_text(file.with_suffix(".json").read_text())
    with pytest.raises(OutriderError, match="safetensors"):
        lm.generate("hello", drafter="draft-model", drafter_options={"model": str(tmp_path / "x.safetensors")})
