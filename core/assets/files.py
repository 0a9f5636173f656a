"""Reads third-party JSON, and writes files so that a reader finds the whole of the old or of the new one.

A full disk or a folder that can't be written is one sentence, whichever library met it. Independent of what the files
hold.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from torch import Tensor

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EROFS, errno.EACCES, errno.EPERM)
_MAX_JSON = 1 << 26  # bytes of a config file
_STALE = 3600.0  # seconds after which a temporary file is that of a process that was killed


class AssetError(OutriderError):
    """An asset could not be fetched, or a file is malformed or can't be written."""


def read_json(path: Path, *, runs_code: bool = True) -> dict[str, Any]:
    """A third-party config file; raises if it is no dictionary, or needs code of its own that its reader could run."""
    if path.exists() and not path.is_file():
        raise AssetError(f"{path} is not a regular file")
    if path.stat().st_size > _MAX_JSON:
        raise AssetError(f"{path} has {path.stat().st_size:,} bytes; a config has at most {_MAX_JSON:,}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise AssetError(f"{path} is not JSON: {str(error)[:100]}") from None
    if not isinstance(config, dict):
        raise AssetError(f"{path} holds a {type(config).__name__}; expected a dictionary")
    if runs_code and config.get("auto_map") and not _known_to_transformers(config.get("model_type")):
        raise AssetError(f"{path} names code of its own to run (auto_map), which is not supported")
    return config


def _known_to_transformers(model_type: object) -> bool:
    """Whether transformers has classes of this type, which take the place of code that a config names."""
    try:
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
    except ImportError:
        return False
    return model_type in CONFIG_MAPPING_NAMES


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Name a full disk or a folder that can't be written as the reason, if that is why the block failed."""
    try:
        yield
    except Exception as error:  # libraries wrap the system's errors in their own
        if (number := _system_error(error)) in _FULL:
            raise AssetError(
                f"{path} can't be written: the disk is full ({os.strerror(number)}); free some space, or choose "
                "another folder (OUTRIDER_CACHE for the cache)"
            ) from None
        if number in _REFUSED:
            raise AssetError(
                f"{path} can't be written ({os.strerror(number)}); choose another folder (OUTRIDER_CACHE for the cache)"
            ) from None
        raise


def _system_error(error: Exception) -> int:
    """The system's error number behind an error; 0: none is known."""
    if isinstance(error, OSError):
        return error.errno or 0
    if found := re.search(r"os error (\d+)", str(error)):  # of libraries in Rust
        return int(found[1])
    return errno.ENOSPC if "inline_container.cc" in str(error) else 0  # torch.save names no number


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary file's path, which replaces `path` after the block; a block that fails leaves nothing behind. A
    device or a pipe is written directly."""
    path = path.resolve() if path.is_symlink() else path
    if path.exists() and not path.is_file() and not path.is_dir():
        yield path
        return
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f"{path.name}.*.partial"):
            with suppress(OSError):
                if time.time() - left.stat().st_mtime > _STALE:
                    left.unlink()
        temporary = path.with_name(f"{path.name}.{os.getpid()}.partial")
        try:
            yield temporary
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomically(path: Path, text: str) -> None:
    """Write a text file by renaming a complete temporary one."""
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file by renaming a complete temporary one."""
    from safetensors.torch import save_file

    with replacing(path) as temporary:
        save_file(dict(tensors), str(temporary), None if metadata is None else dict(metadata))
        temporary.chmod(0o644)  # safetensors creates files readable only by their owner
