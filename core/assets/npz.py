"""Sets of plain arrays, and what is to be said of them, in one compressed file (numpy's .npz, without pickles).

Written whole or not at all. Read by sizes that the file really has: what a header says of an array's shape is believed
where it fits what is there. Knows nothing of what the arrays hold.
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

from outrider.core.errors import OutriderError

_ABOUT, _PIECE = "about", 1 << 20


class NpzError(OutriderError):
    """A file that holds no such arrays."""


def save(path: Path, about: Any, **arrays: np.ndarray) -> None:
    """Write arrays, and behind them what JSON can say."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    held: dict[str, Any] = {**arrays, _ABOUT: np.frombuffer(json.dumps(about).encode(), np.uint8)}
    try:
        with partial.open("wb") as file:
            np.savez_compressed(file, allow_pickle=False, **held)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def load(path: Path, names: Sequence[str]) -> tuple[Any, dict[str, np.ndarray]]:
    """What is said of them, and the arrays of these names."""
    try:
        with zipfile.ZipFile(path) as archive:
            found = {name: _array(archive, f"{name}.npy") for name in (*names, _ABOUT)}
        return json.loads(found.pop(_ABOUT).tobytes()), found
    except Exception as error:  # whatever is wrong with it
        why = " ".join(str(error).split()) or type(error).__name__
        raise NpzError(f"{path} can't be read: {why[:100]}") from None


def _array(archive: zipfile.ZipFile, name: str) -> np.ndarray:
    """One array; its memory is taken once its size is what the archive says comes."""
    with archive.open(name) as part:
        shape, columns_first, kind = _header(part)
        size = math.prod(shape) * kind.itemsize
        if kind.hasobject or min(shape, default=0) < 0 or size != archive.getinfo(name).file_size - part.tell():
            raise ValueError(f"{name} is cut short, too long, or holds more than numbers")
        held = np.empty(shape, kind, "F" if columns_first else "C")
        flat, at = held.reshape(-1, order="A").view(np.uint8), 0
        while piece := part.read(_PIECE):
            flat[at : at + len(piece)] = np.frombuffer(piece, np.uint8)
            at += len(piece)
    if at != size:
        raise ValueError(f"{name} is cut short")
    return held


def _header(part: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    readers = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
    found: tuple[tuple[int, ...], bool, np.dtype[Any]] = readers[npy.read_magic(part)](part)
    return found
