"""What every training run goes by: its clock, and checkpoints from which it goes on.

The rate rises and falls with the time that is used up, so that a run that was broken off, on this machine or a slower
one, ends as it was meant to. Knows nothing of what is learned.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim import _muon

from outrider.core.errors import OutriderError
from outrider.core.kernels.native import halves

_PAUSE = 10  # steps' time, beyond which a step was a pause
_PLACES = ("checkpoint", "checkpoint.old", "checkpoint.partial")
_STATE = "state.json"
T = TypeVar("T")
_MADE_ALIKE = "_zeropower_via_newtonschulz"  # torch's name for what Muon makes of a gradient


class TrainingError(OutriderError):
    """A run that can't begin or go on."""


class Clock:
    """How far a run is: whichever of minutes and steps is nearer its end counts."""

    def __init__(self, minutes: float, steps: int | None, warmup: float, floor: float) -> None:
        self.minutes, self.steps, self.warmup, self.floor = minutes, steps, warmup, floor
        self._usual: float | None = None

    def share(self, seconds: float, steps: int) -> float:
        """How much of it is done, from 0 to 1."""
        done = seconds / (60 * self.minutes)
        return min(max(done, steps / self.steps if self.steps else 0.0), 1.0)

    def height(self, done: float) -> float:
        """The rate as a share of its highest: up, then down along a cosine."""
        if done < self.warmup:
            return max(done / self.warmup, 0.01)
        fall = (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup))) / 2
        return self.floor + (1 - self.floor) * fall

    def spent(self, seconds: float, accelerator: Any) -> float:
        """What a step took; where the machine slept or was stopped, what steps usually take. Of several processes the
        first one's clock counts, so that all stop, validate and save at the same step."""
        usual = self._usual if self._usual is not None else seconds
        counted = min(seconds, max(_PAUSE * usual, 1.0))
        self._usual = 0.9 * usual + 0.1 * counted
        if accelerator.num_processes == 1:
            return counted
        from accelerate.utils import broadcast

        return float(broadcast(torch.tensor([counted], device=accelerator.device))[0])


def store(accelerator: Any, out: Path, state: Mapping[str, Any]) -> None:
    """All that is needed to go on; the checkpoint before is kept until this one is whole."""
    place, old, partial = (out / name for name in _PLACES)
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(partial))
    if not accelerator.is_main_process:
        return
    (partial / _STATE).write_text(json.dumps(state), encoding="utf-8")
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    partial.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def restore(accelerator: Any, out: Path, who: str, kind: type[T]) -> T | None:
    """The state of the folder's checkpoint, a dataclass, with weights and optimisers loaded; None where there is none.
    Its "who" must be the same, as whose it is."""
    found = [one for name in _PLACES[:2] if (one := out / name / _STATE).is_file()]
    if not found:
        return None
    try:
        told = json.loads(found[0].read_text(encoding="utf-8"))
        theirs = told.pop("who")
        state = TypeAdapter(kind).validate_python(told)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrainingError(f"{found[0]} is damaged ({' '.join(str(error).split()):.150}); remove {out}") from None
    if theirs != who:
        raise TrainingError(f"the checkpoint in {out} is of {theirs}, not of {who}; give another folder, or remove it")
    try:
        accelerator.load_state(str(found[0].parent))
    except Exception as error:  # whatever is wrong with it
        reason = " ".join(str(error).split())
        raise TrainingError(f"the checkpoint in {out} does not fit {who}: {reason:.200}") from None
    return state


def forget(out: Path) -> None:
    """Begin anew in a folder."""
    for name in _PLACES:
        shutil.rmtree(out / name, ignore_errors=True)


def accelerator(cpu: bool, precision: str) -> Any:
    """accelerate's, or word of what is missing. On a CPU that is slow at products of 16 bits, those are of 32."""
    try:
        import accelerate
    except ImportError:
        raise TrainingError("training needs accelerate: pip install 'outrider[train]'") from None
    accelerate.state.AcceleratorState._reset_state()  # it remembers the precision of a process's first run
    return accelerate.Accelerator(cpu=cpu, mixed_precision="no" if cpu and not halves() else precision)


def optimisers(
    model: nn.Module, rate: float, decay: float, betas: tuple[float, float], matrices: float | None = None
) -> list[torch.optim.Optimizer]:
    """AdamW; with a rate of their own, the matrices of blocks go to Muon (torch.optim.Muon, after
    https://kellerjordan.github.io/posts/muon), and what is left, embeddings among it, does not decay."""
    if matrices is None:
        return [torch.optim.AdamW(parameter_groups(model, decay), lr=rate, betas=betas, eps=1e-8, fused=True)]
    from outrider.core.engine.trainable.block import Matrix

    inner = [part.weight for part in model.modules() if isinstance(part, Matrix) and part.weight.requires_grad]
    known = {id(one) for one in inner}
    rest = [one for one in model.parameters() if one.requires_grad and id(one) not in known]
    slow = not halves() and all(one.device.type == "cpu" for one in inner)
    kind = _WideMuon if slow else torch.optim.Muon
    return [
        torch.optim.AdamW(rest, lr=rate, betas=betas, eps=1e-8, weight_decay=0.0, fused=True),
        kind(inner, lr=matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
    ]


class _WideMuon(torch.optim.Muon):
    """Muon with its products in 32 bits, for a CPU that takes a hundred times as long for those of 16, which torch's
    are made of wherever it runs."""

    def step(self, closure: Any = None) -> Any:
        usual = getattr(_muon, _MADE_ALIKE, None)
        if usual is None:  # private to torch: another version may have none
            return super().step(closure)  # type: ignore[no-untyped-call]
        setattr(_muon, _MADE_ALIKE, _made_alike)
        try:
            return super().step(closure)  # type: ignore[no-untyped-call]
        finally:
            setattr(_muon, _MADE_ALIKE, usual)


def _made_alike(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix with its singular values brought near 1, by Newton and Schulz's iteration."""
    a, b, c = coefficients
    tall = grad.shape[0] > grad.shape[1]
    x: Tensor = grad.float().T if tall else grad.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def parameter_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Matrices decay, norms and biases don't."""
    learned = [one for one in model.parameters() if one.requires_grad]
    return [
        {"params": [one for one in learned if one.dim() > 1], "weight_decay": decay},
        {"params": [one for one in learned if one.dim() < 2], "weight_decay": 0.0},
    ]
