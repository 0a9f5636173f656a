"""The trainer: several draft heads learn from one pass of their teacher, for as many minutes as there are.

Runs on `accelerate` (mixed precision, several GPUs); AdamW with a cosine over the time that is given; checkpoints, from
which a killed run goes on; validation by simulated acceptance; the best weights, the curve and its plot are written as
they come. Knows draft heads, lessons and a teacher, and nothing of what tokens mean.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.core.device import keep_memory
from outrider.core.errors import InvalidOption
from outrider.core.training.acceptance_curve import Curve, walk
from outrider.core.training.checkpoint import save
from outrider.core.training.dataset import Lesson, Teacher, batches, read
from outrider.core.training.draft_head import DraftHead
from outrider.core.training.losses import resolve
from outrider.core.training.optim import Clock, TrainingError, accelerator, optimisers, restore, store

Source = Callable[[int, float], Sequence[Lesson]]  # an epoch's number, the share of the time that is over -> lessons


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train. Whichever of minutes and steps is reached first ends it."""

    minutes: float = 10.0
    steps: int | None = None
    tokens: int = 4096  # a batch, padding included
    longest: int = 768  # of a row
    rate: float = 1e-3
    warmup: float = 0.03  # share of the time in which the rate rises
    floor: float = 0.05  # share of the rate that is left at the end
    decay: float = 0.01
    clip: float = 1.0
    loss: str = "kl"
    seed: int = 0
    precision: str = "bf16"  # what products are computed in: bf16 (where it is fast), fp16 or no
    validate_minutes: float | None = None  # None: six times in all
    checkpoint_minutes: float = 3.0
    depth: int = 7  # of the drafts that validation simulates

    def __post_init__(self) -> None:
        for name, good, wanted in (
            ("minutes", self.minutes > 0, "above 0"),
            ("steps", self.steps is None or self.steps > 0, "1 or more"),
            ("tokens", self.tokens > 1, "2 or more"),
            ("rate", self.rate > 0, "above 0"),
            ("clip", self.clip > 0, "above 0"),
            ("precision", self.precision in ("bf16", "fp16", "no"), "bf16, fp16 or no"),
        ):
            if not good:
                raise InvalidOption(f"{name} is {getattr(self, name)}; it must be {wanted}")


@dataclass
class Progress:
    """How far training has come: all of it, besides weights and optimisers, that a checkpoint holds."""

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0  # that the teacher has read
    counted: int = 0  # positions that a loss was about
    epoch: int = 0
    place: int = 0  # batches of this epoch that are done
    begun: float | None = None  # the share of the time that was over when the epoch began
    lessons: int | None = None  # of this epoch: a file may have grown since
    best: dict[str, float] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Draft heads by name, each with its own optimiser, and what they learn from. `facts` are noted with the
    weights."""

    def __init__(
        self,
        teacher: Teacher,
        draft_heads: Mapping[str, DraftHead],
        source: Source,
        held: Sequence[Lesson],
        plan: Plan,
        out: Path,
        *,
        losses: Mapping[str, str] | None = None,
        rates: Mapping[str, float] | None = None,
        facts: Mapping[str, Any] | None = None,
        quiet: bool = False,
    ) -> None:
        if not draft_heads:
            raise InvalidOption("there is nobody to train; give at least one draft head")
        self.teacher, self.source, self.held, self.plan, self.out = teacher, source, held, plan, out
        self.facts, self.quiet = dict(facts or {}), quiet
        cpu = teacher.device.type == "cpu"
        if cpu:
            keep_memory()
        self.accelerator = accelerator(cpu, plan.precision)
        self.main = bool(self.accelerator.is_main_process)
        self.progress = Progress()
        self.clock = Clock(plan.minutes, plan.steps, plan.warmup, plan.floor)
        self.names = list(draft_heads)
        self.loss = {name: (losses or {}).get(name, plan.loss) for name in draft_heads}
        self.rate = {name: (rates or {}).get(name, plan.rate) for name in draft_heads}
        self.losses = {name: resolve(one) for name, one in self.loss.items()}
        self.needs = frozenset[str]().union(*(one.needs for one in draft_heads.values()))
        self.draft_heads: dict[str, nn.Module] = {}
        self._optimisers, self._schedules = [], []
        for name, draft_head in draft_heads.items():
            (optimiser,) = optimisers(draft_head, self.rate[name], plan.decay, (0.9, 0.95))
            schedule = torch.optim.lr_scheduler.LambdaLR(optimiser, lambda _: self._height())
            ready = self.accelerator.prepare(draft_head, optimiser)
            self.draft_heads[name] = ready[0]
            self._optimisers.append(ready[1])
            self._schedules.append(schedule)
        out.mkdir(parents=True, exist_ok=True)

    def _share(self) -> float:
        """How much of the training is done, from 0 to 1."""
        return self.clock.share(self.progress.seconds, self.progress.steps)

    def _height(self) -> float:
        return self.clock.height(self._share())

    # ---- the loop

    def run(self) -> Progress:
        """Train until the time is over; Ctrl-C ends it in good order, and the same call goes on from there."""
        torch.manual_seed(self.plan.seed)
        resumed = self.resume()
        plan, progress = self.plan, self.progress
        every = plan.validate_minutes or plan.minutes / 6
        validated = progress.seconds if resumed else -math.inf
        saved = progress.seconds
        bar = self._bar()
        running: dict[str, float] = {}
        start = time.monotonic()
        try:
            for group in self._groups_of_lessons():
                if self._share() >= 1:
                    break
                if progress.seconds - validated >= 60 * every:
                    self.validate(running)
                    validated, running, start = progress.seconds, {}, time.monotonic()
                self._step(group, running)
                now = time.monotonic()
                progress.seconds += self.clock.spent(now - start, self.accelerator)
                start = now
                bar.n = min(round(progress.seconds), bar.total)
                bar.set_postfix_str(self._words(running), refresh=False)
                bar.update(0)
                if progress.seconds - saved >= 60 * plan.checkpoint_minutes:
                    self.checkpoint()
                    saved, start = progress.seconds, time.monotonic()
        except KeyboardInterrupt:
            bar.write("broken off; the same command goes on from here")
        finally:
            bar.close()
        self.validate(running)
        self.checkpoint()
        return progress

    def _groups_of_lessons(self) -> Iterator[Sequence[Lesson]]:
        """Batches of this process, epoch after epoch, from where progress stands."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        progress = self.progress
        while True:
            progress.begun = self._share() if progress.begun is None else progress.begun
            lessons = self.source(progress.epoch, progress.begun)
            if progress.lessons is not None:
                lessons = lessons[: progress.lessons]
            progress.lessons = len(lessons)
            groups = batches(lessons, self.plan.tokens, self.plan.seed + progress.epoch, longest=self.plan.longest)
            if len(groups) < world:
                raise TrainingError(
                    f"there are {len(lessons)} lessons, which make {len(groups)} batches for {world} devices; make more"
                )
            while progress.place + world <= len(groups):
                group = groups[progress.place + rank]
                progress.place += world
                yield group
            progress.epoch, progress.place, progress.lessons, progress.begun = progress.epoch + 1, 0, None, None

    def _step(self, group: Sequence[Lesson], running: dict[str, float]) -> None:
        """One batch: the teacher reads it once, and every draft head learns from it."""
        batch = read(self.teacher, group, self.needs)
        for name, optimiser, schedule in zip(self.names, self._optimisers, self._schedules, strict=True):
            draft_head = self.draft_heads[name]
            draft_head.train()
            loss = draft_head(batch, self.losses[name])
            self.accelerator.backward(loss)
            norm = self.accelerator.clip_grad_norm_(draft_head.parameters(), self.plan.clip)
            value = float(loss.detach())
            if math.isfinite(value) and math.isfinite(float(norm)):
                optimiser.step()
                running[name] = 0.95 * running.get(name, value) + 0.05 * value
            schedule.step()
            optimiser.zero_grad(set_to_none=True)
        self.progress.steps += 1
        self.progress.tokens += sum(one.size for one in group) * self.accelerator.num_processes
        self.progress.counted += int(batch.answer.sum()) * self.accelerator.num_processes

    # ---- validation

    @torch.no_grad()
    def judge(self) -> dict[str, Curve]:
        """Simulated acceptance of every draft head on what was held out."""
        found: dict[str, Curve] = {}
        greedy = [one for one in self.held if one.temperature == 0 and one.counts is None]
        for group in batches(greedy, self.plan.tokens, 0, longest=self.plan.longest):
            batch = read(self.teacher, group, self.needs)
            for name in self.names:
                draft_head = self._plain(name).eval()
                with self.accelerator.autocast():
                    curve = walk(draft_head.hits(batch, self.plan.depth), batch.answer)
                found[name] = found[name] + curve if name in found else curve
        return found

    def _plain(self, name: str) -> DraftHead:
        draft_head = self.accelerator.unwrap_model(self.draft_heads[name], keep_fp32_wrapper=True)
        assert isinstance(draft_head, DraftHead)
        return draft_head

    def validate(self, running: Mapping[str, float]) -> None:
        """Judge, note it in the curve, and keep what is the best so far."""
        progress = self.progress
        if not self.main:
            return
        curves = self.judge()
        row: dict[str, Any] = {"minutes": round(progress.seconds / 60, 3), "steps": progress.steps}
        row |= {"tokens": progress.tokens, "rate": self.plan.rate * self._height(), "draft_heads": {}}
        for name, curve in curves.items():
            row["draft_heads"][name] = {"loss": running.get(name)} | curve.to_dict()
        progress.history.append(row)
        for name, curve in curves.items():
            if progress.steps and curve.tokens_per_call >= progress.best.get(name, 0.0):
                progress.best[name] = curve.tokens_per_call
                save(self._plain(name), self.out / f"{name}.safetensors", self._provenance(name, curve))
        (self.out / "curve.json").write_text(json.dumps(progress.history, indent=1) + "\n", encoding="utf-8")
        plot(progress.history, self.out / "curve.png")

    def _provenance(self, name: str, curve: Curve) -> dict[str, Any]:
        progress = self.progress
        done = {"minutes": round(progress.seconds / 60, 2), "steps": progress.steps, "tokens_read": progress.tokens}
        done |= {"positions": progress.counted, "epochs": progress.epoch}
        parameters = sum(one.numel() for one in self._plain(name).state_dict().values())
        return {
            **self.facts,
            "plan": asdict(replace(self.plan, loss=self.loss[name], rate=self.rate[name])),
            "done": done,
            "parameters": parameters,
            "validation": {"rows": len(self.held), **curve.to_dict()},
        }

    # ---- checkpoints

    def checkpoint(self) -> None:
        store(self.accelerator, self.out, {"who": ", ".join(self.names), **asdict(self.progress)})

    def resume(self) -> bool:
        """Go on from the folder's checkpoint, if there is one."""
        found = restore(self.accelerator, self.out, ", ".join(self.names), Progress)
        self.progress = found or self.progress
        return found is not None

    # ---- words

    def _bar(self) -> Any:
        from tqdm import tqdm

        total = max(round(60 * self.plan.minutes), 1)
        form = "{l_bar}{bar}| {n}/{total} s [{postfix}]"
        return tqdm(total=total, desc="train", disable=self.quiet or not self.main, bar_format=form, mininterval=1.0)

    def _words(self, running: Mapping[str, float]) -> str:
        parts = [f"step {self.progress.steps}"]
        for name in self.names:
            best = self.progress.best.get(name)
            parts.append(f"{name} {running.get(name, math.nan):.3f}" + (f" ({best:.2f} a call)" if best else ""))
        return ", ".join(parts)


def plot(history: Sequence[Mapping[str, Any]], path: Path) -> bool:
    """Loss and tokens a call over time, and the last acceptance by place; False where matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, calls, places = figure.subplots(1, 3)
    names = list(dict.fromkeys(name for row in history for name in row["draft_heads"]))
    for name in names:
        rows = [(row["minutes"], row["draft_heads"][name]) for row in history if name in row["draft_heads"]]
        known = [(minutes, one["loss"]) for minutes, one in rows if one["loss"] is not None]
        loss.plot([one[0] for one in known], [one[1] for one in known], marker=".", label=name)
        calls.plot([one[0] for one in rows], [one[1]["tokens_per_call"] for one in rows], marker=".", label=name)
        last = rows[-1][1]
        (line,) = places.plot(range(1, len(last["conditional"]) + 1), last["conditional"], marker=".", label=name)
        places.plot(range(1, len(last["unconditional"]) + 1), last["unconditional"], "--", color=line.get_color())
    loss.set(title="loss", xlabel="minutes")
    calls.set(title="tokens a target call, simulated chains", xlabel="minutes")
    places.set(title="accepted by place: of those tried, of all (dashed)", xlabel="place in the draft", ylim=(0, 1))
    for axes in (loss, calls, places):
        axes.grid(alpha=0.3)
    if names:
        calls.legend()
    figure.savefig(path, dpi=110)
    return True
