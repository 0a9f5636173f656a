"""Repairs a torchaudio that cannot be imported because it was built for CUDA and torch was not.

torchaudio's default Linux wheel links CUDA libraries. With a CPU build of torch its import fails, and with it the
import of transformers models, which load torchaudio if it is installed. Outrider uses only its Python parts
(transforms, functional), which work once the compiled libraries are renamed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PARKED = ".disabled"


def repair(package: Path, cuda: bool, error: Callable[[], str | None]) -> str | None:
    """Make an installed torchaudio importable; returns a description of the change, or None if nothing was changed.

    `error` imports torchaudio in a new process and returns its error. Libraries are renamed, never removed, and are
    restored once torch has CUDA. A change that does not help is undone.
    """
    live, parked = _libraries(package, "*.so"), _libraries(package, f"*.so{PARKED}")
    if parked and not live and cuda:
        _rename(parked)
        if error() is None:
            return f"torchaudio: enabled its {len(parked)} compiled libraries again, since torch now has CUDA"
        _rename(_libraries(package, "*.so"))
        return None
    if not live or error() is None:
        return None
    _rename(live)
    if error() is not None:
        _rename(_libraries(package, f"*.so{PARKED}"))
        return None
    return (
        f"torchaudio: renamed its {len(live)} compiled libraries to *{PARKED} in {package / 'lib'}, because they need "
        "CUDA and this torch has none; its Python parts work"
    )


def _libraries(package: Path, pattern: str) -> list[Path]:
    return sorted((package / "lib").glob(pattern))


def _rename(libraries: list[Path]) -> None:
    """Disable enabled libraries and enable disabled ones, in pip's RECORD too, so that uninstalling removes them."""
    for library in libraries:
        parked = library.name.endswith(PARKED)
        name = library.name.removesuffix(PARKED) if parked else library.name + PARKED
        library.replace(library.with_name(name))
        for record in library.parents[2].glob("torchaudio-*.dist-info/RECORD"):
            text = record.read_text(encoding="utf-8")
            old, new = (f"torchaudio/lib/{one}," for one in (library.name, name))
            record.write_text(text.replace(f"\n{old}", f"\n{new}"), encoding="utf-8")
