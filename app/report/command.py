"""`outrider report`: runs the benchmark commands of a modality and writes a page with their results.

The JSON of each command is kept beside the page, so that a section can be measured again by itself. Drafters without
weights are left out, and the page names the recipe that trains them. Imports nothing heavy.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from outrider.app.report.sections import BENCH, REPORTS, SECTIONS, Section
from outrider.app.report.weights import recipe_of, untrained
from outrider.core.assets.files import write_atomically
from outrider.core.bench.processor import processor

ALL = "all"
_QUICK = {"--num-prompts": 2, "--max-new-tokens": 32}  # the largest values of options under --quick
_QUICK_FOLDER = Path("build/report-quick")
_ROOT = Path(__file__).resolve().parents[2]


def report(
    modality: Annotated[str, typer.Argument(metavar="MODALITY", help="text, image, speech, all of these, or gpu.")],
    output_dir: Annotated[
        Path | None,
        typer.Option(
            "--output-dir",
            "-o",
            metavar="DIR",
            help=f"The folder of the report. Default: reports/MODALITY; for all: this folder, or {_QUICK_FOLDER} with "
            "--quick.",
        ),
    ] = None,
    only: Annotated[str, typer.Option(metavar="NAMES", help="Measure these sections only; comma-separated.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines with your own prompts, for the text sections that need them."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help=f"Measure {_QUICK['--num-prompts']} prompts per command; with all, only the sections marked quick.",
        ),
    ] = False,
    device: Annotated[str, typer.Option(help="The device that the gpu report measures.")] = "cuda",
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip commands that this commit has already measured.")
    ] = False,
    page_only: Annotated[
        bool, typer.Option("--page-only", help="Measure nothing; write the page again from existing results.")
    ] = False,
) -> None:
    """Run the benchmarks of a modality, and write a page with every figure under the command that measured it."""
    from outrider.app.report import pages
    from outrider.core.errors import OutriderError, unknown

    if modality not in (*REPORTS, ALL):
        raise unknown("report", modality, (*REPORTS, ALL))
    modalities = tuple(SECTIONS) if modality == ALL else (modality,)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {section.name for name in modalities for section in REPORTS[name]}
    for name in names:
        if name not in known:
            raise unknown("section", name, known)
    base = output_dir or (_QUICK_FOLDER if quick else Path())
    failed: list[str] = []
    try:
        for name in modalities:
            folder = base / "reports" / name if modality == ALL else output_dir or Path("reports") / name
            folder.mkdir(parents=True, exist_ok=True)
            for section in REPORTS[name] if not page_only else ():
                if quick and section.verb != BENCH:  # training, which has no quick form
                    continue
                if section.name in names or not (names or (quick and modality == ALL and not section.quick)):
                    failed += _measure(name, section, folder, prompts, quick, resume, device)
            path = folder / "REPORT.md"
            write_atomically(path, pages.modality_page(folder, name))
            print(path)
    finally:
        if modality == ALL:
            print(pages.write_summary(base, _goals(base / "reports")))
    if failed:
        commands = " and ".join(f"`{command}`" for command in failed)
        raise OutriderError(f"{commands} failed; the lines above say why. The other commands are in the report")


def _goals(folder: Path) -> str:
    """The Markdown list of the project's goals that the results in a folder miss; empty outside a checkout."""
    script = _ROOT / "reports" / "goals.py"
    if not script.is_file():
        return ""
    command = [sys.executable, "-P", str(script), str(folder)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _measure(
    modality: str, section: Section, folder: Path, prompts: Path | None, quick: bool, resume: bool, device: str
) -> list[str]:
    """Run a section's commands, and return those that failed."""
    if prompts is None and any("{prompts}" in command for command in section.commands):
        return []
    if missing := untrained(modality, section.needs):
        print(f"{modality}, {section.name}: skipped; first `outrider train {' '.join(missing)}`", file=sys.stderr)
        return []
    places: dict[str, str | Path] = {"store": folder / "python.store", "python": sysconfig.get_path("stdlib")}
    places |= {"folder": folder, "device": device}
    if prompts is not None:
        places["prompts"] = prompts
    prepared = not section.before
    failed = []
    for command, file in zip(section.commands, section.files(folder), strict=True):
        words = _without_untrained(modality, _words(f"{section.verb} {command}", places))
        if not words:
            continue
        words = shortened(words) if quick else words
        facts = {"command": _anonymous(words), "commit": commit()}
        if resume and facts["commit"] and _has(file, facts):
            continue
        if not prepared and not _call(_words(section.before, places)):
            return [_anonymous(_words(section.before, places))]
        prepared = True
        began = time.monotonic()
        if _call([*words, "--json", str(file)]):
            seconds = round(time.monotonic() - began)
            _add(file, facts | {"seconds": seconds, "date": f"{datetime.now(UTC):%Y-%m-%d}", "cpu": processor()})
        else:
            failed.append(_anonymous(words))
    return failed


def _without_untrained(modality: str, words: Sequence[str]) -> list[str]:
    """A command without the drafters whose weights are missing; empty if no drafter remains."""
    if "--drafters" not in words or "--model" in words:
        return list(words)
    at = words.index("--drafters") + 1
    names = words[at].split(",")
    recipes = {name: recipe_of(modality, name) for name in names}
    missing = set(untrained(modality, sorted({recipe for recipe in recipes.values() if recipe})))
    removed = {name for name, recipe in recipes.items() if recipe in missing}
    remaining = [name for name in names if name not in removed]
    if not remaining:
        return []
    result = list(words)
    result[at] = ",".join(remaining)
    for i in reversed(range(len(result) - 1)):
        if result[i] == "--drafter-option" and result[i + 1].partition(".")[0] in removed:
            del result[i : i + 2]
        elif result[i] == "--calibrate":
            result[i + 1] = ",".join(name for name in result[i + 1].split(",") if name not in removed)
    return result


def _words(command: str, places: Mapping[str, str | Path]) -> list[str]:
    return shlex.split(command.format_map({name: shlex.quote(str(place)) for name, place in places.items()}))


def _call(words: Sequence[str]) -> bool:
    print(shlex.join(["outrider", *words]), file=sys.stderr)
    command = [sys.executable, "-m", "outrider.app.cli", *words]
    return subprocess.run(command, stdout=subprocess.DEVNULL, check=False).returncode == 0


def shortened(words: Sequence[str]) -> list[str]:
    """The command with at most the prompts or images and new tokens of _QUICK."""
    result = list(words)
    for option, limit in _QUICK.items():
        if option in result:
            at = result.index(option) + 1
            result[at] = str(min(limit, int(result[at])))
    if "--num-prompts" not in result:
        result += ["--num-prompts", str(_QUICK["--num-prompts"])]
    return result


def _anonymous(words: Sequence[str]) -> str:
    """The command with the folders removed from its paths, for the report."""
    return shlex.join(["outrider", *(re.sub(r"(?:/?[^/=]+)?(?:/[^/=]+)*/", "", word) for word in words)])


def _has(file: Path, facts: Mapping[str, str]) -> bool:
    """Whether a JSON file exists and contains these facts."""
    if not file.is_file():
        return False
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:
        return False
    return isinstance(result, dict) and all(result.get(name) == fact for name, fact in facts.items())


def _add(file: Path, facts: Mapping[str, object]) -> None:
    result = json.loads(file.read_text(encoding="utf-8"))
    write_atomically(file, json.dumps({**result, **facts}, indent=1, ensure_ascii=False) + "\n")


def commit() -> str:
    """The commit of the checkout, marked if tracked code differs from it; empty without git."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=10", "HEAD") if (_ROOT / ".git").exists() else ""
    code = ("core", "modalities", "app", "pyproject.toml")
    return f"{head} with changes" if head and git("status", "--porcelain", "-uno", "--", *code) else head
