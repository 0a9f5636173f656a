"""The training loop, for draft heads that learn from a teacher and for models that learn from data alone.

Runs on `accelerate` (mixed precision, several GPUs): AdamW or Muon under a cosine schedule over the minutes available,
an average of the weights if requested, checkpoints from which an interrupted run resumes (each with a plot of the
curve), and validation, which saves the best weights and extends the curve. What is trained, on what, and how it is
validated is a Training: outrider.core.training.head_training or outrider.core.training.model_training.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.core.assets.files import write_atomically
from outrider.core.device import keep_memory
from outrider.core.errors import InvalidOption
from outrider.core.training.optim import Clock, accelerator, load_checkpoint, optimisers, save_checkpoint

_BETAS = (0.9, 0.95)
_SMOOTHING = 0.95  # of the loss that is displayed and recorded


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train. Training ends after `minutes` or `steps`, whichever comes first."""

    minutes: float = 10.0
    steps: int | None = None
    rate: float = 1e-3
    matrices: float | None = None  # the learning rate of blocks' matrices under Muon; None: AdamW trains everything
    warmup: float = 0.03  # share of the time in which the rate rises
    floor: float = 0.05  # share of the rate at the end
    decay: float = 0.01
    clip: float = 1.0
    average: float | None = None  # decay of the average of weights that is validated and saved; None: no average
    seed: int = 0
    precision: str = "bf16"  # of matrix products: bf16 (where it is fast), fp16 or no
    validations: int = 6
    patience: int = 0  # the run ends after so many validations without a better one; 0: never
    checkpoint_minutes: float = 3.0
    work: bool = False  # count minutes of work, not of the clock: outrider.core.training.optim.Clock

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("minutes", self.minutes > 0, "above 0"),
            ("steps", self.steps is None or self.steps > 0, "1 or more"),
            ("rate", self.rate > 0, "above 0"),
            ("clip", self.clip > 0, "above 0"),
            ("average", self.average is None or 0 <= self.average < 1, "at least 0 and below 1"),
            ("precision", self.precision in ("bf16", "fp16", "no"), "bf16, fp16 or no"),
            ("validations", self.validations > 0, "1 or more"),
            ("patience", self.patience >= 0, "0 (off) or more"),
        ):
            if not good:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be {wanted}")


@dataclass
class Position:
    """The position of a run in its training examples, if they come in epochs."""

    epoch: int = 0
    batch: int = 0  # the next one of this epoch
    begun: float | None = None  # the finished share of the run when the epoch began
    examples: int | None = None  # of this epoch; their file may have grown since
    tokens: int = 0  # read by the teacher
    counted: int = 0  # positions with a loss


@dataclass
class Progress:
    """The progress of a run: the contents of a checkpoint besides weights and optimisers."""

    seconds: float = 0.0
    steps: int = 0
    position: Position = field(default_factory=Position)
    best: dict[str, float] = field(default_factory=dict)
    stale: int = 0  # validations since the last that was the best of any module
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Validation:
    """One module's result: the value that decides which weights are best, and all measures by name."""

    value: float
    measures: Mapping[str, Any]


Share = Callable[[], float]  # the finished share of the run
Autocast = Callable[[], AbstractContextManager[Any]]  # the precision of the run's matrix products


class Training(Protocol):
    """Modules by name that are trained on the same batches, each with its own loss and optimiser."""

    maximize: bool  # whether a larger validation value is better

    @property
    def models(self) -> Mapping[str, nn.Module]: ...

    def batches(self, progress: Progress, share: Share, rank: int, world: int) -> Iterator[Any]:
        """Batches for one of several processes, starting at the position in `progress`; endless."""

    def loss(self, name: str, model: nn.Module, batch: Any) -> Tensor:
        """The loss of a module, which may be wrapped for several devices, so only calling it is allowed."""

    def validate(self, models: Mapping[str, nn.Module], autocast: Autocast) -> Mapping[str, Validation]: ...
    def save(self, name: str, model: nn.Module, provenance: Mapping[str, Any]) -> None: ...


class Trainer:
    """One run. `rates` are learning rates of some modules; `facts` are recorded with the weights."""

    def __init__(
        self,
        training: Training,
        plan: Plan,
        out: Path,
        *,
        device: torch.device | str = "cpu",
        rates: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        self.training, self.plan, self.out = training, plan, out
        self.facts, self.quiet = dict(facts or {}), quiet
        cpu = torch.device(device).type == "cpu"
        if cpu:
            keep_memory()
        self.accelerator = accelerator(cpu, plan.precision)
        self.main = bool(self.accelerator.is_main_process)
        self.progress = Progress()
        self.clock = Clock(plan.minutes, plan.steps, plan.warmup, plan.floor, work=plan.work)
        self.label = ", ".join(training.models)
        self.rates = {name: (rates or {}).get(name, plan.rate) for name in training.models}
        self.models: dict[str, nn.Module] = {}
        self.averages: dict[str, nn.Module] = {}
        self._optimisers: dict[str, list[Any]] = {}
        self._schedules = []
        for name, model in training.models.items():
            average = None if plan.average is None else copy.deepcopy(model).requires_grad_(False).eval()
            own = optimisers(model, self.rates[name], plan.decay, _BETAS, plan.matrices)
            self._schedules += [
                torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: self._factor()) for optimiser in own
            ]
            self.models[name], *self._optimisers[name] = self.accelerator.prepare(model, *own)
            if average is not None:
                self.averages[name] = self.accelerator.prepare_model(average, evaluation_mode=True)
        out.mkdir(parents=True, exist_ok=True)

    def share(self) -> float:
        """The finished share of the run, from 0 to 1."""
        return self.clock.share(self.progress.seconds, self.progress.steps)

    def _factor(self) -> float:
        return self.clock.factor(self.share())

    def run(self) -> Progress:
        """Train until the time is over. After Ctrl-C the run is saved, and the same call resumes it."""
        torch.manual_seed(self.plan.seed)
        self.resume()
        progress, losses = self.progress, dict[str, float]()
        validated = self.share() if progress.history else -math.inf
        saved = progress.seconds
        batches = self.training.batches(
            progress, self.share, self.accelerator.process_index, self.accelerator.num_processes
        )
        bar = self._bar()
        start = self.clock.now()
        try:
            while self.share() < 1 and not 0 < self.plan.patience <= progress.stale:
                if self.share() - validated >= 1 / self.plan.validations:
                    self.validate(losses)
                    validated, start = self.share(), self.clock.now()
                self._step(next(batches), losses)
                now = self.clock.now()
                progress.seconds += self.clock.elapsed(now - start, self.accelerator)
                start = now
                bar.n = min(round(1000 * self.share()), bar.total)
                bar.set_postfix_str(self._status(losses), refresh=False)
                bar.update(0)
                if progress.seconds - saved >= 60 * self.plan.checkpoint_minutes:
                    self.checkpoint()
                    saved, start = progress.seconds, self.clock.now()
        except KeyboardInterrupt:
            self.checkpoint()
            bar.write("interrupted; the same command resumes the run")
            return progress
        finally:
            bar.close()
        self.validate(losses)
        self.checkpoint()
        return progress

    def _step(self, batch: Any, losses: dict[str, float]) -> None:
        """Train every module on one batch; a step whose loss or gradient is not finite is skipped."""
        for name, model in self.models.items():
            model.train()
            loss = self.training.loss(name, model, batch)
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(model.parameters(), self.plan.clip)
            value, norm = torch.stack(
                [loss.detach().float(), torch.as_tensor(norm, device=loss.device).float()]
            ).tolist()
            if math.isfinite(value) and math.isfinite(norm):  # the step's only wait for the device
                for optimiser in self._optimisers[name]:
                    optimiser.step()
                losses[name] = _SMOOTHING * losses.get(name, value) + (1 - _SMOOTHING) * value
            for optimiser in self._optimisers[name]:
                optimiser.zero_grad(set_to_none=True)
        for schedule in self._schedules:
            schedule.step()
        self.progress.steps += 1
        for name, average in self.averages.items():
            self._follow(average, self.models[name])

    @torch.no_grad()
    def _follow(self, average: nn.Module, model: nn.Module) -> None:
        """Move the average of the weights towards the weights; faster in the first steps."""
        assert self.plan.average is not None
        stay = min(self.plan.average, (1 + self.progress.steps) / (10 + self.progress.steps))
        pairs = list(zip(self._unwrapped(average).parameters(), self._unwrapped(model).parameters(), strict=True))
        torch._foreach_lerp_([mean for mean, _ in pairs], [weight for _, weight in pairs], 1 - stay)

    def _unwrapped(self, model: nn.Module) -> nn.Module:
        """The model without its wrapper for several devices. The wrapper for precision stays, since removing it cannot
        be undone."""
        unwrapped: nn.Module = self.accelerator.unwrap_model(model, keep_fp32_wrapper=True)
        return unwrapped

    @torch.no_grad()
    def validate(self, losses: Mapping[str, float]) -> None:
        """Validate the modules, or the averages of their weights, extend the curve, and save the best ones."""
        progress = self.progress
        if not self.main:
            return
        models = {name: self._unwrapped(self.averages.get(name, model)).eval() for name, model in self.models.items()}
        results = self.training.validate(models, self.accelerator.autocast)
        row: dict[str, Any] = {"minutes": round(progress.seconds / 60, 3), "steps": progress.steps}
        row |= {"tokens": progress.position.tokens, "rate": self.plan.rate * self._factor(), "models": {}}
        for name, result in results.items():
            row["models"][name] = {"loss": losses.get(name), **result.measures}
        progress.history.append(row)
        progress.stale += 1
        for name, result in results.items():
            if progress.steps and self._is_best(name, result.value):
                progress.stale = 0
                progress.best[name] = result.value
                self.training.save(name, models[name], self._provenance(name, models[name], result))
        if not self.quiet:
            print(f"{self.label}: {self._row(row)}", flush=True)
        write_atomically(self.out / "curve.json", json.dumps(progress.history, indent=1) + "\n")

    def _is_best(self, name: str, value: float) -> bool:
        best = self.progress.best.get(name)
        return best is None or (value >= best if self.training.maximize else value <= best)

    def _provenance(self, name: str, model: nn.Module, result: Validation) -> dict[str, Any]:
        progress, position = self.progress, self.progress.position
        done: dict[str, Any] = {"minutes": round(progress.seconds / 60, 2), "steps": progress.steps}
        if position.tokens:
            done |= {"tokens_read": position.tokens, "positions": position.counted, "epochs": position.epoch}
        return {
            **self.facts,
            "plan": asdict(replace(self.plan, rate=self.rates[name])),
            "done": done,
            "parameters": sum(tensor.numel() for tensor in model.state_dict().values()),
            "validation": dict(result.measures),
        }

    def checkpoint(self) -> None:
        save_checkpoint(self.accelerator, self.out, {"of": self.label, **asdict(self.progress)})
        if self.main:
            plot(self.progress.history, self.out / "curve.png")

    def resume(self) -> bool:
        """Continue from the folder's checkpoint, if there is one."""
        progress = load_checkpoint(self.accelerator, self.out, self.label, Progress)
        self.progress = progress or self.progress
        return progress is not None

    def _bar(self) -> Any:
        from tqdm import tqdm

        form = "{l_bar}{bar}| [{postfix}]"
        hidden = self.quiet or not self.main
        return tqdm(total=1000, desc=self.label, disable=hidden, bar_format=form, mininterval=1.0)

    def _status(self, losses: Mapping[str, float]) -> str:
        parts = [f"step {self.progress.steps}"]
        for name in self.models:
            best = self.progress.best.get(name)
            parts.append(f"{name} {losses.get(name, math.nan):.4f}" + (f" (best {best:.4g})" if best else ""))
        return ", ".join(parts)

    def _row(self, row: Mapping[str, Any]) -> str:
        parts = [f"{row['minutes']:.4g} minutes", f"step {row['steps']}"]
        for name, measures in row["models"].items():
            parts.append(" ".join([name, *(f"{key} {value:.4g}" for key, value in _numbers(measures).items())]))
        return ", ".join(parts)


def _numbers(measures: Mapping[str, Any]) -> dict[str, float]:
    return {name: value for name, value in measures.items() if isinstance(value, float)}


def plot(history: list[dict[str, Any]], path: Path) -> bool:
    """Plot every measure over time, with one line per module; False if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    lines = [(row["minutes"], name, _numbers(measures)) for row in history for name, measures in row["models"].items()]
    measures = list(dict.fromkeys(measure for _, _, numbers in lines for measure in numbers))
    names = list(dict.fromkeys(name for _, name, _ in lines))
    if not measures:
        return False
    figure = Figure(figsize=(4.2 * len(measures), 3.4), layout="constrained")
    for measure, axes in zip(measures, figure.subplots(1, len(measures), squeeze=False)[0], strict=True):
        for name in names:
            points = [(x, numbers[measure]) for x, owner, numbers in lines if owner == name and measure in numbers]
            axes.plot([x for x, _ in points], [y for _, y in points], marker=".", label=name)
        axes.set(title=measure, xlabel="minutes")
        axes.grid(alpha=0.3)
    if len(names) > 1:
        figure.axes[-1].legend()
    figure.savefig(path, dpi=110)
    return True
