"""Fetches third-party assets into the user's cache and opens weights; no other module opens weights.

An asset's sources are tried in turn, every file is checked against its pinned sha256, and a folder is put in place by
one rename, so incomplete ones never remain. No third-party code is run: safetensors are opened, GGUF files are
converted first (outrider.core.assets.gguf), and pickles are read with torch's weights-only loader. Independent of what
the weights compute.

Over 400 lines, since only this module opens weights.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.assets.catalogue import ASSETS, Asset
from outrider.core.assets.files import AssetError, read_json, write_atomically, write_tensors, writing
from outrider.core.assets.sources import SourceError
from outrider.core.errors import unknown
from outrider.core.paths import cache_folder

if TYPE_CHECKING:
    from torch import Tensor
    from tqdm import tqdm

__all__ = [
    "ASSETS",
    "Asset",
    "AssetError",
    "Checkpoint",
    "convert_gguf",
    "convert_pickle",
    "extract_zip",
    "fetch",
    "hub_folder",
    "read_json",
    "transformers_model",
    "write_atomically",
    "write_tensors",
]

_NO_WEIGHTS = frozenset({"training_args.bin", "optimizer.pt", "scheduler.pt", "optimizer.bin"})
_MAX_TENSORS = 10_000
_SIZES = ".sizes.json"  # of the files of a converted folder
_LEAST_BYTES = 0.5  # of a parameter: weights of 4 bits
_FREE_BYTES = 16 << 20  # by which a model may exceed its file
_PATIENCE = 1.0  # seconds of loading without a progress bar
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


def fetch(name: str, *, table: Mapping[str, Asset] = ASSETS) -> Path:
    """The folder of an asset, which is downloaded if necessary."""
    if name not in table:
        raise unknown("asset", name, table)
    asset = table[name]
    if not asset.here:
        _make(asset.folder, lambda folder: _try_sources(asset, folder), lambda: asset.here)
    return asset.folder


def _try_sources(asset: Asset, folder: Path) -> None:
    errors = []
    for source in asset.sources:
        try:
            with writing(folder):
                source.fetch(folder)
            return
        except (SourceError, OSError) as error:
            errors.append(f"{source}: {error}")
            shutil.rmtree(folder)
            folder.mkdir()
    raise AssetError(f"{asset.name} could not be fetched. " + ". ".join(errors))


def convert_gguf(file: Path, dtype: str | None = "float32") -> Path:
    """The folder of safetensors, config and tokenizer converted from a GGUF file, cached for each precision; without
    the safetensors for None."""
    from outrider.core.assets import gguf

    if not file.is_file():
        raise AssetError(f"there is no file {file}")
    folder = cache_folder() / "converted" / f"{gguf.fingerprint(file)}-{dtype or 'tokenizer'}"
    return _converted(folder, partial(gguf.convert, file, dtype=dtype))


def convert_pickle(name: str, *, table: Mapping[str, Asset] = ASSETS) -> Path:
    """The safetensors file converted from an asset whose only file is a pickle of tensors; cached."""
    if name not in table:
        raise unknown("asset", name, table)
    (file,) = table[name].sources[0].files
    folder = cache_folder() / "converted" / f"{name}-{file.sha256[:16]}"
    return _converted(folder, lambda made: _convert(fetch(name, table=table) / file.name, made)) / "model.safetensors"


def extract_zip(name: str, *, table: Mapping[str, Asset] = ASSETS) -> Path:
    """The folder of a model extracted from an asset whose only file is a zip archive; cached."""
    if name not in table:
        raise unknown("asset", name, table)
    (file,) = table[name].sources[0].files
    folder = cache_folder() / "converted" / f"{name}-{file.sha256[:16]}"
    return _converted(folder, lambda made: _unzip(fetch(name, table=table) / file.name, made))


def _converted(folder: Path, convert: Callable[[Path], object]) -> Path:
    """A folder of converted files, which are converted again if one of them no longer has its size."""

    def fill(made: Path) -> None:
        convert(made)
        (made / _SIZES).write_text(json.dumps({path.name: path.stat().st_size for path in made.iterdir()}))

    def whole() -> bool:
        try:
            sizes = json.loads((folder / _SIZES).read_text())
            return bool(sizes) and all((folder / name).stat().st_size == size for name, size in sizes.items())
        except (OSError, ValueError, AttributeError):
            return False

    if not whole():
        _make(folder, fill, whole)
    return folder


def _unzip(file: Path, folder: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        for name in archive.namelist():
            if "/" not in name and any(fnmatch(name, pattern) for pattern in HUB_FILES):
                (folder / name).write_bytes(archive.read(name))


def _convert(file: Path, folder: Path) -> None:
    write_tensors(folder / "model.safetensors", _unpickle(file))


def _unpickle(file: Path) -> dict[str, Tensor]:
    """All tensors of a pickle by their dotted path in nested dictionaries, read with the weights-only loader."""
    import torch

    try:
        with torch.serialization.safe_globals([Namespace]):  # many checkpoints hold their command-line arguments
            contents = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # malformed pickles raise many kinds of errors
        raise AssetError(f"{file} is malformed or holds more than weights: {str(error).splitlines()[0]}") from None
    tensors: dict[str, torch.Tensor] = {}

    def walk(part: object, name: str) -> None:
        if isinstance(part, torch.Tensor):
            tensors[name] = part.detach().clone().contiguous()
        elif isinstance(part, Mapping):
            for key, value in part.items():
                walk(value, f"{name}.{key}" if name else str(key))

    walk(contents, "")
    if not tensors:
        raise AssetError(f"{file} holds no tensors")
    return tensors


def _make(folder: Path, fill: Callable[[Path], object], done: Callable[[], bool]) -> None:
    """Fill a temporary folder and rename it to `folder`, unless `done()`; a failure leaves nothing behind."""
    with _locked(folder):
        if done():  # another process was faster
            return
        partial_ = folder.with_name(folder.name + ".partial")
        shutil.rmtree(partial_, ignore_errors=True)  # left by a process that was killed
        with writing(partial_):
            partial_.mkdir(parents=True)
        try:
            with writing(folder):
                fill(partial_)
            shutil.rmtree(folder, ignore_errors=True)
            partial_.replace(folder)
        finally:
            shutil.rmtree(partial_, ignore_errors=True)


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
            "set OUTRIDER_CACHE to a writable folder"
        ) from None
    try:
        yield
    finally:
        lock.release()


def is_hub_id(name: str) -> bool:
    """Whether a name has the form of a model's id on the hub, owner/name."""
    parts = name.split("/")
    return len(parts) == 2 and all(parts) and not name.startswith((".", "~"))


def hub_head(repo: str) -> Path:
    """The folder of a draft head on the hub; its pickles (.bin, .pt) are fetched only if it has no safetensors."""
    folder = hub_folder(repo)
    if not any(folder.glob("*.safetensors")):
        folder = hub_folder(repo, patterns=("config.json", "*.bin", "*.pt", "*.bin.index.json"))
    return folder


def head_folder(source: str | Path) -> Path:
    """The file or folder of a draft head; one that is named by its hub id is fetched."""
    path = Path(source).expanduser()
    named = not path.exists() and isinstance(source, str) and path.suffix != ".safetensors" and is_hub_id(source)
    return hub_head(str(source)) if named else path


def hub_folder(repo: str, *, revision: str | None = None, patterns: Sequence[str] = HUB_FILES) -> Path:
    """The folder of a hub model in the hub's own cache; downloaded unless offline."""
    from huggingface_hub import constants, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    from outrider.core.assets.sources import reachable

    offline = constants.HF_HUB_OFFLINE or not reachable(constants.ENDPOINT)
    try:
        return Path(
            snapshot_download(
                repo,
                revision=revision,
                allow_patterns=list(patterns),
                ignore_patterns=["original/*", "consolidated*"],
                local_files_only=offline,
            )
        )
    except LocalEntryNotFoundError:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} can't be reached"
        raise AssetError(
            f"'{repo}' is not in the hub's cache and {reason}; give a local folder or a GGUF file, or one of "
            f"{', '.join(ASSETS)}"
        ) from None
    except (HfHubHTTPError, HFValidationError) as error:
        raise AssetError(f"'{repo}' could not be downloaded from the hub: {str(error).splitlines()[0]}") from None


class Checkpoint(Mapping[str, "Tensor"]):
    """The tensors of a folder's safetensors files, or of one file; each is read on access."""

    def __init__(self, folder: Path) -> None:
        from safetensors import SafetensorError, safe_open

        self._bar: tqdm[None] | None = None
        self._file_of = {}  # tensor name -> open file
        for path in _files(folder):
            try:
                file = safe_open(path, framework="pt", device="cpu")
                names: list[str] = file.keys()  # type: ignore[no-untyped-call]
            except (SafetensorError, OSError) as error:
                raise AssetError(
                    f"{path} is not a whole safetensors file ({error}); download or convert it again"
                ) from None
            self._file_of.update(dict.fromkeys(names, file))
            if len(self._file_of) > _MAX_TENSORS:
                raise AssetError(f"{path} names more than {_MAX_TENSORS:,} tensors")

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._file_of[name].get_tensor(name)  # type: ignore[no-untyped-call]
        if self._bar is not None:
            self._bar.update(tensor.numel())
        return tensor

    @property
    def shapes(self) -> list[Sequence[int]]:
        """The shapes of the tensors, read from the files' headers."""
        return [file.get_slice(name).get_shape() for name, file in self._file_of.items()]  # type: ignore[no-untyped-call]

    @property
    def numel(self) -> int:
        """The number of weights."""
        return sum(map(prod, self.shapes))

    @contextmanager
    def progress(self, name: str) -> Iterator[None]:
        """Show a progress bar on stderr while tensors are read, if that takes long and stderr is a terminal."""
        from tqdm import tqdm

        with tqdm(
            total=self.numel,
            unit=" weights",
            unit_scale=True,
            desc=f"Loading {name}",
            disable=None,
            delay=_PATIENCE,
            leave=False,
        ) as self._bar:
            try:
                yield
            finally:
                self._bar = None

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def foreign_tensors(folder: Path) -> Mapping[str, Tensor]:
    """The tensors of a third-party folder: of its safetensors, else of its pickles (.bin, .pt), since older drafters
    were published as such."""
    if any(folder.glob("*.safetensors")):
        return Checkpoint(folder)
    pickles = sorted([*folder.glob("*.bin"), *folder.glob("*.pt")])
    files = [path for path in pickles if path.name not in _NO_WEIGHTS]
    if not files:
        return Checkpoint(folder)  # raises with what is missing
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in _unpickle(file).items():
            if name in tensors:
                raise AssetError(f"{folder} holds the tensor '{name}' twice, once in {file.name}")
            tensors[name] = tensor
    if len(tensors) > _MAX_TENSORS:
        raise AssetError(f"{folder} names more than {_MAX_TENSORS:,} tensors")
    return tensors


def tensors_of(file: Path) -> Mapping[str, Tensor]:
    """The tensors of one third-party file: safetensors, or a pickle read with the weights-only loader."""
    if not file.is_file():
        raise AssetError(f"there is no file {file}")
    return Checkpoint(file) if file.suffix == ".safetensors" else _unpickle(file)


def transformers_model(folder: Path, dtype: str, device: Any = "cpu", kind: str = "AutoModelForCausalLM") -> Any:
    """Load a transformers model of class `kind`; raises if the checkpoint lacks any of its tensors."""
    import torch
    import transformers
    from transformers.utils import logging

    read_json(folder / "config.json")  # raises if it names code
    _check_size(folder, kind)
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        model, loading_info = getattr(transformers, kind).from_pretrained(
            str(folder),
            dtype=getattr(torch, dtype),
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            output_loading_info=True,
            device_map=None if torch.device(device).type == "cpu" else {"": device},  # read to the device at once
        )
    except Exception as error:  # transformers raises many kinds of errors
        raise AssetError(f"transformers can't load {folder}: {' '.join(str(error).split())[:300]}") from None
    finally:
        logging.set_verbosity(level)
    if missing := sorted(loading_info["missing_keys"]):
        raise AssetError(
            f"the checkpoint in {folder} has no tensor '{missing[0]}'"
            + (f" nor {len(missing) - 1} others" if len(missing) > 1 else "")
            + "; a file may be missing"
        )
    return model.to(device)


def _check_size(folder: Path, kind: str) -> None:
    """Raise if a model is larger than its weights can be, before memory is taken for it. A missing entry of config.json
    has the default of the class, which is often a model of 7 billion parameters."""
    import torch
    import transformers

    stored = sum(file.stat().st_size for file in _files(folder))  # raises if there are no safetensors
    maker = getattr(transformers, kind)
    try:
        config = transformers.AutoConfig.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            model = maker.from_config(config) if hasattr(maker, "from_config") else maker._from_config(config)
    except Exception:  # loading it says why
        return
    parameters = sum(tensor.numel() for tensor in model.parameters())
    if parameters * _LEAST_BYTES > stored + _FREE_BYTES:
        raise AssetError(
            f"config.json in {folder} describes a model of {parameters:,} parameters, but its weights have only "
            f"{stored:,} bytes; the two do not belong together, or config.json lacks an entry"
        )


def transformers_processor(folder: Path) -> Any:
    """Load a model's processor, which converts text, images and sound to its inputs."""
    from transformers import AutoProcessor

    for name in ("processor_config.json", "preprocessor_config.json"):
        if (folder / name).is_file():
            read_json(folder / name)  # raises if it names code
    try:
        return AutoProcessor.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # panics of the tokenizers library are no Exception
        raise AssetError(
            f"transformers can't load the processor of {folder}: {' '.join(str(error).split())[:300]}"
        ) from None


def _files(folder: Path) -> list[Path]:
    if folder.is_file() and folder.suffix == ".safetensors":
        return [folder]
    if (index := folder / "model.safetensors.index.json").is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise AssetError(f"{index} has no weight_map from tensors to files; download the model again")
        names = sorted(set(weight_map.values()))
        wrong = [name for name in names if Path(name).name != name]
        missing = [name for name in names if name not in wrong and not (folder / name).is_file()]
        if wrong or missing or not names:
            raise AssetError(f"{index} names files that are not beside it: {', '.join(map(str, wrong + missing))}")
        return [folder / name for name in names]
    if (single := folder / "model.safetensors").is_file():
        return [single]
    if files := sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        return files
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt")):
        raise AssetError(f"{folder} holds pickled weights only, which can run code; save the model as safetensors")
    raise AssetError(f"{folder} holds no safetensors file")
