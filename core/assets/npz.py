"""Arrays with JSON metadata in one compressed file (numpy's .npz, without pickles).

Files are written atomically. When reading, the shape in an array's header is checked against the size of its data
before memory is allocated. Independent of what the arrays hold.
"""

from __future__ import annotations

import json
import math
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.lib import format as npy

from outrider.core.assets.files import replacing
from outrider.core.errors import OutriderError

_ABOUT, _CHUNK = "about", 1 << 20


class NpzError(OutriderError):
    """The file is malformed or lacks the requested arrays."""


def save(path: Path, about: Any, **arrays: np.ndarray) -> None:
    """Write arrays, and JSON-serialisable metadata `about`."""
    contents: dict[str, Any] = {**arrays, _ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}
    with replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, allow_pickle=False, **contents)


def load(path: Path, names: Sequence[str]) -> tuple[Any, dict[str, np.ndarray]]:
    """The metadata, and the arrays of these names."""
    try:
        with zipfile.ZipFile(path) as archive:
            arrays = {name: _array(archive, f"{name}.npy") for name in (*names, _ABOUT)}
        return json.loads(arrays.pop(_ABOUT).tobytes()), arrays
    except Exception as error:  # malformed files raise many kinds of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise NpzError(f"{path} can't be read: {reason[:100]}") from None


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """Read one array; memory is allocated only if the header's size equals that of the data."""
    with archive.open(name) as part:
        shape, columns_first, kind = _header(part)
        size = math.prod(shape) * kind.itemsize
        if kind.hasobject or min(shape, default=0) < 0 or size != archive.getinfo(name).file_size - part.tell():
            raise ValueError(f"{name} is cut short, too long, or holds more than numbers")
        array = np.empty(shape, kind, "F" if columns_first else "C")
        flat, done = array.reshape(-1, order="A").view(np.uint8), 0
        while chunk := part.read(_CHUNK):
            flat[done : done + len(chunk)] = np.frombuffer(chunk, np.uint8)
            done += len(chunk)
    if done != size:
        raise ValueError(f"{name} is cut short")
    return array


def _header(part: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    header: tuple[tuple[int, ...], bool, np.dtype[Any]] = readers[npy.read_magic(part)](part)
    return header
