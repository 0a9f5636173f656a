"""The repair of torchaudio, on a fake package whose compiled libraries cannot be loaded; and import probes."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider.app.commands.probe import probe
from outrider.app.setup.repair_torchaudio import repair

BROKEN = """
import pathlib
for library in (pathlib.Path(__file__).parent / "lib").glob("*.so"):
    if library.read_text() == "needs CUDA":
        raise OSError(f"Could not load this library: {library}")
"""
LIBRARIES = ("_torchaudio.abi3.so", "libtorchaudio.abi3.so")
RECORD = (
    "torchaudio/__init__.py,,\ntorchaudio/lib/_torchaudio.abi3.so,sha256=x,1\ntorchaudio/lib/libtorchaudio.abi3.so,,\n"
)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fake torchaudio built for another torch, first on the path of child processes."""
    folder = tmp_path / "torchaudio"
    (folder / "lib").mkdir(parents=True)
    (folder / "__init__.py").write_text(BROKEN, encoding="utf-8")
    for name in LIBRARIES:
        (folder / "lib" / name).write_text("needs CUDA", encoding="utf-8")
    (tmp_path / "torchaudio-2.11.0.dist-info").mkdir()
    (tmp_path / "torchaudio-2.11.0.dist-info" / "RECORD").write_text(RECORD, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return folder


def files(package: Path) -> list[str]:
    return sorted(file.name for file in (package / "lib").iterdir())


def record(package: Path) -> str:
    return (package.parent / "torchaudio-2.11.0.dist-info" / "RECORD").read_text(encoding="utf-8")


def error() -> str | None:
    return probe("torchaudio").error


def never() -> str | None:
    raise AssertionError("the import must not be tried")


def test_libraries_that_need_cuda_are_disabled_once(package: Path) -> None:
    assert "Could not load this library" in (error() or "")
    done = repair(package, cuda=False, error=error)
    assert done is not None
    assert "renamed" in done
    assert error() is None
    assert files(package) == [f"{name}.disabled" for name in LIBRARIES]
    assert record(package) == RECORD.replace(".so,", ".so.disabled,")
    assert repair(package, cuda=False, error=never) is None


def test_with_cuda_they_are_enabled_again(package: Path) -> None:
    repair(package, cuda=False, error=error)
    (package / "__init__.py").write_text("", encoding="utf-8")  # now torch has CUDA
    assert "enabled" in (repair(package, cuda=True, error=error) or "")
    assert files(package) == list(LIBRARIES)
    assert record(package) == RECORD


def test_with_another_cuda_they_stay_disabled(package: Path) -> None:
    repair(package, cuda=False, error=error)
    assert repair(package, cuda=True, error=error) is None
    assert files(package) == [f"{name}.disabled" for name in LIBRARIES]
    assert error() is None


@pytest.mark.parametrize("cuda", [True, False])
def test_a_working_torchaudio_is_not_changed(package: Path, cuda: bool) -> None:
    (package / "__init__.py").write_text("", encoding="utf-8")
    assert repair(package, cuda=cuda, error=error) is None
    assert files(package) == list(LIBRARIES)


def test_a_change_that_does_not_help_is_undone(package: Path) -> None:
    (package / "__init__.py").write_text("import no_such_module", encoding="utf-8")
    assert repair(package, cuda=False, error=error) is None
    assert files(package) == list(LIBRARIES)
    assert record(package) == RECORD


def test_libraries_of_a_new_installation_are_tried_again(package: Path) -> None:
    repair(package, cuda=False, error=error)
    for name in LIBRARIES:
        (package / "lib" / name).write_text("fits", encoding="utf-8")
    assert repair(package, cuda=True, error=error) is None
    assert set(LIBRARIES) <= set(files(package))
    assert (package / "lib" / LIBRARIES[0]).read_text(encoding="utf-8") == "fits"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", None),
        ("raise OSError('libcudart.so.13: cannot open')", "OSError: libcudart.so.13: cannot open"),
        ("import sys; sys.exit(3)", "fails at import (exit code 3)"),
        ("import os; os.abort()", "crashes at import (signal 6)"),
        ("print('a word of its own')", None),
    ],
)
def test_a_probe_reports_imports_that_fail_exit_or_crash(
    code: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text(code, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert probe("fragile").error == expected


@pytest.mark.slow
def test_the_probe_of_torch_lists_devices_and_dtypes() -> None:
    facts = probe("torch").facts
    assert facts["devices"]["cpu"]["dtypes"][:2] == ["float64", "float32"]
