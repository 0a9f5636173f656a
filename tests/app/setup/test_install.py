"""The installer: which torch build it installs, from where, and when it keeps the installed one."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from outrider.app.setup import install

PINS = "numpy==2.4.6\ntorch==2.13.0\ntorchaudio==2.11.0\n"


def test_linux_without_a_gpu_tries_cpu_builds_first() -> None:
    default, index, plain = install.attempts("2.13.0", "Linux", gpus=0)
    assert default.arguments == ("--no-deps", "torch==2.13.0+cpu")
    assert f"--index-url={install.CPU_INDEX}" in index.arguments
    assert "torch==2.13.0+cpu" in index.arguments
    assert plain.arguments == ("torch==2.13.0",)


@pytest.mark.parametrize(("system", "gpus"), [("Linux", 1), ("Darwin", 0), ("Windows", 0)])
def test_other_machines_install_the_default_build(system: str, gpus: int) -> None:
    assert [attempt.arguments for attempt in install.attempts("2.13.0", system, gpus)] == [("torch==2.13.0",)]


@pytest.mark.parametrize("works", [0, 1, 2])
def test_torch_is_installed_by_the_first_attempt_that_works(
    works: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried: list[tuple[str, ...]] = []

    def pip(*arguments: str, quiet: bool = False) -> bool:
        tried.append(arguments)
        return len(tried) == works + 1

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install, "nvidia_gpus", list)
    install.install_torch("2.13.0")
    assert tried == [attempt.arguments for attempt in install.attempts("2.13.0", "Linux", 0)][: works + 1]
    assert ("with CUDA" in capsys.readouterr().out) == (works == 2)


def test_installation_stops_if_no_attempt_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "pip", lambda *_, **__: False)
    with pytest.raises(SystemExit, match="could not install torch"):
        install.install_torch("2.13.0")


@pytest.mark.parametrize(
    ("installed", "kept"),
    [("2.13.0+cpu", True), ("2.15.1", True), ("2.15.0a0+gitabc", True), ("2.6.0+cu124", False), (None, False)],
)
def test_a_recent_torch_is_kept(installed: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(install.metadata, "version", version)
    assert install.torch_here() == (installed if kept else None)


def test_constraints_pin_the_installed_torch() -> None:
    assert install.pinned(PINS, "torch") == "2.13.0"
    assert install.keeping(PINS, "2.15.1+cu130") == PINS.replace("torch==2.13.0", "torch==2.15.1")


@pytest.mark.skipif(os.name == "nt", reason="the fake nvidia-smi is a shell script")
@pytest.mark.parametrize(
    ("listing", "names"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)", ["NVIDIA H200", "NVIDIA H200"]),
        ("No devices were found", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", []),
    ],
)
def test_gpus_are_read_from_the_driver(
    listing: str, names: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\ncat <<'END'\n{listing}\nEND\n", encoding="utf-8")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert install.nvidia_gpus() == names


def test_without_a_driver_there_are_no_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.nvidia_gpus() == []
