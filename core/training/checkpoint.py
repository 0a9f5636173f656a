"""Files of trained weights: safetensors, with a JSON file of their configuration and provenance beside it.

Weights have 16 bits, or in large matrices 8 bits with a scale per row. Rows that a draft head shares with its target
are not in the file. Callers of `load` pass the classes of draft heads by name.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.core.assets.store import Checkpoint, read_json
from outrider.core.errors import Incompatible, OutriderError, unknown
from outrider.core.trace import machine, versions
from outrider.core.training.draft_head import DraftHead

SCHEMA = 1
_SCALE, _LARGE = ".scale", 4096  # suffix of a scale's name; elements from which a matrix is stored in 8 bits
_MAX_NUMBER = 1 << 20  # in a configuration; a larger one means that the file is damaged


class DraftHeadError(OutriderError):
    """A file of trained weights cannot be used."""


def save(
    draft_head: DraftHead, path: Path, provenance: Mapping[str, Any], bits: int = 8, *, finer: tuple[str, ...] = ()
) -> None:
    """Write weights and their JSON, each atomically. Large matrices are stored in `bits` bits, except in 16 those whose
    names start with one of `finer`."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, tensor in draft_head.state_dict().items():
        weights = tensor.detach().cpu()
        large = weights.is_floating_point() and weights.ndim > 1 and weights.numel() >= _LARGE
        if bits == 8 and large and not name.startswith(finer):
            tensors[name], tensors[name + _SCALE] = _rounded(weights.float())
        else:
            tensors[name] = (weights.bfloat16() if weights.is_floating_point() else weights).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, str(partial))
    partial.chmod(0o644)  # safetensors creates files readable only by their owner
    digest = hashlib.sha256(partial.read_bytes()).hexdigest()
    about = {
        "schema": SCHEMA,
        "architecture": type(draft_head).__name__,
        "config": dict(draft_head.config),
        "provenance": {**provenance, "machine": machine(), "versions": versions()},
        "bytes": partial.stat().st_size,
        "sha256": digest,
    }
    partial.replace(path)
    written = path.with_suffix(".json.partial")
    written.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    written.replace(path.with_suffix(".json"))


def _rounded(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit integers, and the scale of each row."""
    scale = matrix.flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, *[1] * (matrix.ndim - 1)) / 127
    return (matrix / scale).round().to(torch.int8), scale


def _fits(tensors: Mapping[str, Tensor], name: str, expected: Tensor) -> bool:
    if name not in tensors or tensors[name].shape != expected.shape:
        return False
    if name + _SCALE in tensors:
        return tensors[name + _SCALE].shape == (len(expected), *[1] * (expected.ndim - 1))
    return tensors[name].is_floating_point() == expected.is_floating_point()


def _numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    tensor = tensors[name]
    return tensor * tensors[name + _SCALE] if name + _SCALE in tensors else tensor


def about(path: Path) -> dict[str, Any]:
    """The JSON beside a file of weights."""
    data = read_json(path.with_suffix(".json"))
    if data.get("schema") != SCHEMA or not isinstance(data.get("config"), dict):
        raise DraftHeadError(f"{path.with_suffix('.json')} does not have schema {SCHEMA}; train the weights again")
    return data


def _made(path: Path, kind: Callable[..., DraftHead], target: Any, config: Mapping[str, Any]) -> DraftHead:
    for name, value in config.items():
        if isinstance(value, int) and value > _MAX_NUMBER:
            raise DraftHeadError(
                f"{path.with_suffix('.json')} has a {name} of {value:,}; it is damaged: train the weights again"
            )
    try:
        return kind(target, **config)
    except OutriderError:
        raise
    except Exception as error:  # a wrong configuration can fail in any way
        reason = " ".join(str(error).split())[:200]
        raise DraftHeadError(
            f"{path.with_suffix('.json')} is not the configuration of a {kind.__name__}: {reason}"
        ) from None


def begin(draft_head: DraftHead, path: Path, say: Callable[[str], None]) -> None:
    """Start a draft head from a file's weights; tensors that do not fit keep their initial values."""
    facts = about(path)
    if facts.get("architecture") != type(draft_head).__name__:
        raise Incompatible(
            f"{path.name} contains a {facts.get('architecture')}; the head to train is a {type(draft_head).__name__}"
        )
    tensors, own = Checkpoint(path), draft_head.state_dict()
    names = draft_head.shared(facts["config"])
    fitting = [(own[name], theirs) for name, theirs in names.items() if _fits(tensors, theirs, own[name])]
    _fill(fitting, tensors)
    say(f"{len(fitting)} of {len(own)} tensors start from {path}")


def vocabulary(path: Path) -> Tensor | None:
    """The reduced vocabulary of a file's draft head; None: the whole vocabulary."""
    tensors = Checkpoint(path)
    return next((tensors[name] for name in tensors if name.endswith("words.vocabulary")), None)


def load(path: Path, kinds: Mapping[str, Callable[..., DraftHead]], target: Any) -> DraftHead:
    """Load a draft head: make it from its configuration and its target, then fill in the file's weights."""
    facts = about(path)
    kind = str(facts.get("architecture"))
    if kind not in kinds:
        raise unknown("kind of trained weights", kind, kinds)
    draft_head = _made(path, kinds[kind], target, facts["config"])
    tensors = Checkpoint(path)
    own = draft_head.state_dict()
    mismatched = [name for name, expected in own.items() if not _fits(tensors, name, expected)]
    unused = [name for name in tensors if name.removesuffix(_SCALE) not in own]
    if mismatched or unused:
        raise Incompatible(
            f"{path.name} does not fit this target: {len(mismatched)} tensors are missing or have another shape and "
            f"{len(unused)} are not used; the first is '{(mismatched + unused)[0]}'"
        )
    _fill([(tensor, name) for name, tensor in own.items()], tensors)
    return draft_head.eval()


@torch.no_grad()
def _fill(own: Sequence[tuple[Tensor, str]], tensors: Mapping[str, Tensor]) -> None:
    for tensor, name in own:
        tensor.copy_(_numbers(tensors, name))
