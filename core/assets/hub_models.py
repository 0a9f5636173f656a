"""Published models of others by name: which classes a modality runs, which it refuses and why, and how one is opened.

A modality has one `Family`; each of its classes has a module there whose `of` makes of a model and its processor what
the modality decodes. Knows nothing of how a class computes or what its tokens mean.
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
_PROCESSORS = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


P = TypeVar("P")  # what a modality decodes


@dataclass(frozen=True)
class Family(Generic[P]):
    """The classes of a modality."""

    package: str  # where their modules are
    what: str  # what they are called, in messages
    classes: Mapping[str, tuple[str, str]]  # model type -> module, and name of the class in transformers; "": our own
    refused: Mapping[str, str]  # model type -> why not
    parts: Mapping[str, str] = field(default_factory=dict)  # a pipeline's folders: of its model of tokens -> of that
    #                                                         model's processor
    bare: bool = False  # may a model go without a processor?

    def module(self, kind: str, name: str) -> Any:
        """What reads models of this type; `name` is the one that is asked for."""
        if kind in self.refused:
            raise InvalidOption(f"{name} can't be decoded here: {self.refused[kind]}")
        if kind not in self.classes:
            raise unknown(f"class of {self.what}", kind, self.classes)
        return import_module(f"{self.package}.{self.classes[kind][0]}")

    def of(self, model: Any, processor: Any = None, **options: Any) -> P:
        """What is decoded, of a model object of transformers with its processor and options of its class."""
        kind = getattr(model.config, "model_type", type(model).__name__)
        found: P = made(self.module(kind, type(model).__name__).of, (model, processor), options)
        return found

    def open(
        self,
        source: str | Path,
        *,
        device: str | torch.device = "cpu",
        dtype: str = "float32",
        revision: str | None = None,
        options: Mapping[str, Any],
    ) -> P:
        """The same by its hub id or folder."""
        folder, processor, kind = self.found(source, dtype, revision)
        module, name = self.module(kind, f"'{source}'"), self.classes[kind][1]
        found: P
        if not name:
            found = made(module.opened, (folder, dtype, device), options)
            return found
        model = store.transformers_model(folder, dtype, device, name)
        none = self.bare and not any((processor / one).is_file() for one in _PROCESSORS)
        found = made(module.of, (model, None if none else store.transformers_processor(processor)), options)
        return found

    def model(self, source: str | Path, *, device: str | torch.device = "cpu", dtype: str = "float32") -> Any:
        """A model object alone, such as one that drafts for another."""
        folder, _, kind = self.found(source, dtype, None)
        self.module(kind, f"'{source}'")
        return store.transformers_model(folder, dtype, device, self.classes[kind][1])

    def found(self, source: str | Path, dtype: str, revision: str | None) -> tuple[Path, Path, str]:
        """Its folder, its processor's, and its type."""
        if dtype not in DTYPES:
            raise unknown("dtype", dtype, DTYPES)
        folder = processor = folder_of(source, revision)
        for model, reader in self.parts.items():
            if (folder / model).is_dir():
                folder, processor = folder / model, folder / reader
                break
        if not (folder / "config.json").is_file():
            raise InvalidOption(
                f"'{source}' holds no config.json, which says what kind of model it is; name a folder that a model "
                "was saved to, or an id on the hub"
            )
        return folder, processor, str(store.read_json(folder / "config.json").get("model_type"))


def folder_of(source: str | Path, revision: str | None = None) -> Path:
    """A folder as it is named; else an id on the hub, fetched."""
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if isinstance(source, Path) or str(source).count("/") != 1 or str(source).startswith((".", "/", "~")):
        raise InvalidOption(f"there is no folder '{source}', and it is no id on the hub, which is owner/name")
    return store.hub_folder(str(source), revision=revision)


def named(name: str | Path) -> bool:
    """Does it name a model of others, rather than one of ours?"""
    return isinstance(name, Path) or "/" in name or Path(name).expanduser().is_dir()


def chosen(
    name: str | Path,
    ours: str,
    own: Callable[..., Any],
    published: Callable[..., Any],
    what: str,
    options: Mapping[str, Any],
) -> Any:
    """The model of a modality that a name stands for: our own, or a published one."""
    if name == ours:
        return own(str(name), **options)
    if named(name):
        return published(name, **options)
    raise unknown(what, str(name), (ours, "an id on the hub (owner/name)", "a folder"))


def made(make: Any, given: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    """What a class makes of what it is given; options that it doesn't know are said."""
    known = [name for name, one in inspect.signature(make).parameters.items() if one.kind is one.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            raise (
                unknown("option of this class", name, known) if known else InvalidOption(f"there is no option '{name}'")
            )
    return make(*given, **options)
