"""The clock, the optimisers and the checkpoints of a training run.

The learning rate follows the used share of the planned time, so that a run on a slower machine or a resumed run ends as
planned. Independent of what is trained.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.optim import _muon

from outrider.core.assets.files import writing
from outrider.core.errors import OutriderError, install_command
from outrider.core.kernels.native import halves

_PAUSE = 10  # a step that takes longer than this many usual ones contains a pause
_FOLDERS = ("checkpoint", "checkpoint.old", "checkpoint.partial")
_STATE = "state.json"
T = TypeVar("T")
_ORTHOGONALISE = "_zeropower_via_newtonschulz"  # torch's private name of Muon's iteration


class TrainingError(OutriderError):
    """A run that cannot start or resume."""


class Clock:
    """The progress of a run, by minutes or by steps, whichever is further. `work`: minutes that the processor has spent
    on this process, divided by its threads, so that other processes don't shorten a run."""

    def __init__(self, minutes: float, steps: int | None, warmup: float, floor: float, *, work: bool = False) -> None:
        self.minutes, self.steps, self.warmup, self.floor, self.work = minutes, steps, warmup, floor, work
        self._usual: float | None = None

    def now(self) -> float:
        """A time in seconds, of which differences are to be counted."""
        return time.process_time() / torch.get_num_threads() if self.work else time.monotonic()

    def share(self, seconds: float, steps: int) -> float:
        """The finished share of the run, from 0 to 1."""
        done = seconds / (60 * self.minutes)
        return min(max(done, steps / self.steps if self.steps else 0.0), 1.0)

    def factor(self, done: float) -> float:
        """The learning rate as a share of its maximum: a linear warm-up, then a cosine."""
        if done < self.warmup:
            return max(done / self.warmup, 0.01)
        fall = (1 + math.cos(math.pi * (done - self.warmup) / (1 - self.warmup))) / 2
        return self.floor + (1 - self.floor) * fall

    def elapsed(self, seconds: float, accelerator: Any) -> float:
        """The seconds to count for a step: at most _PAUSE times the usual, in case the machine slept. All processes use
        the first one's clock, so that they stop, validate and save at the same step."""
        usual = self._usual if self._usual is not None else seconds
        counted = min(seconds, max(_PAUSE * usual, 1.0))
        self._usual = 0.9 * usual + 0.1 * counted
        if accelerator.num_processes == 1:
            return counted
        from accelerate.utils import broadcast

        return float(broadcast(torch.tensor([counted], device=accelerator.device))[0])


def save_checkpoint(accelerator: Any, out: Path, state: Mapping[str, Any]) -> None:
    """Write all that a resumed run needs; the previous checkpoint is kept until this one is complete."""
    place, old, partial = (out / name for name in _FOLDERS)
    if accelerator.is_main_process:
        shutil.rmtree(partial, ignore_errors=True)
    accelerator.wait_for_everyone()
    try:
        with writing(place):
            accelerator.save_state(str(partial))
            accelerator.wait_for_everyone()
            if not accelerator.is_main_process:
                return
            files = {file.name: _digest(file) for file in sorted(partial.iterdir()) if file.is_file()}
            (partial / _STATE).write_text(json.dumps({**state, "files": files}), encoding="utf-8")
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)
    if place.exists():
        place.rename(old)
    partial.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def load_checkpoint(accelerator: Any, out: Path, label: str, kind: type[T]) -> T | None:
    """Load weights and optimisers from the folder's checkpoint and return its state, a dataclass; None if there is
    none. Raises TrainingError if it belongs to anything but `label`."""
    files = [file for name in _FOLDERS[:2] if (file := out / name / _STATE).is_file()]
    if not files:
        return None
    try:
        values = json.loads(files[0].read_text(encoding="utf-8"))
        owner, digests = values.pop("of"), TypeAdapter(dict[str, str]).validate_python(values.pop("files", {}))
        state = TypeAdapter(kind).validate_python(values)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise TrainingError(f"{files[0]} is damaged ({' '.join(str(error).split()):.150}); remove {out}") from None
    if owner != label:
        raise TrainingError(f"the checkpoint in {out} is of {owner}, not of {label}; use another folder or remove it")
    for name, digest in digests.items():  # accelerate passes over some files that it cannot read
        file = files[0].parent / Path(name).name
        if not file.is_file() or _digest(file) != digest:
            raise TrainingError(
                f"the checkpoint in {out} is damaged ({name}); remove {out}, or start over with --no-resume"
            )
    try:
        accelerator.load_state(str(files[0].parent))
    except Exception as error:  # a damaged checkpoint can fail in any way
        reason = " ".join(str(error).split())
        raise TrainingError(f"the checkpoint in {out} does not fit {label}: {reason:.200}") from None
    return state


def remove_checkpoint(out: Path) -> None:
    for name in _FOLDERS:
        shutil.rmtree(out / name, ignore_errors=True)


def check_accelerate() -> None:
    """Raise if training can't run, before anything is fetched or generated for it."""
    try:
        import accelerate  # noqa: F401
    except ImportError:
        raise TrainingError(f"training needs accelerate: {install_command('train')}") from None


def accelerator(cpu: bool, precision: str) -> Any:
    """A new `accelerate.Accelerator`; on CPUs without fast 16-bit products it computes in 32 bits."""
    check_accelerate()
    import accelerate

    accelerate.state.AcceleratorState._reset_state()  # it remembers the precision of a process's first run
    return accelerate.Accelerator(cpu=cpu, mixed_precision="no" if cpu and not halves() else precision)


def optimisers(
    model: nn.Module, rate: float, decay: float, betas: tuple[float, float], matrices: float | None = None
) -> list[torch.optim.Optimizer]:
    """AdamW. If `matrices` is given, it is the rate of Muon (torch.optim.Muon, after
    https://kellerjordan.github.io/posts/muon) for the matrices of blocks, and all other weights do not decay."""
    if matrices is None:
        return [torch.optim.AdamW(parameter_groups(model, decay), lr=rate, betas=betas, eps=1e-8, fused=True)]
    from outrider.core.engine.trainable.block import Matrix

    inner = [part.weight for part in model.modules() if isinstance(part, Matrix) and part.weight.requires_grad]
    known = {id(weight) for weight in inner}
    others = [weight for weight in model.parameters() if weight.requires_grad and id(weight) not in known]
    slow = not halves() and all(weight.device.type == "cpu" for weight in inner)
    kind = _WideMuon if slow else torch.optim.Muon
    return [
        torch.optim.AdamW(others, lr=rate, betas=betas, eps=1e-8, weight_decay=0.0, fused=True),
        kind(inner, lr=matrices, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
    ]


class _WideMuon(torch.optim.Muon):
    """Muon with products in 32 bits, for CPUs on which torch's 16-bit products are a hundred times slower."""

    def step(self, closure: Any = None) -> Any:
        usual = getattr(_muon, _ORTHOGONALISE, None)
        if usual is None:  # it is private, and another version of torch may lack it
            return super().step(closure)  # type: ignore[no-untyped-call]
        setattr(_muon, _ORTHOGONALISE, _orthogonalised)
        try:
            return super().step(closure)  # type: ignore[no-untyped-call]
        finally:
            setattr(_muon, _ORTHOGONALISE, usual)


def _orthogonalised(grad: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """The matrix with its singular values moved towards 1, by the Newton-Schulz iteration."""
    a, b, c = coefficients
    tall = grad.shape[0] > grad.shape[1]
    x: Tensor = grad.float().T if tall else grad.float()
    x = x / x.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def parameter_groups(model: nn.Module, decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices, none for norms and biases."""
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    return [
        {"params": [weight for weight in trained if weight.dim() > 1], "weight_decay": decay},
        {"params": [weight for weight in trained if weight.dim() < 2], "weight_decay": 0.0},
    ]
