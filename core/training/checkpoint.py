"""Files of trained weights: safetensors, with a JSON file of their configuration and provenance beside it.

Weights have 16 bits, or in large matrices 8 bits with a scale per row. Rows that a draft head shares with its target
are not in the file. Callers of `load` pass the classes of draft heads by name.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, get_type_hints, runtime_checkable

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from outrider.core.assets.files import read_json, write_atomically, write_tensors
from outrider.core.assets.store import Checkpoint
from outrider.core.errors import Incompatible, OutriderError, unknown
from outrider.core.trace import machine, versions
from outrider.core.training.draft_head import DraftHead

SCHEMA = 1
_SCALE, _LARGE = ".scale", 4096  # suffix of a scale's name; elements from which a matrix is stored in 8 bits
_MOST = 256  # of what a configuration counts and its file holds no tensor of, such as tokens drafted in one pass
_SIZES = ("heads", "kv_heads", "head_dim", "intermediate_size")  # in the form of a layer
_FEW_WEIGHTS = 1 << 25  # are made whatever the file holds


class DraftHeadError(OutriderError):
    """A file of trained weights cannot be used."""


def save(
    draft_head: DraftHead, path: Path, provenance: Mapping[str, Any], bits: int = 8, *, finer: tuple[str, ...] = ()
) -> None:
    """Write weights and their JSON, each atomically. Large matrices are stored in `bits` bits, except in 16 those whose
    names start with one of `finer`."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in draft_head.state_dict().items():
        weights = tensor.detach().cpu()
        large = weights.is_floating_point() and weights.ndim > 1 and weights.numel() >= _LARGE
        if bits == 8 and large and not name.startswith(finer):
            tensors[name], tensors[name + _SCALE] = _rounded(weights.float())
        else:
            exact = weights.int() if weights.dtype == torch.long and weights.numel() else weights  # ids of tokens
            tensors[name] = (weights.bfloat16() if weights.is_floating_point() else exact).contiguous()
    write_tensors(path, tensors)
    about = {
        "schema": SCHEMA,
        "architecture": type(draft_head).__name__,
        "config": dict(draft_head.config),
        "provenance": {**provenance, "machine": machine(), "versions": versions()},
        "bytes": path.stat().st_size,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
    }
    write_atomically(path.with_suffix(".json"), json.dumps(about, indent=1) + "\n")


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


@runtime_checkable
class _Weighed(Protocol):
    """A target whose size is known."""

    vocabulary: int
    weight_bytes: int


@runtime_checkable
class _Deep(Protocol):
    """A draft head that says how many tokens it drafts in one pass."""

    depth: int


def _made(
    path: Path, kind: Callable[..., DraftHead], target: Any, config: Mapping[str, Any], tensors: Checkpoint
) -> DraftHead:
    """A draft head of a configuration whose values have the types of its arguments, and no more weights than its file
    can fill."""
    where = path.with_suffix(".json")
    largest = max((size for shape in tensors.shapes if math.prod(shape) for size in shape), default=0)
    vocabulary, weight_bytes = (target.vocabulary, target.weight_bytes) if isinstance(target, _Weighed) else (0, 0)
    known = max(largest, vocabulary, _MOST)
    form = config.get("form")
    sizes = {name: form.get(name) for name in _SIZES} if isinstance(form, Mapping) else {}
    for name, value in [*config.items(), *sizes.items()]:
        if isinstance(value, int) and value > known:
            raise DraftHeadError(f"{where} has a {name} of {value:,}; it is damaged: train the weights again")
    weights = max(4 * tensors.numel, weight_bytes // 2, _FEW_WEIGHTS)
    try:
        _arguments(kind)(**config)
        with _at_most(weights):
            draft_head = kind(target, **config)
    except OutriderError:
        raise
    except ValidationError as error:
        first = error.errors()[0]
        raise DraftHeadError(
            f"{where} is not the configuration of a {kind.__name__}: {'.'.join(map(str, first['loc']))}: "
            f"{first['msg']:.150}"
        ) from None
    except Exception as error:  # a wrong configuration can fail in any way
        reason = " ".join(str(error).split())[:200]
        raise DraftHeadError(f"{where} is not the configuration of a {kind.__name__}: {reason}") from None
    if isinstance(draft_head, _Deep) and isinstance(draft_head.depth, int) and draft_head.depth > _MOST:
        raise DraftHeadError(f"{where} drafts {draft_head.depth:,} tokens in one pass; at most {_MOST} are drafted")
    return draft_head


@functools.cache
def _arguments(kind: Callable[..., DraftHead]) -> type[BaseModel]:
    """A strict model of a class's keyword arguments, those of its base classes included."""
    found: dict[str, Any] = {}
    for each in inspect.getmro(kind) if isinstance(kind, type) else (kind,):
        made = each.__dict__.get("__init__") if isinstance(each, type) else each
        if made is None:
            continue
        hints, parameters = get_type_hints(made), inspect.signature(made).parameters.values()
        for one in parameters:
            if one.kind is one.KEYWORD_ONLY and one.name not in found:
                default = ... if one.default is one.empty else one.default
                found[one.name] = (hints[one.name], Field(default, alias=one.name))
        if not any(one.kind is one.VAR_KEYWORD for one in parameters):
            break
    rules = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, arbitrary_types_allowed=True)
    names = {f"argument_{name}": given for name, given in found.items()}  # a name may be one of the model's own
    model: type[BaseModel] = create_model("Arguments", __config__=rules, **names)
    return model


@contextmanager
def _at_most(weights: int) -> Iterator[None]:
    """Raise DraftHeadError as soon as the modules made within have more weights."""
    count, thread = 0, threading.get_ident()

    def counted(module: nn.Module, name: str, parameter: Tensor | None) -> None:
        nonlocal count
        if parameter is not None and threading.get_ident() == thread:
            count += parameter.numel()
            if count > weights:
                raise DraftHeadError("its configuration describes many times the weights that its file holds")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


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
    return next((tensors[name].long() for name in tensors if name.endswith("words.vocabulary")), None)


def load(path: Path, kinds: Mapping[str, Callable[..., DraftHead]], target: Any) -> DraftHead:
    """Load a draft head: make it from its configuration and its target, then fill in the file's weights."""
    facts = about(path)
    kind = str(facts.get("architecture"))
    if kind not in kinds:
        raise unknown("kind of trained weights", kind, kinds)
    tensors = Checkpoint(path)
    draft_head = _made(path, kinds[kind], target, facts["config"], tensors)
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
