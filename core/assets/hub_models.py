"""Opens published models by hub id or folder: which classes a modality supports, and which it refuses and why.

Each modality has one `Family`. Independent of how a class computes and of what its tokens mean.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch

from outrider.core.assets import store
from outrider.core.errors import InvalidOption, unknown

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
QUANTIZED = ("int8", "int4")
PROCESSORS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


P = TypeVar("P")  # the modality's type of published models


@dataclass(frozen=True)
class HubClass:
    """One supported class."""

    module: str  # in the family's package
    adapter: str = ""  # the class in the module that wraps a model of transformers and its processor
    transformers: str = ""  # the model class in transformers
    opener: str = ""  # the function in the module that opens a folder, in place of transformers' class
    quantized: bool = False  # whether `opener` takes weights of 8 and 4 bits too


@dataclass(frozen=True)
class Family(Generic[P]):
    """The supported classes of a modality."""

    package: str  # of the classes' modules
    what: str  # the family's name in messages
    classes: Mapping[str, HubClass]  # by model type
    refused: Mapping[str, str]  # model type -> the reason
    parts: Mapping[str, str] = field(default_factory=dict)  # subfolder of the model -> subfolder of its processor
    bare: bool = False  # whether a model may have no processor

    def _class(self, kind: str, name: str) -> HubClass:
        """The class of a model type; `name` is the model's name in messages."""
        if kind in self.refused:
            raise InvalidOption(f"{name} cannot be decoded: {self.refused[kind]}")
        if kind not in self.classes:
            raise unknown(f"class of {self.what}", kind, self.classes)
        return self.classes[kind]

    def _call(self, row: HubClass, function: str, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> P:
        published: P = _call(getattr(import_module(f"{self.package}.{row.module}"), function), arguments, options)
        return published

    def wrap(self, model: Any, processor: Any = None, **options: Any) -> P:
        """The published model of a transformers model object and its processor, with options of its class."""
        row = self._class(getattr(model.config, "model_type", type(model).__name__), type(model).__name__)
        return self._call(row, row.adapter, (model, processor), options)

    def open(
        self,
        source: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        revision: str | None = None,
        options: Mapping[str, Any],
    ) -> P:
        """The published model of a hub id or folder."""
        folder, processor, row = self._locate(source, dtype, revision)
        if row.opener:
            return self._call(row, row.opener, (folder, dtype, device), options)
        bare = self.bare and not any((processor / file).is_file() for file in PROCESSORS)
        model = store.transformers_model(folder, dtype, device, row.transformers)
        return self._call(row, row.adapter, (model, None if bare else store.transformers_processor(processor)), options)

    def model(self, source: str | Path, *, device: str | torch.device = "cpu", dtype: str = "float32") -> Any:
        """What an adapter takes as a draft model: the transformers model object of a hub id or folder, or what its
        class opens instead."""
        folder, _, row = self._locate(source, dtype, None)
        if row.opener:
            return self._call(row, row.opener, (folder, dtype, device), {})
        return store.transformers_model(folder, dtype, device, row.transformers)

    def _locate(self, source: str | Path, dtype: str, revision: str | None) -> tuple[Path, Path, HubClass]:
        """The folders of a model and of its processor, and its class."""
        folder = processor = folder_of(source, revision)
        for model, of_processor in self.parts.items():
            if (folder / model).is_dir():
                folder, processor = folder / model, folder / of_processor
                break
        if not (folder / "config.json").is_file():
            raise InvalidOption(
                f"'{source}' holds no config.json, which names the model's class; give a folder that a model was saved "
                "to, or a hub id"
            )
        row = self._class(str(store.read_json(folder / "config.json").get("model_type")), f"'{source}'")
        known = (*DTYPES, *QUANTIZED) if row.quantized else tuple(DTYPES)
        if dtype not in known:
            raise unknown("dtype", dtype, known)
        return folder, processor, row


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """A local folder, or the folder that a hub id was fetched to."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, Path) or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise InvalidOption(f"there is no folder '{source}', and it is not a hub id (owner/name)")
    return store.hub_folder(str(source), revision=revision)


def is_published(name: str | Path) -> bool:
    """Whether a name is a hub id or a folder rather than one of our models."""
    return isinstance(name, Path) or "/" in name or Path(name).expanduser().is_dir()


def load_by_name(
    name: str | Path,
    ours: str,
    own: Callable[..., Any],
    published: Callable[..., Any],
    what: str,
    options: Mapping[str, Any],
) -> Any:
    """Load our own model `ours` with `own`, and a hub id or folder with `published`."""
    if name == ours:
        return own(str(name), **options)
    if is_published(name):
        return published(name, **options)
    raise unknown(what, str(name), (ours, "a hub id (owner/name)", "a folder"))


def _call(adapter: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """Call an adapter with options as keyword-only arguments; raises InvalidOption for unknown ones."""
    parameters = inspect.signature(adapter).parameters.items()
    known = [name for name, parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise unknown("option of this class", name, known) if known else InvalidOption(f"unknown option '{name}'")
    return adapter(*arguments, **options)
