"""Trained weights as files: safetensors, and beside them what they are and where they come from, as JSON.

Numbers have 16 bits, or those of large matrices 8 and a scale for each row. Rows that a draft head only refers to in
its target are not in the file. Knows nothing of which draft heads there are: whoever loads gives their classes by name.
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
_SCALE, _LARGE = ".scale", 4096  # what stands behind a matrix's name; numbers from which 8 bits are worth it
_MOST = 1 << 20  # of any number in a configuration: a larger one is no size of ours


class DraftHeadError(OutriderError):
    """A file of trained weights that can't be used."""


def save(
    draft_head: DraftHead, path: Path, provenance: Mapping[str, Any], bits: int = 8, *, finer: tuple[str, ...] = ()
) -> None:
    """Write weights and their JSON, each whole or not at all. `bits`: of large matrices; those of parts that are
    `finer` keep 16."""
    from safetensors.torch import save_file

    tensors: dict[str, Tensor] = {}
    for name, tensor in draft_head.state_dict().items():
        kept = tensor.detach().cpu()
        large = kept.is_floating_point() and kept.ndim > 1 and kept.numel() >= _LARGE
        if bits == 8 and large and not name.startswith(finer):
            tensors[name], tensors[name + _SCALE] = _rounded(kept.float())
        else:
            tensors[name] = (kept.bfloat16() if kept.is_floating_point() else kept).contiguous()
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    save_file(tensors, str(partial))
    partial.chmod(0o644)  # safetensors makes files that nobody else may read
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
    """Whole numbers, and what those of each row stand for."""
    scale = matrix.flatten(1).abs().amax(1).clamp(min=1e-12).view(-1, *[1] * (matrix.ndim - 1)) / 127
    return (matrix / scale).round().to(torch.int8), scale


def _fits(tensors: Mapping[str, Tensor], name: str, meant: Tensor) -> bool:
    if name not in tensors or tensors[name].shape != meant.shape:
        return False
    if name + _SCALE in tensors:
        return tensors[name + _SCALE].shape == (len(meant), *[1] * (meant.ndim - 1))
    return tensors[name].is_floating_point() == meant.is_floating_point()


def _numbers(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    found = tensors[name]
    return found * tensors[name + _SCALE] if name + _SCALE in tensors else found


def about(path: Path) -> dict[str, Any]:
    """What the JSON beside a file of weights says."""
    found = read_json(path.with_suffix(".json"))
    if found.get("schema") != SCHEMA or not isinstance(found.get("config"), dict):
        raise DraftHeadError(f"{path.with_suffix('.json')} is of another schema than {SCHEMA}; train it again")
    return found


def _made(path: Path, kind: Callable[..., DraftHead], target: Any, config: Mapping[str, Any]) -> DraftHead:
    for name, value in config.items():
        if isinstance(value, int) and value > _MOST:
            raise DraftHeadError(
                f"{path.with_suffix('.json')} has a {name} of {value:,}; it is damaged: train it again"
            )
    try:
        return kind(target, **config)
    except OutriderError:
        raise
    except Exception as error:  # of whatever is wrong with it
        why = " ".join(str(error).split())[:200]
        raise DraftHeadError(f"{path.with_suffix('.json')} describes no {kind.__name__}: {why}") from None


def begin(draft_head: DraftHead, path: Path, say: Callable[[str], None]) -> None:
    """Fill what is about to learn with what a file holds of it; the rest begins as it was made."""
    facts = about(path)
    if facts.get("architecture") != type(draft_head).__name__:
        raise Incompatible(
            f"{path.name} holds a {facts.get('architecture')}; what is to learn is a {type(draft_head).__name__}"
        )
    tensors, own = Checkpoint(path), draft_head.state_dict()
    names = draft_head.shared(facts["config"])
    fitting = [(own[name], theirs) for name, theirs in names.items() if _fits(tensors, theirs, own[name])]
    _fill(fitting, tensors)
    say(f"{len(fitting)} of {len(own)} tensors begin as {path} has them")


def vocabulary(path: Path) -> Tensor | None:
    """The tokens that the draft head of a file can guess; None: all of them."""
    tensors = Checkpoint(path)
    return next((tensors[name] for name in tensors if name.endswith("words.vocabulary")), None)


def load(path: Path, kinds: Mapping[str, Callable[..., DraftHead]], target: Any) -> DraftHead:
    """A draft head of its file: made of its configuration and its target's weights, then filled."""
    facts = about(path)
    kind = str(facts.get("architecture"))
    if kind not in kinds:
        raise unknown("kind of trained weights", kind, kinds)
    draft_head = _made(path, kinds[kind], target, facts["config"])
    tensors = Checkpoint(path)
    own = draft_head.state_dict()
    wrong = [name for name, meant in own.items() if not _fits(tensors, name, meant)]
    left = [name for name in tensors if name.removesuffix(_SCALE) not in own]
    if wrong or left:
        raise Incompatible(
            f"{path.name} does not fit this target: {len(wrong)} tensors are missing or have another shape and "
            f"{len(left)} have no place, '{(wrong + left)[0]}' first"
        )
    _fill([(tensor, name) for name, tensor in own.items()], tensors)
    return draft_head.eval()


@torch.no_grad()
def _fill(own: Sequence[tuple[Tensor, str]], tensors: Mapping[str, Tensor]) -> None:
    for tensor, name in own:
        tensor.copy_(_numbers(tensors, name))
