"""Weights of others: where they come from, fetched once, checked, kept in the user's cache; the only place that opens
weights.

Every asset lists its sources, which are tried in turn; every file has a pinned sha256, and what is kept is put in place
by one rename, so that nothing half-written stays. Only safetensors are opened (GGUF files are first converted, see
outrider.core.assets.gguf; pinned pickles of tensors once, in torch's reading of nothing but weights): no code of
others. Knows nothing of what the weights compute.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.assets.catalogue import ASSETS, Asset
from outrider.core.assets.sources import SourceError
from outrider.core.errors import OutriderError, unknown
from outrider.core.paths import cache_folder

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "ASSETS",
    "Asset",
    "AssetError",
    "Checkpoint",
    "converted",
    "fetch",
    "hub_folder",
    "read_json",
    "transformers_model",
    "unpacked",
    "unpickled",
    "written",
]

_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin"})
_MOST_TENSORS = 10_000
HUB_FILES = (
    "*.safetensors",
    "*.safetensors.index.json",
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.json",
    "processor_config.json",
    "preprocessor_config.json",
)


class AssetError(OutriderError):
    """Weights could not be fetched, or are not what they claim to be."""


def fetch(name: str, *, table: Mapping[str, Asset] = ASSETS) -> Path:
    """The folder of an asset, fetched if it is not here yet."""
    if name not in table:
        raise unknown("asset", name, table)
    asset = table[name]
    if not asset.here:
        _make(asset.folder, lambda folder: _try_sources(asset, folder), lambda: asset.here)
    return asset.folder


def _try_sources(asset: Asset, folder: Path) -> None:
    said = []
    for source in asset.sources:
        try:
            source.fetch(folder)
            return
        except (SourceError, OSError) as error:
            said.append(f"{source}: {error}")
            shutil.rmtree(folder)
            folder.mkdir()
    raise AssetError(f"{asset.name} could not be fetched. " + ". ".join(said))


def converted(file: Path, dtype: str = "float32") -> Path:
    """The folder of safetensors, config and tokenizer that a GGUF file was converted to: made once for each precision,
    then kept."""
    from outrider.core.assets import gguf

    if not file.is_file():
        raise AssetError(f"there is no file {file}")
    folder = cache_folder() / "converted" / f"{gguf.fingerprint(file)}-{dtype}"
    if not folder.is_dir():
        _make(folder, partial(gguf.convert, file, dtype=dtype), folder.is_dir)
    return folder


def unpickled(name: str, *, table: Mapping[str, Asset] = ASSETS) -> Path:
    """The safetensors file of an asset whose one file is a pickle of tensors: converted once, then kept."""
    if name not in table:
        raise unknown("asset", name, table)
    (file,) = table[name].sources[0].files
    folder = cache_folder() / "converted" / f"{name}-{file.sha256[:16]}"
    if not folder.is_dir():
        _make(folder, partial(_convert, fetch(name, table=table) / file.name), folder.is_dir)
    return folder / "model.safetensors"


def unpacked(name: str, *, table: Mapping[str, Asset] = ASSETS) -> Path:
    """The folder of a model that an asset's one file, a zip, holds: taken out once, then kept."""
    if name not in table:
        raise unknown("asset", name, table)
    (file,) = table[name].sources[0].files
    folder = cache_folder() / "converted" / f"{name}-{file.sha256[:16]}"
    if not folder.is_dir():
        _make(folder, partial(_unzip, fetch(name, table=table) / file.name), folder.is_dir)
    return folder


def _unzip(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if "/" not in name and any(fnmatch(name, one) for one in HUB_FILES):
                (folder / name).write_bytes(archive.read(name))


def _convert(file: Path, folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(_unpickle(file), str(folder / "model.safetensors"))


def _unpickle(file: Path) -> dict[str, Tensor]:
    """Every tensor of a pickle, named by where it stood in nested dictionaries; read as weights and nothing else."""
    import torch

    try:
        with torch.serialization.safe_globals([Namespace]):  # the command line that many trainings leave beside
            held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever is wrong with it
        raise AssetError(f"{file} holds more than weights, or no whole ones: {str(error).splitlines()[0]}") from None
    found: dict[str, torch.Tensor] = {}

    def walk(part: object, name: str) -> None:
        if isinstance(part, torch.Tensor):
            found[name] = part.detach().clone().contiguous()
        elif isinstance(part, Mapping):
            for key, value in part.items():
                walk(value, f"{name}.{key}" if name else str(key))

    walk(held, "")
    if not found:
        raise AssetError(f"{file} holds no tensors")
    return found


def _make(folder: Path, fill: Callable[[Path], object], done: Callable[[], bool]) -> None:
    """Fill a folder and put it in place whole; whatever stops that leaves nothing behind."""
    with _locked(folder):
        if done():  # another process was faster
            return
        partial_ = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial_, ignore_errors=True)  # of a process that was killed
        partial_.mkdir(parents=True)
        try:
            fill(partial_)
            shutil.rmtree(folder, ignore_errors=True)
            partial_.replace(folder)
        finally:
            shutil.rmtree(partial_, ignore_errors=True)


def written(path: Path, text: str) -> None:
    """Write a small file of the cache, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f"{path.name}.{os.getpid()}.partial")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    from filelock import FileLock

    lock = FileLock(cache_folder() / ".locks" / f"{folder.name}.lock")
    try:
        Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise AssetError(
            f"the cache {cache_folder()} can't be written ({error.strerror or error}); "
            "set OUTRIDER_CACHE to a folder that can"
        ) from None
    try:
        yield
    finally:
        lock.release()


def hub_folder(repo: str, *, revision: str | None = None) -> Path:
    """The files of a model on the hub, in the hub's own cache; offline, what that holds already."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from outrider.core.assets.sources import reachable

    offline = constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(HUB_FILES),
                ignore_patterns=["original/*", "consolidated*"],
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError:
        why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} can't be reached"
        raise AssetError(
            f"'{repo}' is not in the hub's cache and {why}; give a local folder or a GGUF file, or one of "
            f"{', '.join(ASSETS)}"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise AssetError(f"'{repo}' can't be had from the hub: {str(error).splitlines()[0]}") from None


def read_json(path: Path) -> dict[str, Any]:
    """A config of others: a dictionary, and none that names code to run."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AssetError(f"{path} is not JSON: {str(error)[:100]}") from None
    if not isinstance(found, dict):
        raise AssetError(f"{path} holds a {type(found).__name__} where a dictionary is expected")
    if found.get("auto_map"):
        raise AssetError(f"{path} names code of its own to run (auto_map), which is not done here")
    return found


class Checkpoint(Mapping[str, "Tensor"]):
    """The tensors of a folder's safetensors files, or of one file, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._open = []
        self._where = {}
        for file in _files(folder):
            try:
                held = safe_open(file, framework="pt", device="cpu")
                names: list[str] = held.keys()  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as error:
                raise AssetError(f"{file} is not a whole safetensors file: {error}") from None
            self._open.append(held)
            self._where.update(dict.fromkeys(names, held))
            if len(self._where) > _MOST_TENSORS:
                raise AssetError(f"{file} names more than {_MOST_TENSORS:,} tensors")

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._where[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)


def foreign_tensors(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a folder of others: of its safetensors, else of its pickles (.bin, .pt), read in torch's reading
    of nothing but weights, as drafters were published before safetensors were common."""
    if any(folder.glob("*.safetensors")):
        return Checkpoint(folder)
    files = [one for one in sorted([*folder.glob("*.bin"), *folder.glob("*.pt")]) if one.name not in _NO_WEIGHTS]
    if not files:
        return Checkpoint(folder)  # says what is missing
    found: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _unpickle(file).items():
            if name in found:
                raise AssetError(f"{folder} holds the tensor '{name}' twice, once in {file.name}")
            found[name] = tensor
    if len(found) > _MOST_TENSORS:
        raise AssetError(f"{folder} names more than {_MOST_TENSORS:,} tensors")
    return found


def tensors_of(file: Path) -> Mapping[str, Tensor]:
    """The tensors of one file of others: safetensors, or a pickle read as weights and nothing else."""
    if not file.is_file():
        raise AssetError(f"there is no file {file}")
    return Checkpoint(file) if file.suffix == ".safetensors" else _unpickle(file)


def transformers_model(folder: Path, dtype: str, device: Any = "cpu", kind: str = "AutoModelForCausalLM") -> Any:
    """A model of a class of transformers, every one of its tensors found: any causal LM that it knows, or the class
    that is named."""
    import torch
    import transformers
    from transformers.utils import logging

    read_json(folder / "config.json")  # names no code of its own
    _files(folder)  # are safetensors
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, found = getattr(transformers, kind).from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # whatever is wrong with it
        raise AssetError(f"transformers can't load {folder}: {' '.join(str(error).split())[:300]}") from None
    finally:
        logging.set_verbosity(level)
    if missing := sorted(found["missing_keys"]):
        raise AssetError(
            f"the checkpoint in {folder} has no tensor '{missing[0]}'"
            + (f" nor {len(missing) - 1} others" if len(missing) > 1 else "")
            + "; a file may be missing"
        )
    return model.to(device)


def transformers_processor(folder: Path) -> Any:
    """What makes a model's inputs of words, pictures and sound."""
    from transformers import AutoProcessor

    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)  # names no code of its own
    try:
        return AutoProcessor.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except Exception as error:
        raise AssetError(
            f"transformers can't load the processor of {folder}: {' '.join(str(error).split())[:300]}"
        ) from None


def _files(folder: Path) -> list[Path]:
    if folder.is_file() and folder.suffix == ".safetensors":
        return [folder]
    if (index := folder / "model.safetensors.index.json").is_file():
        described = read_json(index).get("weight_map")
        if not isinstance(described, dict) or not all(isinstance(name, str) for name in described.values()):
            raise AssetError(f"{index} has no weight_map from tensors to files; download the model again")
        names = sorted(set(described.values()))
        wrong = [name for name in names if Path(name).name != name]
        missing = [name for name in names if name not in wrong and not (folder / name).is_file()]
        if wrong or missing or not names:
            raise AssetError(f"{index} names files that are not beside it: {', '.join(map(str, wrong + missing))}")
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if found := sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        return found
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise AssetError(f"{folder} holds pickled weights only, which can run code; save the model as safetensors")
    raise AssetError(f"{folder} holds no safetensors file")
