"""The distribution: package names, complete files, light imports, pinned dependencies."""

from __future__ import annotations

import subprocess
import sys
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from outrider.core import __version__
from tests.wheels import wheel

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
FOLDERS = {
    "core": "outrider/core",
    "modalities/text": "outrider/text",
    "modalities/image": "outrider/image",
    "modalities/speech": "outrider/speech",
    "app": "outrider/app",
}


def in_child(code: str) -> str:
    child = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr
    return child.stdout


def sources() -> list[str]:
    """Return the files that git tracks, and untracked files that it does not ignore."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    result = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in result if (ROOT / name).exists()]


@pytest.mark.slow
def test_the_wheel_holds_every_source_file_and_no_other(tmp_path: Path) -> None:
    files = sources()
    built = wheel(tmp_path, "--no-build-isolation")
    held = {name for name in zipfile.ZipFile(built).namelist() if ".dist-info/" not in name}
    expected = {
        installed + name.removeprefix(folder)
        for name in files
        for folder, installed in FOLDERS.items()
        if name.startswith(folder + "/")
    }
    assert held == expected
    assert built.name.startswith(f"outrider-{__version__}-")


def test_every_package_has_py_typed() -> None:
    assert all((ROOT / folder / "py.typed").exists() for folder in FOLDERS)


def test_the_installed_version_matches_the_code() -> None:
    assert metadata.version("outrider") == __version__


def test_folder_names_are_not_import_names() -> None:
    assert not {"core", "app", "modalities"} & sys.modules.keys()


@pytest.mark.slow
def test_importing_the_core_loads_nothing_heavy() -> None:
    loaded = in_child(
        "import sys, outrider.core, outrider.core.decode, outrider.core.methods\nprint(*sys.modules, sep='\\n')"
    )
    assert not {"transformers", "diffusers", "torchaudio", "gradio"} & set(loaded.split())


def test_importing_the_command_loads_nothing_heavy() -> None:
    loaded = in_child("import sys, outrider.app.cli\nprint(*sys.modules, sep='\\n')")
    assert not {"torch", "numpy", "transformers", "diffusers", "torchaudio", "gradio"} & set(loaded.split())


def test_every_dependency_is_pinned_within_its_bounds() -> None:
    project = PROJECT["project"]
    wanted = project["dependencies"] + [one for extra in project["optional-dependencies"].values() for one in extra]
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    pins = {canonicalize_name(name): version for name, version in pins.items()}
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), requirement
        assert {one.operator for one in requirement.specifier} == {">="}, f"{requirement}: a lower bound, no other"
