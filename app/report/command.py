"""`outrider report`: benches one after another, each a command that anyone can give, and a page of what they found.

Each command's JSON is kept beside the page, so that a section can be measured again alone. What has no weights yet is
left out, and the page says what trains it. Knows command lines and files; imports nothing heavy.
"""

from __future__ import annotations

import json
import platform
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

from outrider.app.report.sections import SECTIONS, Section
from outrider.app.report.weights import recipe_of, untrained

ALL = "all"
_QUICK = {"--limit": 2, "--pictures": 2, "--max-new-tokens": 32}  # where somebody is in a hurry
_COUNTS = ("--limit", "--pictures")
_IN_A_HURRY = Path("build/report-quick")
_PRODUCTS = {"amx_bf16": "AMX", "avx512_bf16": "AVX-512 BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
_ROOT = Path(__file__).resolve().parents[2]


def report(
    modality: Annotated[str, typer.Argument(metavar="MODALITY", help="text, image, speech, or all of them.")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help=f"Default: reports/MODALITY; of all: here, or {_IN_A_HURRY} if --quick."),
    ] = None,
    only: Annotated[str, typer.Option(metavar="NAMES", help="These sections, with commas between them.")] = "",
    prompts: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="JSON lines: a set of your own, for the sections of text on one."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help=f"{_QUICK['--limit']} prompts a command; of all, the main sections alone.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what was measured by this command at this commit already.")
    ] = False,
    page: Annotated[bool, typer.Option("--page", help="Measure nothing; write the page anew.")] = False,
) -> None:
    """Measure a modality's sections, and write a page with every figure beside the command that found it."""
    from outrider.app.report import pages
    from outrider.core.errors import OutriderError, unknown

    if modality not in (*SECTIONS, ALL):
        raise unknown("modality with a report", modality, (*SECTIONS, ALL))
    asked = tuple(SECTIONS) if modality == ALL else (modality,)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {one.name for name in asked for one in SECTIONS[name]}
    for name in names:
        if name not in known:
            raise unknown("section", name, known)
    base = out or (_IN_A_HURRY if quick else Path())
    failed: list[str] = []
    try:
        for one in asked:
            folder = base / "reports" / one if modality == ALL else out or Path("reports") / one
            folder.mkdir(parents=True, exist_ok=True)
            for section in SECTIONS[one] if not page else ():
                if section.name in names or not (names or (quick and modality == ALL and not section.quick)):
                    failed += _measured(one, section, folder, prompts, quick, resume)
            path = folder / "REPORT.md"
            path.write_text(pages.written(folder, one), encoding="utf-8")
            print(path)
    finally:
        if modality == ALL:
            print(pages.write_all(base, _goals(base / "reports")))
    if failed:
        raise OutriderError(f"{' and '.join(f'`{one}`' for one in failed)} failed; all else is measured")


def _goals(folder: Path) -> str:
    """Where the results in a folder miss the project's goals, which only a checkout has."""
    script = _ROOT / "reports" / "goals.py"
    if not script.is_file():
        return ""
    command = [sys.executable, "-P", str(script), str(folder)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def _measured(
    modality: str, section: Section, folder: Path, prompts: Path | None, quick: bool, resume: bool
) -> list[str]:
    """Run a section's commands; those that failed."""
    if prompts is None and any("{prompts}" in command for command in section.commands):
        return []
    if lacking := untrained(modality, section.needs):
        print(f"{modality}, {section.name}: outrider train {' '.join(lacking)}", file=sys.stderr)
        return []
    places: dict[str, str | Path] = {"store": folder / "python.store", "python": sysconfig.get_path("stdlib")}
    places |= {"folder": folder} | ({} if prompts is None else {"prompts": prompts})
    prepared = not section.before
    failed = []
    for command, file in zip(section.commands, section.files(folder), strict=True):
        words = _possible(modality, _words(f"bench {command}", places))
        if not words:
            continue
        words = hurried(words) if quick else words
        facts = {"command": _told(words), "commit": commit()}
        if resume and facts["commit"] and _same(file, facts):
            continue
        if not prepared and not _call(_words(section.before, places)):
            return [_told(_words(section.before, places))]
        prepared = True
        began = time.monotonic()
        if _call([*words, "--json", str(file)]):
            seconds = round(time.monotonic() - began)
            _note(file, facts | {"seconds": seconds, "date": f"{datetime.now(UTC):%Y-%m-%d}", "cpu": processor()})
        else:
            failed.append(_told(words))
    return failed


def _possible(modality: str, words: Sequence[str]) -> list[str]:
    """A command without the drafters that have no weights; nothing if none is left."""
    if "--drafters" not in words or "--model" in words:
        return list(words)
    place = words.index("--drafters") + 1
    names = words[place].split(",")
    needed = {name: recipe_of(modality, name) for name in names}
    lacking = set(untrained(modality, sorted({one for one in needed.values() if one})))
    gone = {name for name, recipe in needed.items() if recipe in lacking}
    kept = [name for name in names if name not in gone]
    if not kept:
        return []
    found = list(words)
    found[place] = ",".join(kept)
    for at in reversed(range(len(found) - 1)):
        if found[at] == "--drafter-option" and found[at + 1].partition(".")[0] in gone:
            del found[at : at + 2]
        elif found[at] == "--calibrate":
            found[at + 1] = ",".join(name for name in found[at + 1].split(",") if name not in gone)
    return found


def _words(command: str, places: Mapping[str, str | Path]) -> list[str]:
    return shlex.split(command.format_map({name: shlex.quote(str(place)) for name, place in places.items()}))


def _call(words: Sequence[str]) -> bool:
    print(shlex.join(["outrider", *words]), file=sys.stderr)
    called = [sys.executable, "-m", "outrider.app.cli", *words]
    return subprocess.run(called, stdout=subprocess.DEVNULL, check=False).returncode == 0


def hurried(words: Sequence[str]) -> list[str]:
    """The command with fewer prompts, or pictures, and shorter answers."""
    kept = list(words)
    for option, few in _QUICK.items():
        if option in kept:
            at = kept.index(option) + 1
            kept[at] = str(min(few, int(kept[at])))
    if not any(option in kept for option in _COUNTS):
        option = "--pictures" if "image" in kept[:2] else "--limit"
        kept += [option, str(_QUICK[option])]
    return kept


def _told(words: Sequence[str]) -> str:
    """The command as it is written down: of where files are, only their names."""
    return shlex.join(["outrider", *(re.sub(r"(?:/?[^/=]+)?(?:/[^/=]+)*/", "", word) for word in words)])


def _same(file: Path, facts: Mapping[str, str]) -> bool:
    if not file.is_file():
        return False
    found = json.loads(file.read_text(encoding="utf-8"))
    return all(found.get(name) == fact for name, fact in facts.items())


def _note(file: Path, facts: Mapping[str, object]) -> None:
    found = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**found, **facts}, indent=1, ensure_ascii=False) + "\n", "utf-8")


def commit() -> str:
    """What was measured: the commit of the checkout, with a word if files differ from it; nothing without git."""

    def git(*words: str) -> str:
        try:
            done = subprocess.run(["git", *words], cwd=_ROOT, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        return done.stdout.strip() if done.returncode == 0 else ""

    head = git("rev-parse", "--short=10", "HEAD") if (_ROOT / ".git").exists() else ""
    code = ("core", "modalities", "app", "pyproject.toml")
    return f"{head} with changes" if head and git("status", "--porcelain", "-uno", "--", *code) else head


def processor() -> str:
    """Its name, as the system has it, and the widest products that it can do."""
    try:
        said = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor()
    named, flags = (re.search(rf"^{key}\s*:\s*(.+)$", said, re.MULTILINE) for key in ("model name", "flags"))
    there = flags[1].split() if flags else ()
    widest = next((f" with {words}" for flag, words in _PRODUCTS.items() if flag in there), "")
    return (named[1].strip() if named else platform.processor()) + widest
