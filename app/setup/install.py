"""Installation, run by `make` with the Python of a new .venv; standard library only, since nothing is installed yet.

Installs a torch build that suits the machine, unless a recent enough one is present, then Outrider in editable mode
with the given extras and the versions in constraints.txt, and finally runs `outrider doctor --fix`.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CPU_INDEX = "https://download.pytorch.org/whl/cpu"


@dataclass(frozen=True)
class Attempt:
    """One way to install torch: the line to print, and the arguments of pip."""

    message: str
    arguments: tuple[str, ...]


def attempts(version: str, system: str, gpus: int) -> list[Attempt]:
    """The ways to install torch, best first. On Linux the default build contains gigabytes of CUDA libraries, so that
    machines without a GPU try the CPU builds first."""
    plain = Attempt(f"torch {version}", (f"torch=={version}",))
    if gpus or system != "Linux":
        return [plain]
    cpu = ("--no-deps", f"torch=={version}+cpu")
    return [
        Attempt(f"torch {version} for CPUs, from pip's default index", cpu),
        Attempt(
            f"torch {version} for CPUs, from PyTorch's own index",
            ("--timeout=10", "--retries=1", f"--index-url={CPU_INDEX}", *cpu),
        ),
        Attempt(f"torch {version} with CUDA (large), because no CPU build could be downloaded", plain.arguments),
    ]


def nvidia_gpus() -> list[str]:
    """The names of the NVIDIA GPUs that the driver lists; empty without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listing.stdout, re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version without its build suffix: 2.13.0+cpu is (2, 13, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def torch_here() -> str | None:
    """The version of torch in this environment, or None if it is missing or older than pyproject.toml requires."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floor = next(line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return version if release(version) >= release(floor) else None


def pinned(constraints: str, name: str) -> str:
    match = re.search(rf"^{name}==(\S+)", constraints, re.MULTILINE)
    if match is None:
        raise SystemExit(f"constraints.txt has no line '{name}==VERSION'; add one and run make again")
    return match[1]


def keeping(constraints: str, torch: str) -> str:
    """The constraints with torch pinned to the installed version, so that pip does not replace it."""
    return re.sub(r"^torch==\S+", f"torch=={torch.partition('+')[0]}", constraints, flags=re.MULTILINE)


def pip(*arguments: str, quiet: bool = False) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False).returncode == 0


def install_torch(version: str) -> None:
    *preferred, fallback = attempts(version, platform.system(), len(nvidia_gpus()))
    for attempt in preferred:
        print(f"==> {attempt.message}", flush=True)
        if pip(*attempt.arguments, quiet=True):
            return
    print(f"==> {fallback.message}", flush=True)
    if not pip(*fallback.arguments):
        raise SystemExit("pip could not install torch, which Outrider needs; see pip's last lines above.")


def main(extras: str) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    torch = torch_here()
    if torch is None:
        install_torch(pinned(constraints, "torch"))
        torch = metadata.version("torch")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "constraints.txt"
        pins.write_text(keeping(constraints, torch), encoding="utf-8")
        print(f"==> Outrider with {extras}", flush=True)
        if not pip("--editable", f"{ROOT}[{extras}]", "--constraint", str(pins)):
            raise SystemExit(
                "pip could not install Outrider's dependencies; see pip's last lines above, then run make."
            )
    raise SystemExit(
        subprocess.run([sys.executable, "-P", "-m", "outrider.app.cli", "doctor", "--fix"], check=False).returncode
    )


if __name__ == "__main__":
    main(sys.argv[1])
