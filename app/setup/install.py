"""Set-up, run by `make` with the Python of a new .venv: standard library only, for nothing is installed yet.

Brings a torch that fits the machine, then Outrider in place with the extras named, as constraints.txt pins them, and
mends what can't be imported. A torch that is there already and new enough is left alone.
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
    """One place to take torch from; all but the last may fail quietly."""

    says: str
    arguments: tuple[str, ...]


def attempts(version: str, system: str, gpus: int) -> list[Attempt]:
    """Where to look for torch, best first: on Linux the default build is gigabytes of CUDA, of no use without a GPU."""
    plain = Attempt(f"torch {version}", (f"torch=={version}",))
    if gpus or system != "Linux":
        return [plain]
    cpu = ("--no-deps", f"torch=={version}+cpu")
    return [
        Attempt(f"torch {version} for CPUs, where pip looks by default", cpu),
        Attempt(
            f"torch {version} for CPUs, from PyTorch's own index",
            ("--timeout=10", "--retries=1", f"--index-url={CPU_INDEX}", *cpu),
        ),
        Attempt(
            f"torch {version} with CUDA (large, and of no use here): no build for CPUs can be reached", plain.arguments
        ),
    ]


def nvidia_gpus() -> list[str]:
    """The names of the NVIDIA GPUs that the driver lists; none without a driver."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    listing = subprocess.run([tool, "-L"], capture_output=True, text=True, check=False)
    return re.findall(r"^GPU \d+: (.+?) \(UUID", listing.stdout, re.MULTILINE)


def release(version: str) -> tuple[int, ...]:
    """The numbers of a version, without what marks the build: 2.13.0+cpu is (2, 13, 0)."""
    numbers = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(number) for number in numbers[0].split(".")) if numbers else ()


def torch_here() -> str | None:
    """The version of torch in this environment if it is one Outrider can use."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    floor = next(line.removeprefix("torch>=") for line in project["dependencies"] if line.startswith("torch>="))
    try:
        version = metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
    return version if release(version) >= release(floor) else None


def pinned(constraints: str, name: str) -> str:
    found = re.search(rf"^{name}==(\S+)", constraints, re.MULTILINE)
    if found is None:
        raise SystemExit(f"constraints.txt doesn't pin {name}")
    return found[1]


def keeping(constraints: str, torch: str) -> str:
    """The constraints with torch pinned to the version that is here, so that pip doesn't replace it."""
    return re.sub(r"^torch==\S+", f"torch=={torch.partition('+')[0]}", constraints, flags=re.MULTILINE)


def pip(*arguments: str, quiet: bool = False) -> bool:
    command = [sys.executable, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, stderr=subprocess.DEVNULL if quiet else None, check=False).returncode == 0


def install_torch(version: str) -> None:
    *quiet, last = attempts(version, platform.system(), len(nvidia_gpus()))
    for attempt in quiet:
        print(f"==> {attempt.says}", flush=True)
        if pip(*attempt.arguments, quiet=True):
            return
    print(f"==> {last.says}", flush=True)
    if not pip(*last.arguments):
        raise SystemExit("Outrider needs torch, and pip could not install it: its last lines above say why.")


def main(extras: str) -> None:
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    here = torch_here()
    if here is None:
        install_torch(pinned(constraints, "torch"))
        here = metadata.version("torch")
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder) / "constraints.txt"
        pins.write_text(keeping(constraints, here), encoding="utf-8")
        print(f"==> Outrider with {extras}", flush=True)
        if not pip("--editable", f"{ROOT}[{extras}]", "--constraint", str(pins)):
            raise SystemExit(
                "pip could not install what Outrider needs: its last lines above say why. Then make it again."
            )
    raise SystemExit(
        subprocess.run([sys.executable, "-P", "-m", "outrider.app.cli", "doctor", "--mend"], check=False).returncode
    )


if __name__ == "__main__":
    main(sys.argv[1])
