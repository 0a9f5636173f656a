"""`outrider doctor`: which packages and devices work on this machine, and how to fix the others."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from outrider.app.commands.probe import Outcome, probe
from outrider.app.options import file_size
from outrider.app.setup.install import nvidia_gpus
from outrider.app.setup.repair_torchaudio import repair
from outrider.core.errors import install_command
from outrider.core.paths import cache_folder


@dataclass(frozen=True)
class Package:
    """A distribution, and the modules of it that must be importable."""

    name: str
    modules: tuple[str, ...]
    purpose: str
    needed: bool = True
    extra: str | None = None  # our extra that installs it


TORCHAUDIO = Package("torchaudio", ("torchaudio", "torchaudio.transforms", "torchaudio.functional"), "audio features")
PACKAGES = (
    Package("torch", ("torch",), "everything"),
    Package("numpy", ("numpy",), "everything"),
    Package("safetensors", ("safetensors.torch",), "weights"),
    Package("pydantic", ("pydantic",), "traces"),
    # its models import torchaudio and torchvision if installed; its top level does not
    Package("transformers", ("transformers.models.llama.modeling_llama",), "text models"),
    Package("diffusers", ("diffusers.models.autoencoders.vq_model",), "image codecs"),
    TORCHAUDIO,
    Package("gradio", ("gradio",), "the app", needed=False, extra="app"),
    Package("jupyterlab", ("jupyterlab", "ipywidgets"), "notebooks", needed=False, extra="notebooks"),
    Package("matplotlib", ("matplotlib",), "figures", needed=False, extra="notebooks"),
)
_LITTLE = 1 << 28  # bytes on the disk of the cache
UNUSED = ("torchvision", "torchcodec")  # not required, but broken ones break transformers


State = Literal["works", "absent", "broken"]


@dataclass(frozen=True)
class Finding:
    """The state of one component."""

    name: str
    state: State
    needed: bool
    found: str
    purpose: str
    fix: str = ""


@dataclass(frozen=True)
class Report:
    """The report of `outrider doctor`; `ok`: all required components work."""

    ok: bool
    machine: dict[str, Any]
    torch: dict[str, Any]
    findings: list[Finding]
    repaired: list[str]

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def version_of(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def check_package(package: Package, version: str | None, error: str | None) -> Finding:
    """The state of a package, from its version (None: not installed) and the error of its import (None: it works)."""
    python = sys.executable
    if version is None:
        fix = (
            f"{python} -m {install_command(package.extra)}"
            if package.extra
            else f"{python} -m pip install {package.name}"
        )
        return Finding(package.name, "absent", package.needed, "not installed", package.purpose, fix)
    if error is not None:
        if "torchaudio" in package.name + error:
            fix = "outrider doctor --fix"
        else:
            fix = f"{python} -m pip install --force-reinstall --no-deps {package.name}"
        return Finding(package.name, "broken", package.needed, f"{version}: {error}", package.purpose, fix)
    return Finding(package.name, "works", package.needed, version, package.purpose)


def check_unused(name: str, version: str, error: str | None) -> Finding:
    if error is None:
        return Finding(name, "works", False, version, "not required")
    fix = f"not required, but it breaks transformers: {sys.executable} -m pip uninstall {name}"
    return Finding(name, "broken", False, f"{version}: {error}", "not required", fix)


def check_gpu(gpus: list[str], torch: dict[str, Any]) -> Finding | None:
    """The state of the NVIDIA GPUs; None without any."""
    if not gpus or not torch:
        return None
    names = ", ".join(gpus)
    if any(device.startswith("cuda") for device in torch["devices"]):
        return Finding("GPU", "works", False, names, "speed")
    if torch["cuda"] is None:
        fix = (
            f"torch {torch['version']} is a build without CUDA; {sys.executable} -m pip install --force-reinstall torch"
        )
    else:
        fix = f"torch {torch['version']} is built for CUDA {torch['cuda']}; the driver is older or broken"
    return Finding("GPU", "broken", False, f"{names}: torch cannot use it", "speed", fix)


def check_triton() -> Finding:
    """Whether passes on a GPU use the kernels in Triton; without them torch computes the same, in more launches."""
    from outrider.core.kernels import gpu

    purpose = "fewer launches in a pass on a GPU"
    if (why := gpu.hindrance()) is not None:
        return Finding("Triton kernels", "absent", False, f"torch's operations are used: {why}", purpose)
    if not gpu.wanted():
        return Finding("Triton kernels", "absent", False, f"torch's operations are used: {gpu.SWITCH}", purpose)
    return Finding("Triton kernels", "works", False, "used for passes on this GPU", purpose)


def check_native() -> Finding:
    """The state of the compiled kernels; without them torch computes the same, more slowly."""
    from outrider.core.kernels import native

    hindrance, purpose = native.hindrance(), "speed on this CPU"
    if hindrance is not None:
        return Finding("native code", "absent", False, hindrance[0], purpose, hindrance[1])
    if native.library() is None:
        found, fix = native.compile_failure() or ("compiled, but could not be loaded", "set CXX to another compiler")
        return Finding("native code", "broken", False, found, purpose, fix)
    return Finding("native code", "works", False, "compiled for this processor", purpose)


def check_cache(folder: Path) -> Finding:
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        tempfile.TemporaryFile(dir=existing).close()
    except OSError:
        fix = "set OUTRIDER_CACHE to a writable folder"
        return Finding("weights cache", "broken", True, f"{folder}: not writable", "fetched weights", fix)
    held = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    free = shutil.disk_usage(existing).free
    found = f"{folder}: {file_size(held)} held, {file_size(free)} free"
    if free < _LITTLE:
        fix = "free some space, or set OUTRIDER_CACHE to a folder on another disk"
        return Finding("weights cache", "broken", True, found, "fetched weights", fix)
    left = sorted(folder.rglob("*.partial"))
    fix = f"{len(left)} left by a process that was killed: rm -r {shlex.join(map(str, left))}" if left else ""
    return Finding("weights cache", "works", True, found, "fetched weights", fix)


def machine() -> dict[str, Any]:
    memory = None
    if hasattr(os, "sysconf") and "SC_PHYS_PAGES" in os.sysconf_names:
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} ({platform.machine()})",
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "memory": memory,
    }


def repair_torchaudio(torch: dict[str, Any]) -> list[str]:
    spec = find_spec("torchaudio")
    if spec is None or not spec.submodule_search_locations or not torch:
        return []
    done = repair(
        Path(spec.submodule_search_locations[0]),
        cuda=torch["cuda"] is not None,
        error=lambda: probe(*TORCHAUDIO.modules).error,
    )
    return [done] if done else []


def errors_of(modules: Mapping[str, tuple[str, ...]]) -> dict[str, str | None]:
    """The error of importing each package's modules. All share a process, as most import the same; where that fails,
    each has its own."""
    if probe(*chain.from_iterable(modules.values())).error is None:
        return dict.fromkeys(modules)
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        outcomes = pool.map(lambda names: probe(*names), modules.values())
        return {name: outcome.error for name, outcome in zip(modules, outcomes, strict=True)}


def examine(*, fix: bool = False) -> Report:
    """Check everything; with `fix`, first repair what can be repaired automatically."""
    torch = probe("torch") if version_of("torch") else Outcome({}, None)
    repaired = repair_torchaudio(torch.facts) if fix else []
    installed = [package for package in PACKAGES if package.name != "torch" and version_of(package.name)]
    unused = [name for name in UNUSED if version_of(name)]
    modules = {package.name: package.modules for package in installed} | {name: (name,) for name in unused}
    errors = {"torch": torch.error} | errors_of(modules)
    findings = [check_package(package, version_of(package.name), errors.get(package.name)) for package in PACKAGES]
    findings += [check_unused(name, version_of(name) or "", errors[name]) for name in unused]
    gpu = check_gpu(nvidia_gpus(), torch.facts)
    findings += [gpu] if gpu else []
    if torch.facts:
        findings.append(check_native())
        findings.append(check_triton())
    findings.append(check_cache(cache_folder()))
    ok = all(finding.state == "works" for finding in findings if finding.needed)
    return Report(ok, machine(), torch.facts, findings, repaired)


def draw(report: Report) -> None:
    """Print the report."""
    from rich.console import Console
    from rich.text import Text

    console = Console(soft_wrap=True)
    here = report.machine
    memory = f", {file_size(here['memory'])} of memory" if here["memory"] else ""
    console.print(Text(f"Python {here['python']} on {here['system']}, {here['cores']} cores{memory}"))
    for device, facts in report.torch.get("devices", {}).items():
        console.print(Text(f"{device}: {facts['name']}, {', '.join(facts['dtypes'])}"))
    for repaired in report.repaired:
        console.print(Text(f"Repaired {repaired}", style="green"))
    colours = {"works": "green", "absent": "yellow", "broken": "red"}
    for finding in report.findings:
        line = Text.assemble((f"{finding.state:8}", colours[finding.state]), f"{finding.name:15}{finding.found}")
        console.print(line.append(f"  ({finding.purpose})", style="dim"))
        if finding.fix:
            console.print(Text(f"{'':8}fix: {finding.fix}"))
    console.print("All required components work." if report.ok else "A required component does not work; see above.")
