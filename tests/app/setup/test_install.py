"""Set-up's choices: which torch, from where, and when to leave what is there alone."""

from __future__ import annotations

import os
from importlib import metadata
from pathlib import Path

import pytest

from outrider.app.setup import install

PINS = "numpy==2.4.6\ntorch==2.13.0\ntorchaudio==2.11.0\n"


def test_without_a_gpu_linux_tries_builds_for_cpus_first() -> None:
    default, index, plain = install.attempts("2.13.0", "Linux", gpus=0)
    assert default.arguments == ("--no-deps", "torch==2.13.0+cpu")
    assert f"--index-url={install.CPU_INDEX}" in index.arguments
    assert "torch==2.13.0+cpu" in index.arguments
    assert plain.arguments == ("torch==2.13.0",)


@pytest.mark.parametrize(("system", "gpus"), [("Linux", 1), ("Darwin", 0), ("Windows", 0)])
def test_elsewhere_the_default_build_is_the_right_one(system: str, gpus: int) -> None:
    assert [attempt.arguments for attempt in install.attempts("2.13.0", system, gpus)] == [("torch==2.13.0",)]


@pytest.mark.parametrize("works", [0, 1, 2])
def test_torch_comes_from_the_first_place_that_has_it(
    works: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, ...]] = []

    def pip(*arguments: str, quiet: bool = False) -> bool:
        asked.append(arguments)
        return len(asked) == works + 1

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install.platform, "system", lambda: "Linux")
    monkeypatch.setattr(install, "nvidia_gpus", list)
    install.install_torch("2.13.0")
    assert asked == [one.arguments for one in install.attempts("2.13.0", "Linux", 0)][: works + 1]
    assert ("with CUDA" in capsys.readouterr().out) == (works == 2)


def test_without_any_torch_set_up_stops_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(install, "pip", lambda *_, **__: False)
    with pytest.raises(SystemExit, match="needs torch"):
        install.install_torch("2.13.0")


@pytest.mark.parametrize(
    ("installed", "kept"),
    [("2.13.0+cpu", True), ("2.15.1", True), ("2.15.0a0+gitabc", True), ("2.6.0+cu124", False), (None, False)],
)
def test_a_torch_that_is_new_enough_is_left_alone(
    installed: str | None, kept: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise metadata.PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(install.metadata, "version", version)
    assert install.torch_here() == (installed if kept else None)


def test_pip_is_told_to_keep_the_torch_that_is_here() -> None:
    assert install.pinned(PINS, "torch") == "2.13.0"
    assert install.keeping(PINS, "2.15.1+cu130") == PINS.replace("torch==2.13.0", "torch==2.15.1")


@pytest.mark.skipif(os.name == "nt", reason="the stand-in is a shell script")
@pytest.mark.parametrize(
    ("listing", "names"),
    [
        ("GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)", ["NVIDIA H200", "NVIDIA H200"]),
        ("No devices were found", []),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", []),
    ],
)
def test_gpus_are_those_the_driver_lists(
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
