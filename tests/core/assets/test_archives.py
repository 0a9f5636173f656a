"""What is in archives: those of npm and of Debian, made here."""

from __future__ import annotations

import io
import tarfile

import pytest

from outrider.core.assets.archives import contents, members
from outrider.core.assets.store import Asset, AssetError
from tests.core.assets.given import Given, pinned, table

pytestmark = pytest.mark.usefixtures("cache")
FILES = {"./data/b.txt": "two".encode("utf-16"), "./data/a.txt": b"one", "./data/c.bin": b"\xff"}


def packed(form: str) -> bytes:
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode=f"w:{form}") as archive:  # type: ignore[call-overload]
        for name, content in FILES.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return data.getvalue()


def package(**files: bytes) -> bytes:
    """Debian's form: files in a row, each behind 60 bytes of header, at even places."""
    found = b"!<arch>\n"
    for name, data in files.items():
        header = f"{name.replace('_', '.'):16}{0:<12}{0:<6}{0:<6}{'100644':8}{len(data):<10}`\n"
        found += header.encode() + data + b"\n" * (len(data) % 2)
    return found


def given(name: str, data: bytes) -> dict[str, Asset]:
    return table(Given(pinned(name, data), data))


@pytest.mark.parametrize("name", ["a.tgz", "a.deb"])
def test_files_are_found_by_how_their_paths_end(name: str) -> None:
    odd = package(debian_binary=b"2.0", control_tar_xz=b"x", data_tar_xz=packed("xz"))
    held = given(name, packed("gz") if name == "a.tgz" else odd)
    assert list(contents("thing", r"\.(txt|bin)$", table=held)) == sorted(FILES.items())
    assert list(members("thing", r"/a\.txt$", table=held)) == ["one"]
    assert not list(members("thing", r"\.wav$", table=held))


@pytest.mark.parametrize("data", [b"", b"no package at all", package(debian_binary=b"2.0\n")])
def test_what_is_no_package_is_said(data: bytes) -> None:
    with pytest.raises(AssetError, match=r"a\.deb is no Debian package"):
        next(contents("thing", "", table=given("a.deb", data)))
