"""The one known trap of the dependencies, and its cure.

torchaudio's wheel for Linux links CUDA. Beside a torch without it, torchaudio can't be imported, and neither can the
models of transformers, which import torchaudio wherever it is installed. The parts in use here (transforms, functional)
are Python: with the compiled libraries out of the way they work.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

PARKED = ".disabled"


def mend(package: Path, cuda: bool, error: Callable[[], str | None]) -> str | None:
    """Bring an installed torchaudio to where it imports; says what was done, or None if nothing was.

    `error` imports torchaudio afresh and says what went wrong. Libraries are renamed, never removed, and come back
    as soon as torch has CUDA. What doesn't help is undone.
    """
    live, parked = _libraries(package, "*.so"), _libraries(package, f"*.so{PARKED}")
    if parked and not live and cuda:
        _rename(parked)
        if error() is None:
            return f"torchaudio: torch has CUDA now, so its {len(parked)} compiled libraries are enabled again"
        _rename(_libraries(package, "*.so"))
        return None
    if not live or error() is None:
        return None
    _rename(live)
    if error() is not None:
        _rename(_libraries(package, f"*.so{PARKED}"))
        return None
    return (
        f"torchaudio: its {len(live)} compiled libraries need a CUDA that this torch doesn't have; renamed them to "
        f"*{PARKED} in {package / 'lib'}, and its Python parts work"
    )


def _libraries(package: Path, pattern: str) -> list[Path]:
    return sorted((package / "lib").glob(pattern))


def _rename(libraries: list[Path]) -> None:
    """Park live libraries, bring parked ones back; pip's record follows, or it would leave them behind one day."""
    for library in libraries:
        parked = library.name.endswith(PARKED)
        name = library.name.removesuffix(PARKED) if parked else library.name + PARKED
        library.replace(library.with_name(name))
        for record in library.parents[2].glob("torchaudio-*.dist-info/RECORD"):
            text = record.read_text(encoding="utf-8")
            old, new = (f"torchaudio/lib/{one}," for one in (library.name, name))
            record.write_text(text.replace(f"\n{old}", f"\n{new}"), encoding="utf-8")
