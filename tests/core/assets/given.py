"""Assets for tests: a source that writes what it is told, and what is held of it."""

from __future__ import annotations

import hashlib
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider.core.assets.sources import Pinned, Source
from outrider.core.assets.store import Asset

DATA = b"weights " * 5000


def pinned(name: str = "a.bin", data: bytes = DATA) -> Pinned:
    return Pinned(name, len(data), hashlib.sha256(data).hexdigest())


def held(folder: Path) -> list[str]:
    """Every file but the locks."""
    return sorted(
        str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and ".lock" not in path.name
    )


@dataclass(frozen=True)
class Given:
    """A source that writes what it is told, or stops in the middle."""

    file: Pinned
    content: bytes = DATA
    stops: type[BaseException] | None = None
    asked: list[int] | None = None

    @property
    def files(self) -> tuple[Pinned, ...]:
        return (self.file,)

    def __str__(self) -> str:
        return "somewhere"

    def fetch(self, folder: Path) -> None:
        if self.asked is not None:
            self.asked.append(1)
            time.sleep(0.2)
        (folder / self.file.name).write_bytes(self.content[: len(self.content) // 2])
        if self.stops:
            raise self.stops("the line broke")
        (folder / self.file.name).write_bytes(self.content)


def table(*given: Source) -> dict[str, Asset]:
    return {"thing": Asset("thing", "a thing", "MIT", "nobody", given)}


@contextmanager
def full_disk(size: int) -> Iterator[None]:
    """No file can grow beyond `size` bytes, as on a disk that is full."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
