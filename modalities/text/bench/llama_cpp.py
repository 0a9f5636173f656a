"""llama.cpp: built from the source package of llama-cpp-python, with its modes of speculation as a benchmark runs them.

The build needs a C++ compiler and takes minutes; cmake and ninja come from the Python index, and nothing else is
downloaded. $OUTRIDER_LLAMA_CPP names a folder with a llama-server of one's own. The server itself is started and asked
by peer_worker.py.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from outrider.core.bench.processor import processor
from outrider.core.paths import cache_folder
from outrider.core.protocol import PLAIN
from outrider.text.bench.venvs import PeerError, call, pip, venv

NAME, VERSION = "llama.cpp", "0.3.36"
_PACKAGE = f"llama-cpp-python=={VERSION}"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"
_TOOLS = ("cmake==4.4.5", "ninja==1.13.2")
_PROGRAMS = ("llama-server", "llama-bench", "llama-batched-bench", "llama-lookup", "llama-speculative-simple")
_FLAGS = (
    *("-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_BUILD_RPATH_USE_ORIGIN=ON"),
    *("-DGGML_NATIVE=ON", "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF"),
    *("-DLLAMA_BUILD_UI=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF"),  # its page would be downloaded
)
_WITHOUT_TILES = "-mno-amx-tile -mno-amx-int8 -mno-amx-bf16"
_OWN = "OUTRIDER_LLAMA_CPP"
_STAMP = "outrider.txt"


@dataclass(frozen=True)
class Mode:
    """A mode of llama-server: its options, and whether it takes a draft model."""

    name: str  # as --spec-type calls it
    options: tuple[str, ...] = ()
    draft_model: bool = False

    def arguments(self, draft: Path | None) -> tuple[str, ...]:
        """The options to paste, given the draft model's file."""
        if self.name == PLAIN:
            return ()
        if self.draft_model and draft is None:
            raise PeerError(
                "there is no GGUF file of a draft model with the target's tokens; name one as --draft-model"
            )
        model = ("--spec-draft-model", str(draft)) if self.draft_model else ()
        return ("--spec-type", self.name, *model, *self.options)


MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode(PLAIN),
        Mode("draft-simple", ("--spec-draft-n-max", "3"), draft_model=True),  # its default number of tokens
        # its defaults look for 12 equal tokens and draft 48, for rewriting long files; these are our prompt-lookup's
        Mode("ngram-simple", ("--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "5")),
        Mode("ngram-cache", ("--spec-draft-n-max", "5")),
    )
}


def folder() -> Path:
    """The folder of the programs: one's own, or that of the build in the cache."""
    own = os.environ.get(_OWN)
    return Path(own).expanduser() if own else cache_folder() / "peers" / NAME / "bin"


def built() -> bool:
    """Whether llama-server can be run without a build."""
    if os.environ.get(_OWN):
        return (folder() / _program("llama-server")).is_file()
    stamp = folder() / _STAMP
    return stamp.is_file() and stamp.read_text() == _stamp()


def server(say: Callable[[str], None]) -> Path:
    """The program llama-server, which is built if it is missing."""
    place = folder()
    if not built():
        if os.environ.get(_OWN):
            raise PeerError(f"${_OWN} is {place}, and that folder has no {_program('llama-server')}")
        _build(place, say)
    return place / _program("llama-server")


def _build(place: Path, say: Callable[[str], None]) -> None:
    """Build in a temporary folder; the programs and their libraries are what is kept."""
    python = venv(place.parent / "venv", _TOOLS, (), say, NAME, "100 MB")
    say(f"building {NAME} ({_PACKAGE}) in {place} (once; minutes)")
    with tempfile.TemporaryDirectory(dir=place.parent, prefix="build-") as name:
        work = Path(name)
        only = ("--no-deps", "--no-binary", _PACKAGE.partition("==")[0], "--dest", name)
        pip(python, "download", *only, _PACKAGE)
        (archive,) = work.glob("*.tar.gz")
        if hashlib.sha256(archive.read_bytes()).hexdigest() != _SHA256:
            raise PeerError(f"the package {_PACKAGE} of the index is not the one that was tested: its sha256 differs")
        with tarfile.open(archive) as packed:
            packed.extractall(work, filter="data")
        archive.unlink()
        (source,) = work.glob("*/vendor/llama.cpp")
        tools = {"PATH": os.pathsep.join([str(python.parent), os.environ.get("PATH", "")])}
        cmake = str(python.parent / _program("cmake"))
        call([cmake, "-S", ".", "-B", "build", *_FLAGS, *_without_tiles()], tools, source)
        call([cmake, "--build", "build", "--target", *_PROGRAMS], tools, source)
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(source / "build" / "bin", place, symlinks=True)
    (place / _STAMP).write_text(_stamp())


def _without_tiles() -> list[str]:
    """On a processor with AMX, whose products end this version's programs (illegal instruction): AVX-512 in place."""
    tiles = processor().endswith("with AMX")
    return [f"-DCMAKE_{language}_FLAGS={_WITHOUT_TILES}" for language in ("C", "CXX") if tiles]


def _stamp() -> str:
    """What a build was made from."""
    return "\n".join((_PACKAGE, *_without_tiles()))


def _program(name: str) -> str:
    return f"{name}.exe" if os.name == "nt" else name


def pass_costs(gguf: Path, widths: Sequence[int], threads: int, repeat: int = 5) -> dict[int, float]:
    """Milliseconds of llama.cpp's pass over this many tokens, by llama-bench: the median of several."""
    program = folder() / _program("llama-bench")
    words = ["-m", str(gguf), "-t", str(threads), "-n", "0", "-r", str(repeat), "-o", "json"]
    return parse_costs(call([str(program), *words, "-p", ",".join(map(str, widths))]))


def parse_costs(printed: str) -> dict[int, float]:
    """The JSON of llama-bench as milliseconds by tokens of a pass."""
    try:
        return {int(row["n_prompt"]): median(row["samples_ns"]) / 1e6 for row in json.loads(printed)}
    except (ValueError, KeyError, TypeError) as error:
        raise PeerError(f"llama-bench printed no measurements: {error}") from None
