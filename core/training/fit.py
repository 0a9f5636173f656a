"""Learning from data alone, with nobody to teach: codecs, token models, judges.

A course makes its batches by number and says what a model loses on one, so that a run that was broken off goes on with
the very next batch. AdamW with a cosine over the time that is given, an average of the weights that is judged and kept,
checkpoints, a curve and its plot; on `accelerate`, like outrider.core.training.trainer, which is for draft heads with a
teacher.
"""

from __future__ import annotations

import copy
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from outrider.core.errors import InvalidOption
from outrider.core.training.optim import Clock, accelerator, forget, optimisers, restore, store


class TrainingTask(Protocol):
    """What is learned. `model(*batch)` gives the loss, a number; `judge` gives measures by name, the first of which
    decides what is best: the smallest."""

    def batch(self, number: int, share: float) -> tuple[Tensor, ...]: ...  # the share of the time that is over
    def judge(self, model: nn.Module) -> dict[str, float]: ...


Save = Callable[[nn.Module, Mapping[str, Any]], None]  # the averaged model, and where it comes from


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How to learn. Whichever of minutes and steps is reached first ends it."""

    minutes: float = 10.0
    steps: int | None = None
    rate: float = 1e-3
    matrices: float | None = None  # the rate of blocks' matrices, if Muon is to teach them
    warmup: float = 0.03  # share of the time in which the rate rises
    floor: float = 0.02  # share of the rate that is left at the end
    decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    average: float = 0.998  # how much of the average of weights stays at each step, once there were many
    seed: int = 0
    precision: str = "bf16"  # what products are computed in: bf16 (where it is fast), fp16 or no
    judgements: int = 8  # in all
    checkpoint_minutes: float = 2.0

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("minutes", self.minutes > 0, "above 0"),
            ("steps", self.steps is None or self.steps > 0, "1 or more"),
            ("rate", self.rate > 0, "above 0"),
            ("average", 0 <= self.average < 1, "from 0 up to, but not, 1"),
            ("precision", self.precision in ("bf16", "fp16", "no"), "bf16, fp16 or no"),
        ):
            if not good:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be {wanted}")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What `outrider train` was told about the parts of a modality's model."""

    recipes: tuple[str, ...]
    device: str = "cpu"
    minutes: float = 30.0  # each
    steps: int | None = None
    out: Path | None = None
    data: Path | None = None  # what was prepared to learn from, a file or a folder; None: what lies in the cache
    batch: int | None = None
    rate: float | None = None
    seed: int = 0
    fresh: bool = False  # forget the checkpoint in the folder
    start: Path | None = None  # weights to begin from, instead of from chance
    quiet: bool = False
    options: Mapping[str, Any] | None = None  # of the part, instead of the recipe's
    command: str = ""  # that asked for it, noted with the weights

    def __post_init__(self) -> None:
        if not self.recipes:
            raise InvalidOption("there is no recipe to train; `outrider train --list` names them")
        if self.batch is not None and self.batch < 1:
            raise InvalidOption(f"a batch of {self.batch} teaches nothing; it must be 1 or more")
        if self.out is not None and len(self.recipes) > 1:
            raise InvalidOption("several recipes go to a folder each; leave out= away, or train them one by one")
        if self.start is not None and len(self.recipes) > 1:
            raise InvalidOption("weights to begin from are those of one recipe; train them one by one")

    @property
    def place(self) -> torch.device:
        """Of several processes each has a GPU of its own."""
        return torch.device(f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if self.device == "cuda" else self.device)

    def begin(self, usual: Path) -> Path:
        """The folder of a run, without what is to be forgotten."""
        out = self.out or usual
        if self.fresh and int(os.environ.get("RANK", "0")) == 0:
            forget(out)
        torch.manual_seed(self.seed)
        return out

    def pace(self, rate: float, decay: float, matrices: float | None = None) -> Pace:
        return Pace(
            minutes=self.minutes,
            steps=self.steps,
            rate=self.rate or rate,
            matrices=matrices,
            decay=decay,
            seed=self.seed,
            judgements=8 if self.place.type == "cpu" else 24,
        )

    def facts(self, recipe: str, data: str) -> dict[str, Any]:
        """Where weights come from."""
        return {"recipe": recipe, "command": self.command, "data": data, "seed": self.seed}


@dataclass
class State:
    """How far it has come: all of it, besides weights and optimiser, that a checkpoint holds."""

    seconds: float = 0.0
    steps: int = 0
    best: float | None = None
    history: list[dict[str, float]] = field(default_factory=list)


class Fit:
    """One run. `facts` are noted with the weights."""

    def __init__(
        self,
        model: nn.Module,
        course: TrainingTask,
        pace: Pace,
        out: Path,
        save: Save,
        *,
        device: torch.device | str = "cpu",
        name: str = "fit",
        facts: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        self.course, self.pace, self.out, self.save = course, pace, out, save
        self.name, self.facts, self.quiet = name, dict(facts or {}), quiet
        self.accelerator = accelerator(torch.device(device).type == "cpu", pace.precision)
        self.main = bool(self.accelerator.is_main_process)
        self.state = State()
        average = copy.deepcopy(model).requires_grad_(False).eval()
        those = optimisers(model, pace.rate, pace.decay, pace.betas, pace.matrices)
        self.clock = Clock(pace.minutes, pace.steps, pace.warmup, pace.floor)
        slower = torch.optim.lr_scheduler.LambdaLR
        self.schedules = [slower(one, lambda _: self.clock.height(self.share())) for one in those]
        self.model, *self.optimisers = self.accelerator.prepare(model, *those)
        self.average = self.accelerator.prepare_model(average, evaluation_mode=True)
        out.mkdir(parents=True, exist_ok=True)

    def share(self) -> float:
        """How much of it is done, from 0 to 1."""
        return self.clock.share(self.state.seconds, self.state.steps)

    # ---- the loop

    def run(self) -> State:
        """Learn until the time is over; Ctrl-C ends it in good order, and the same call goes on from there."""
        torch.manual_seed(self.pace.seed)
        self.resume()
        state, pace = self.state, self.pace
        judged = self.share() if state.history else -math.inf
        saved, running = state.seconds, math.nan
        bar = self._bar()
        start = time.monotonic()
        try:
            while self.share() < 1:
                if self.share() - judged >= 1 / max(pace.judgements, 1):
                    self.judge(running)
                    judged, start = self.share(), time.monotonic()
                loss = self._step()
                running = loss if math.isnan(running) else 0.98 * running + 0.02 * loss
                now = time.monotonic()
                state.seconds += self.clock.spent(now - start, self.accelerator)
                start = now
                bar.n = min(round(1000 * self.share()), bar.total)
                bar.set_postfix_str(f"step {state.steps}, loss {running:.4f}", refresh=False)
                bar.update(0)
                if state.seconds - saved >= 60 * pace.checkpoint_minutes:
                    self.checkpoint()
                    saved, start = state.seconds, time.monotonic()
        except KeyboardInterrupt:
            bar.write("broken off; the same command goes on from here")
        finally:
            bar.close()
        self.judge(running)
        self.checkpoint()
        return state

    def _step(self) -> float:
        """One batch."""
        state, world = self.state, self.accelerator.num_processes
        number = state.steps * world + self.accelerator.process_index
        self.model.train()
        loss = self.model(*self.course.batch(number, self.share()))
        self.accelerator.backward(loss)
        norm = self.accelerator.clip_grad_norm_(self.model.parameters(), self.pace.clip)
        value = float(loss.detach())
        if math.isfinite(value) and math.isfinite(float(norm)):
            for optimiser in self.optimisers:
                optimiser.step()
        for schedule in self.schedules:
            schedule.step()
        for optimiser in self.optimisers:
            optimiser.zero_grad(set_to_none=True)
        state.steps += 1
        self._follow(min(self.pace.average, (1 + state.steps) / (10 + state.steps)))
        return value

    @torch.no_grad()
    def _follow(self, stay: float) -> None:
        """The average of weights moves towards the weights."""
        mine, theirs = self._plain(self.average), self._plain(self.model)
        pairs = list(zip(mine.parameters(), theirs.parameters(), strict=True))
        torch._foreach_lerp_([one for one, _ in pairs], [other for _, other in pairs], 1 - stay)

    def _plain(self, model: nn.Module) -> nn.Module:
        """Without what shares it among devices; its precision stays (taking that off would end it for good)."""
        found: nn.Module = self.accelerator.unwrap_model(model, keep_fp32_wrapper=True)
        return found

    @torch.no_grad()
    def judge(self, running: float) -> None:
        """Judge the average, note it in the curve, and keep what is the best so far."""
        state = self.state
        if not self.main:
            return
        average = self._plain(self.average).eval()
        with self.accelerator.autocast():
            found = self.course.judge(average)
        row = {"minutes": round(state.seconds / 60, 3), "steps": float(state.steps), **found}
        if math.isfinite(running):
            row["loss"] = running
        state.history.append(row)
        first = next(iter(found.values()))
        if state.steps and (state.best is None or first <= state.best):
            state.best = first
            done = {"minutes": round(state.seconds / 60, 2), "steps": state.steps}
            self.save(average, {**self.facts, "pace": asdict(self.pace), "done": done, "judged": found})
        if not self.quiet:
            words = ", ".join(f"{name} {value:.4g}" for name, value in row.items())
            print(f"{self.name}: {words}", flush=True)
        (self.out / "curve.json").write_text(json.dumps(state.history, indent=1) + "\n", encoding="utf-8")
        plot(state.history, self.out / "curve.png")

    # ---- checkpoints

    def checkpoint(self) -> None:
        store(self.accelerator, self.out, {"who": self.name, **asdict(self.state)})

    def resume(self) -> bool:
        """Go on from the folder's checkpoint, if there is one."""
        found = restore(self.accelerator, self.out, self.name, State)
        self.state = found or self.state
        return found is not None

    def _bar(self) -> Any:
        from tqdm import tqdm

        form = "{l_bar}{bar}| [{postfix}]"
        return tqdm(total=1000, desc=self.name, disable=self.quiet or not self.main, bar_format=form, mininterval=1.0)


def plot(history: list[dict[str, float]], path: Path) -> bool:
    """Every measure over time; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    names = [name for name in dict.fromkeys(key for row in history for key in row) if name not in ("minutes", "steps")]
    if not names:
        return False
    figure = Figure(figsize=(4.2 * len(names), 3.4), layout="constrained")
    for name, axes in zip(names, figure.subplots(1, len(names), squeeze=False)[0], strict=True):
        rows = [row for row in history if name in row]
        axes.plot([row["minutes"] for row in rows], [row[name] for row in rows], marker=".")
        axes.set(title=name, xlabel="minutes")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)
    return True
