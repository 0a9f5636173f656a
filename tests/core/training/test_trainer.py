"""Training a model from data alone: it improves, resumes, and refuses invalid requests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from outrider.core.assets.files import AssetError
from outrider.core.engine.trainable.block import Matrix
from outrider.core.errors import InvalidOption
from outrider.core.training import optim
from outrider.core.training.model_training import ModelTraining
from outrider.core.training.recipes import Recipe
from outrider.core.training.request import TrainingRequest
from outrider.core.training.trainer import Plan, Progress, Trainer
from tests.core.assets.given import full_disk

pytest.importorskip("accelerate")

pytestmark = pytest.mark.slow


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(3, 8), nn.SiLU(), nn.Linear(8, 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        off: Tensor = self.inner(x) - y
        return off.square().mean()


class Sums:
    """y is the sum of x."""

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]:
        x = torch.randn(16, 3, generator=torch.Generator().manual_seed(number))
        return x, x.sum(1, keepdim=True)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {"lost": float(model(*self.batch(10_000, 1.0)))}


class Blocks(Line):
    """The same with matrices of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(Matrix(3, 8), nn.SiLU(), Matrix(8, 8), nn.SiLU(), nn.Linear(8, 1))


def learned(folder: Path, model: nn.Module | None = None, steps: int = 60, **plan_: Any) -> list[float]:
    """The validation losses."""

    def keep(model: nn.Module, facts: Mapping[str, Any]) -> None:
        pass

    plan = Plan(minutes=1e6, steps=steps, rate=3e-2, floor=0.02, average=0.5, validations=3, precision="no", **plan_)
    training = ModelTraining("fit", model or Line(), Sums(), keep)
    return [row["models"]["fit"]["lost"] for row in Trainer(training, plan, folder, quiet=True).run().history]


def test_validation_improves(tmp_path: Path) -> None:
    found = learned(tmp_path)
    assert found[-1] < 0.05 < 1 < found[0]


def test_muon_trains_block_matrices_and_resumes(tmp_path: Path) -> None:
    first = learned(tmp_path, Blocks(), matrices=0.1)
    assert first[-1] < 1.5 < 2.5 < first[0]
    further = learned(tmp_path, Blocks(), steps=160, matrices=0.1)
    assert further[: len(first)] == first and further[-1] < 0.1


def test_muon_takes_the_same_step_in_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = []
    for halves in (True, False):
        monkeypatch.setattr(optim, "halves", lambda fast=halves: fast)
        torch.manual_seed(0)
        model = nn.Sequential(Matrix(24, 8), Matrix(8, 16), nn.Linear(16, 16))
        before = [one.weight.detach().clone() for one in model[:2]]
        _, muon = optim.optimisers(model, 0.1, 0.0, (0.9, 0.95), 0.1)
        model(torch.randn(64, 24)).square().sum().backward()
        muon.step()
        moved.append([one.weight.detach() - old for one, old in zip(model[:2], before, strict=True)])
    for found, wanted in zip(*moved, strict=True):
        assert (found - wanted).norm() < 0.1 * wanted.norm() > 0


def test_minutes_of_work_leave_out_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optim.time, "process_time", lambda: 60.0)
    monkeypatch.setattr(optim.time, "monotonic", lambda: 1000.0)
    monkeypatch.setattr(optim.torch, "get_num_threads", lambda: 2)
    assert optim.Clock(1.0, None, 0.0, 0.0, work=True).now() == 30
    assert optim.Clock(1.0, None, 0.0, 0.0).now() == 1000


def test_a_plan_out_of_bounds_is_refused() -> None:
    with pytest.raises(InvalidOption, match="average is 1"):
        Plan(average=1.0)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"recipes": ()}, "no recipe to train"),
        ({"batch": 0}, "batch is 0"),
        ({"recipes": ("a", "b"), "out": Path("x")}, "cannot share a folder"),
        ({"recipes": ("a", "b"), "start": Path("x")}, "one by one"),
    ],
)
def test_invalid_requests_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidOption, match=said):
        TrainingRequest(**{"recipes": ("a",), **given})


def test_a_request_removes_checkpoints_and_makes_plans_and_facts(tmp_path: Path) -> None:
    learned(tmp_path)
    wanted = TrainingRequest(recipes=("a",), out=tmp_path, fresh=True, steps=7, seed=3, command="outrider train a")
    assert (tmp_path / "checkpoint").is_dir() and wanted.begin(Path("elsewhere")) == tmp_path
    assert not (tmp_path / "checkpoint").exists()
    assert TrainingRequest(recipes=("a",)).begin(tmp_path / "usual") == tmp_path / "usual"
    plan = wanted.model_plan(Recipe(name="a", summary="", rate=0.1))
    assert (plan.steps, plan.rate, plan.validations, plan.seed) == (7, 0.1, 8, 3)
    assert wanted.facts("a", "sums") == {"recipe": "a", "command": "outrider train a", "data": "sums", "seed": 3}


def test_a_run_that_saves_no_weights_says_why(tmp_path: Path) -> None:
    class Unheld(ModelTraining):
        def validate(self, models: Mapping[str, nn.Module], autocast: Any) -> dict[str, Any]:
            return {}

    training = Unheld("a", Line(), Sums(), lambda model, provenance: None)
    wanted = TrainingRequest(recipes=("a",), steps=2, quiet=True)
    with pytest.raises(optim.TrainingError, match=r"no weights were saved: .*nothing to validate on; train on more"):
        wanted.train_model(Recipe(name="a", summary="", rate=0.1), training, tmp_path, {}, print)


def test_foreign_and_damaged_checkpoints_give_one_line(tmp_path: Path) -> None:
    learned(tmp_path)
    made = optim.accelerator(True, "no")
    with pytest.raises(optim.TrainingError, match="is of fit, not of somebody"):
        optim.load_checkpoint(made, tmp_path, "somebody", Progress)
    made.prepare(nn.Linear(2, 2))
    with pytest.raises(optim.TrainingError, match="does not fit fit"):
        optim.load_checkpoint(made, tmp_path, "fit", Progress)
    (tmp_path / "checkpoint" / "state.json").write_text('{"of": "fit", "steps": "many"}')
    with pytest.raises(optim.TrainingError, match="is damaged"):
        optim.load_checkpoint(made, tmp_path, "fit", Progress)
    assert optim.load_checkpoint(made, tmp_path / "nowhere", "fit", Progress) is None


@pytest.mark.parametrize("name", ["random_states_0.pkl", "model.safetensors", "optimizer.bin"])
def test_a_damaged_file_of_a_checkpoint_is_named(tmp_path: Path, name: str) -> None:
    learned(tmp_path, steps=4)
    path = tmp_path / "checkpoint" / name
    data = path.read_bytes()
    for damaged in (data[:-1] + bytes([data[-1] ^ 1]), data[: len(data) // 2], b""):
        path.write_bytes(damaged)
        with pytest.raises(optim.TrainingError, match=f"is damaged .{name}.; remove .* or start over"):
            learned(tmp_path, steps=6)
    path.unlink()
    with pytest.raises(optim.TrainingError, match="is damaged"):
        learned(tmp_path, steps=6)


def test_a_full_disk_keeps_the_checkpoint_before(tmp_path: Path) -> None:
    learned(tmp_path, steps=4)
    kept = (tmp_path / "checkpoint" / "state.json").read_bytes()
    with full_disk(700), pytest.raises(AssetError, match=r"(checkpoint|curve.json) can't be written: the disk is full"):
        learned(tmp_path, steps=8)
    assert (tmp_path / "checkpoint" / "state.json").read_bytes() == kept
    assert not [path for path in tmp_path.rglob("*") if "partial" in path.name]
    assert len(learned(tmp_path, steps=8)) > 1, "the run goes on from it"
