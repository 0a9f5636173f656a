"""Builds the wheel, installs it into empty environments, without extras and with each, and uses it from another folder.

    python tests/wheels.py [EXTRA ...]

Without an extra what needs it must name it; with it the same must work. The environment without extras takes minutes
and 2 GB, in a temporary folder; each extra has an environment of its own on top of it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NONE = "none"
PLAIN = """
import outrider.app.cli, outrider.image, outrider.speech, outrider.text
from outrider.core.decode import decode
from outrider.core.methods import make_drafter, make_rule
from outrider.core.testing.table_target import TableTarget
target = TableTarget(9, seed=1)
steps = list(decode(target, make_drafter("prompt-lookup"), make_rule("exact"), [[1, 2, 1, 2]], max_new_tokens=20))
assert sum(len(step.emitted) for step in steps) == 20
"""
USES = {  # what needs the packages of an extra: it names the extra if they are missing
    "app": "from outrider.app.cli import main; import sys; sys.argv = ['outrider', 'demo', '--no-browser']; main()",
    "bench": "from outrider.app.bench.plots import check; check()",
    "train": "from outrider.core.training.optim import check_accelerate; check_accelerate()",
    "retrieval": "from outrider.text.rag.retrievers import retriever; retriever('bm25', ['red fox', 'blue whale'])",
    "search": "from outrider.core.drafters.self_speculative.layer_search import searcher; searcher()",
    "structured": "from outrider.text.structured.grammar import _library; _library()",
    "speech": "from outrider.speech.hub.orpheus import Orpheus; Orpheus.open_codec(None, 'x', None)",
    "teacher": "from outrider.speech.training.kokoro import Kokoro; Kokoro()",
    "live": "from outrider.core.engine.quantization.onnx_graph import require; require()",
    "judges": "from outrider.speech.evaluation.opus import library; library()",
}
IMPORTED = {  # instead, with the extra: what has no such message, serves until it is stopped or fetches weights
    "app": "import outrider.app.page.app",
    "speech": "import snac; from outrider.speech.phonemes import hibari; assert hibari() is not None",
    "teacher": "import onnx, onnxruntime",
    "notebooks": "import jupyterlab, ipywidgets, nbclient, matplotlib, outrider.app.lessons",
    "docs": "import mkdocs, material, mkdocstrings",
    "dev": "import pytest, hypothesis, mypy",
    "cuda": "import torchao",
}


def run(*command: str | Path, cwd: Path, check: bool = True) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HOME": str(cwd), "OUTRIDER_CACHE": str(cwd / "cache"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, capture_output=True, text=True, check=False, env=environment
    )
    if check and done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
    return done.stdout + done.stderr


class Environment:
    """An empty environment with the wheel; on top of another one, whose packages it sees."""

    def __init__(self, folder: Path, below: Environment | None = None) -> None:
        run(sys.executable, "-m", "venv", folder, cwd=folder.parent)
        self.folder, self.python = folder, folder / "bin" / "python"
        (self.packages,) = folder.glob("lib/python3*/site-packages")
        if below is not None:
            (self.packages / "below.pth").write_text(f"{below.packages}\n", encoding="utf-8")

    def install(self, *wanted: str | Path) -> None:
        run(self.python, "-m", "pip", "install", "--quiet", *wanted, cwd=self.folder)

    def use(self, code: str, *, check: bool = True) -> str:
        with tempfile.TemporaryDirectory() as elsewhere:
            return run(self.python, "-c", code, cwd=Path(elsewhere), check=check)


def wheel(folder: Path, *options: str) -> Path:
    """The wheel of the files that git knows, built with these options of pip."""
    source = folder / "source"
    for name in run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", *options, "-w", folder, source, cwd=folder)
    shutil.rmtree(source)
    (built,) = folder.glob("outrider-*.whl")
    return built


def main(names: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = list(project["optional-dependencies"])
    assert set(extras) == USES.keys() | IMPORTED.keys(), "an extra has no use"
    sys.path.insert(0, str(ROOT / "app" / "setup"))
    from install import attempts, keeping, nvidia_gpus, pinned  # type: ignore[import-not-found]

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        built, constraints = wheel(folder), (ROOT / "constraints.txt").read_text(encoding="utf-8")
        base = Environment(folder / NONE)
        version = pinned(constraints, "torch")
        ways = [attempt.arguments for attempt in attempts(version, "Linux", len(nvidia_gpus()))]
        while True:
            try:
                base.install(*ways.pop(0))
                break
            except SystemExit:
                if not ways:
                    raise
        pins = folder / "constraints.txt"
        pins.write_text(keeping(constraints, version), encoding="utf-8")
        base.install(built, "--constraint", pins)
        run(base.folder / "bin" / "outrider", "doctor", "--fix", cwd=folder)
        base.use(PLAIN)
        assert "suffix" in run(base.folder / "bin" / "outrider", "methods", cwd=folder)
        print("without extras: installed, used from another folder", flush=True)
        for extra, code in USES.items():
            if not names or extra in names:
                said = base.use(code, check=False)
                assert f"[{extra}]" in said, f"{extra} is not named by what needs it: {said[-500:]}"
                print(
                    f"without {extra}: {next(line for line in said.splitlines() if f'[{extra}]' in line)}", flush=True
                )
        for extra in names or extras:
            made = Environment(folder / extra, base)
            made.install(f"{built}[{extra}]", "--constraint", pins)
            made.use(PLAIN)
            made.use(IMPORTED.get(extra) or USES[extra])
            shutil.rmtree(made.folder)
            print(f"with {extra}: works", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
