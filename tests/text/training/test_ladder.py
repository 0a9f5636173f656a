"""The ladder on a tiny model: equal budgets, early stops, a resumed run, and the table of both."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.core.engine.transformer import Decoder
from outrider.core.errors import InvalidOption
from outrider.core.training.dataset import TargetTeacher
from outrider.core.training.trainer import Trainer
from outrider.text import TextModel
from outrider.text.recipes import recipe
from outrider.text.training import data, ladder, run
from outrider.text.training.ladder import LadderRequest, fitted


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    path = tmp_path / "answers.jsonl"
    rows = [
        {"prompt": [n, 3, 4], "answer": [5, 6, 7, 8] * 3, "kind": ("code", "prose")[n % 2], "temperature": 0.0}
        for n in range(40)
    ]
    path.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    return path


def count(name: str, target: Decoder, options: dict[str, int]) -> int:
    made = recipe(name).make(target, None, **options)
    return sum(weight.numel() for weight in made.parameters() if weight.requires_grad)


def test_a_budget_sets_each_size(lm: TextModel) -> None:
    target = lm.target()
    assert isinstance(target, Decoder)
    for name in ladder.RUNGS:
        least = count(name, target, {recipe(name).size: 1})
        budget = 3 * least
        options = fitted(name, target, budget, 0)
        bigger = {key: value + 1 for key, value in options.items()}
        assert count(name, target, options) <= budget < count(name, target, bigger)
        with pytest.raises(InvalidOption, match="budget"):
            fitted(name, target, least - 1, 0)


def test_a_ladder_resumes_and_compares(
    folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, trained = tmp_path / "out", list[tuple[str, int]]()
    train = run.train

    def counted(request: run.TrainingRequest, say: Any, teacher: Any) -> list[Path]:
        trained.append((request.recipes[0], request.seed))
        return train(request, say, teacher)

    monkeypatch.setattr(run, "train", counted)
    given: dict[str, Any] = {
        "model": str(folder),
        "parameters": 20_000,
        "data": (answers,),
        "out": out,
        "steps": 8,
        "minutes": 100.0,
        "validations": 2,
        "draft_vocab_size": 0,
        "quiet": True,
    }
    ladder.ladder(LadderRequest(recipes=("medusa",), seeds=1, **given), lambda _: None)
    rungs = ladder.ladder(LadderRequest(recipes=("medusa", "dflash2"), seeds=2, **given), lambda _: None)["rows"]
    assert trained == [("medusa", 0), ("dflash2", 0), ("medusa", 1), ("dflash2", 1)]
    assert {rung["drafter"] for rung in rungs} == {"medusa", "dflash2"} and all(rung["seeds"] == 2 for rung in rungs)
    assert rungs[0]["tokens_per_pass"] >= rungs[1]["tokens_per_pass"] >= 1
    assert set(rungs[0]["kinds"]) <= {"code", "prose"} and rungs[0]["kinds"]
    text = (out / "ladder.md").read_text()
    assert "| medusa |" in text and "| dflash2 |" in text and (out / "ladder.png").stat().st_size > 1000
    with pytest.raises(InvalidOption, match="other settings"):
        ladder.ladder(LadderRequest(recipes=("medusa",), **{**given, "parameters": 30_000}), lambda _: None)


def test_the_target_answers_what_it_is_asked_if_there_are_no_answers(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "home", lambda _: tmp_path)
    prompts = tmp_path / "prompts.jsonl"
    kinds = ("code", "prose")
    rows = [{"category": kinds[n % 2], "prompt": f"What is {n} times {n}?"} for n in range(12)]
    prompts.write_text("\n".join(map(json.dumps, rows)) + "\n", encoding="utf-8")
    request = LadderRequest(
        recipes=("medusa",), model=str(folder), parameters=20_000, prompts=(prompts,), seeds=1, steps=2, validations=1,
        draft_vocab_size=0, quiet=True,
    )  # fmt: skip
    result = ladder.ladder(request, lambda _: None)
    answers = data.read(tmp_path / "answers.jsonl")
    assert {answer.kind for answer in answers} == set(kinds) and len(answers) == len(rows)
    [file] = result["settings"]["data"]
    assert file["kinds"] == {"code": 6, "prose": 6} and result["rows"][0]["seeds"] == 1
    ladder.ladder(request, lambda _: None)
    assert data.read(tmp_path / "answers.jsonl") == answers  # a folder of runs keeps its data


def test_a_run_without_longer_drafts_ends_early(
    folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "_is_best", lambda *_: False)
    request = run.TrainingRequest(
        recipes=("medusa",), model=str(folder), data=(answers,), out=tmp_path / "out", minutes=100.0, steps=40,
        validations=10, patience=2, quiet=True, draft_vocab_size=0,
    )  # fmt: skip
    run.train(request, lambda _: None)
    steps = [row["steps"] for row in json.loads((tmp_path / "out" / "curve.json").read_text())]
    assert 0 < steps[-1] < 12


def test_the_target_reads_the_answers_once_for_all_runs(
    folder: Path, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, prefill = list[tuple[int, ...]](), TargetTeacher.states

    def counted(teacher: TargetTeacher, rows: Sequence[Sequence[int]], needs: frozenset[str]) -> Any:
        read.extend(tuple(row) for row in rows)
        return prefill(teacher, rows, needs)

    monkeypatch.setattr(TargetTeacher, "states", counted)
    given: dict[str, Any] = {"model": str(folder), "data": (answers,), "parameters": 20_000, "steps": 6, "seeds": 1}
    given |= {
        "minutes": 100.0,
        "validations": 2,
        "draft_vocab_size": 0,
        "quiet": True,
        "recipes": ("medusa", "dflash2"),
    }
    rows = {}
    for keep in (1.0, 0.0):
        request = LadderRequest(out=tmp_path / str(keep), keep_states=keep, **given)
        rows[keep] = ladder.ladder(request, lambda _: None)["rows"]
    each = len(set(read))
    assert read[:each] == list(dict.fromkeys(read)) and len(read) > 3 * each  # once each, and every time without
    kept, computed = ({row["drafter"]: row["tokens_per_pass"] for row in rows[keep]} for keep in (1.0, 0.0))
    assert kept == pytest.approx(computed, abs=0.05)
