"""Reads files out of assets that are npm or Debian packages, without unpacking them to disk.

Independent of what the files are for. Weights are opened only by outrider.core.assets.store.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from outrider.core.assets.store import ASSETS, Asset, AssetError, fetch

_MAGIC, _HEADER = b"!<arch>\n", 60  # of a Debian package (ar format): files in sequence, each after a header


def members(name: str, pattern: str, *, table: Mapping[str, Asset] = ASSETS) -> Iterator[str]:
    """The text of the files in an asset's archive whose path matches a regular expression."""
    for _, data in contents(name, pattern, table=table):
        yield data.decode("utf-8", errors="replace")


def contents(name: str, pattern: str, *, table: Mapping[str, Asset] = ASSETS) -> Iterator[tuple[str, bytes]]:
    """The paths and bytes of the files in an asset's archive whose path matches a regular expression."""
    (archive,) = (path for path in fetch(name, table=table).iterdir() if path.suffix in (".tgz", ".deb"))
    data = io.BytesIO(_data(archive)) if archive.suffix == ".deb" else None
    with tarfile.open(archive, fileobj=data) as files:
        for member in sorted(files, key=lambda member: member.name):
            if member.isfile() and re.search(pattern, member.name):
                file = files.extractfile(member)
                assert file is not None
                yield member.name, file.read()


def _data(package: Path) -> bytes:
    """The data.tar archive inside a Debian package."""
    with package.open("rb") as stream:
        if stream.read(len(_MAGIC)) == _MAGIC:
            while len(header := stream.read(_HEADER)) == _HEADER:
                size = int(header[48:58])
                if header.startswith(b"data.tar"):
                    return stream.read(size)
                stream.seek(size + size % 2, io.SEEK_CUR)
    raise AssetError(f"{package} is no Debian package: there is no data.tar in it")
