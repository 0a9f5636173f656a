"""What is in the archives that assets are: packages of npm and of Debian, read where they lie.

Knows paths and bytes; nothing of what they are for. Weights are opened by outrider.core.assets.store alone.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.core.assets.store import ASSETS, Asset, AssetError, fetch

_MAGIC, _HEADER = b"!<arch>\n", 60  # of a Debian package, which is a plain row of files, each behind a header


def members(name: str, pattern: str, *, table: Mapping[str, Asset] = ASSETS) -> Iterator[str]:
    """The files of an asset's archive whose path ends like that, as text."""
    for _, data in contents(name, pattern, table=table):
        yield data.decode("utf-8", errors="replace")


def contents(name: str, pattern: str, *, table: Mapping[str, Asset] = ASSETS) -> Iterator[tuple[str, bytes]]:
    """The same as they are, each behind its path."""
    (archive,) = (one for one in fetch(name, table=table).iterdir() if one.suffix in (".tgz", ".deb"))
    opened = io.BytesIO(_data(archive)) if archive.suffix == ".deb" else None
    with tarfile.open(archive, fileobj=opened) as held:
        for member in sorted(held, key=lambda one: one.name):
            if member.isfile() and re.search(pattern, member.name):
                file = held.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def _data(package: Path) -> bytes:
    """The archive of files inside a Debian package."""
    with package.open("rb") as held:
        if held.read(len(_MAGIC)) == _MAGIC:
            while len(header := held.read(_HEADER)) == _HEADER:
                size = int(header[48:58])
                if header.startswith(b"data.tar"):
                    return held.read(size)
                held.seek(size + size % 2, io.SEEK_CUR)
    raise AssetError(f"{package} is no Debian package: there is no data.tar in it")
