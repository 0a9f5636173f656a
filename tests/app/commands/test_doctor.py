"""`outrider doctor`: findings from given facts, and the report of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from outrider.app.commands import doctor
from outrider.app.commands.doctor import PACKAGES, Package, check_cache, check_gpu, check_package, check_unused
from outrider.app.options import file_size
from outrider.core.errors import install_command

NEEDED = Package("numpy", ("numpy",), "everything")
OPTIONAL = Package("gradio", ("gradio",), "the app", needed=False, extra="app")


def torch(cuda: str | None, *devices: str) -> dict[str, Any]:
    return {"version": "2.13.0", "cuda": cuda, "devices": dict.fromkeys(("cpu", *devices))}


def test_a_package_that_imports_works() -> None:
    finding = check_package(NEEDED, "2.4.6", None)
    assert (finding.state, finding.found, finding.fix) == ("works", "2.4.6", "")


@pytest.mark.parametrize(
    ("package", "version", "error", "state", "fix"),
    [
        (NEEDED, None, None, "absent", "pip install numpy"),
        (OPTIONAL, None, None, "absent", install_command("app").removeprefix("pip ")),
        (NEEDED, "2.4.6", "ImportError: bad", "broken", "pip install --force-reinstall --no-deps numpy"),
        (doctor.TORCHAUDIO, "2.11.0", "OSError: libcudart", "broken", "outrider doctor --fix"),
        (NEEDED, "2.4.6", "OSError: torchaudio/lib/_torchaudio.so", "broken", "outrider doctor --fix"),
    ],
)
def test_findings_have_a_fix(package: Package, version: str | None, error: str | None, state: str, fix: str) -> None:
    finding = check_package(package, version, error)
    assert finding.state == state
    assert finding.fix.endswith(fix)
    assert error is None or error in finding.found


def test_a_broken_unneeded_package_should_be_removed() -> None:
    assert check_unused("torchvision", "0.28.0", None).state == "works"
    finding = check_unused("torchvision", "0.28.0", "OSError: libcudart")
    assert (finding.state, finding.needed) == ("broken", False)
    assert finding.fix.endswith("pip uninstall torchvision")


def test_a_gpu_works_if_torch_can_use_it() -> None:
    assert check_gpu([], torch(None)) is None
    assert check_gpu(["NVIDIA H200"], {}) is None
    usable = check_gpu(["NVIDIA H200"], torch("13.0", "cuda:0"))
    without = check_gpu(["NVIDIA H200"], torch(None))
    old_driver = check_gpu(["NVIDIA H200"], torch("13.0"))
    assert usable
    assert without
    assert old_driver
    assert usable.state == "works"
    assert "build without CUDA" in without.fix
    assert "driver" in old_driver.fix


def test_the_cache_folder_is_configurable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "weights"))
    assert doctor.cache_folder() == tmp_path / "weights"
    assert check_cache(tmp_path / "weights").state == "works"
    assert not (tmp_path / "weights").exists()
    (tmp_path / "weights").mkdir()
    (tmp_path / "weights" / "a.safetensors").write_bytes(bytes(2500))
    assert "2 KB held" in check_cache(tmp_path / "weights").found


def test_an_unwritable_cache_is_an_error() -> None:
    finding = check_cache(Path("/proc/nowhere"))
    assert (finding.state, finding.needed) == ("broken", True)
    assert "OUTRIDER_CACHE" in finding.fix


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 B"), (999, "999 B"), (25_000_000_000, "25 GB"), (3 * 10**15, "3000 TB")]
)
def test_sizes_are_formatted(count: int, words: str) -> None:
    assert file_size(count) == words


@pytest.mark.slow
def test_the_report_of_this_machine_is_ok_and_json() -> None:
    report = doctor.examine(fix=True)
    assert report.ok, [finding for finding in report.findings if finding.state != "works"]
    assert json.loads(json.dumps(report.to_dict()))["machine"]["cores"] >= 1
    assert {package.name for package in PACKAGES} <= {finding.name for finding in report.findings}
    assert report.repaired == [], "set-up has repaired it already"


def test_a_package_that_fails_is_told_from_those_beside_it() -> None:
    assert doctor.errors_of({"json": ("json",), "shlex": ("shlex",)}) == {"json": None, "shlex": None}
    found = doctor.errors_of({"json": ("json",), "gone": ("no_such_module",)})
    assert found["json"] is None and "no_such_module" in (found["gone"] or "")


def test_native_kernels_are_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.core.kernels import native

    monkeypatch.setattr(native, "hindrance", lambda: ("no C++ compiler", "install g++"))
    found = doctor.check_native()
    assert (found.state, found.needed, found.fix) == ("absent", False, "install g++")
    monkeypatch.setattr(native, "hindrance", lambda: None)
    monkeypatch.setattr(native, "library", lambda: None)
    assert doctor.check_native().state == "broken"
    monkeypatch.setenv("CXX", "/bin/false")
    monkeypatch.setattr(native, "_intact", lambda path: False)
    found = doctor.check_native()
    assert "the C++ compiler failed" in found.found and "CXX" in found.fix
    monkeypatch.setenv("OUTRIDER_CACHE", "/proc/nowhere")
    found = doctor.check_native()
    assert "/proc/nowhere/native can't be written" in found.found and "OUTRIDER_CACHE" in found.fix
    monkeypatch.setattr(native, "library", lambda: object())
    assert doctor.check_native().state == "works"
