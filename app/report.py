"""`outrider report`: benches one after another, each a command that anyone can give, and a page of what they found.

A section is a title, some words and the commands behind its tables; each command's JSON is kept beside the page, so
that a section can be measured again alone. Knows command lines and JSON; imports nothing heavy.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

_FREE = (
    "jacobi,prompt-lookup,input-guided,rest,anpd,n-grammys,lookahead,suffix,token-recycling,sparse-cache,ensemble,"
    "draft-model,specinfer,specexec,sequoia,cs-drafting,specdec-plus-plus,bild,on-the-fly-window,adaptive,guarded,"
    "draft-verify,swift,draft-on-the-fly,auto"
)
_OPTIONS = "--drafter-option rest.store={store} --drafter-option specexec.nodes=64"
_TRAINED = "draft-model,medusa,hydra,eagle3,dspark,kangaroo,suffix,ensemble"
_TREES = "--drafter-option medusa.nodes=16 --drafter-option hydra.nodes=16 --drafter-option eagle3.nodes=16"
_CURVES = "curves -o {folder}/curves.png"
_BUILD = "datastore build {python}/pydoc_data -o {store}"
_QUICK = 2  # prompts a command where somebody is in a hurry


@dataclass(frozen=True)
class Section:
    """Commands are what follows `outrider bench`; {prompts} is the file somebody gave, without which the section is
    left out, {store} a datastore in the page's {folder}, and {python} where Python's own library is."""

    name: str
    title: str
    about: str
    commands: tuple[str, ...]
    before: str = ""  # a command of outrider's that has to run first

    def files(self, folder: Path) -> list[Path]:
        if len(self.commands) == 1:
            return [folder / f"{self.name}.json"]
        return [folder / f"{self.name}-{number}.json" for number in range(1, len(self.commands) + 1)]


TEXT = (
    Section(
        "precision",
        "Fewer bits",
        "Perplexity and the likeliest token's agreement with 32 bits on the prompts' own text, beside the speed of "
        "plain decoding.",
        ("precision --limit 14",),
    ),
    Section(
        "batch",
        "A batch of eight",
        "Eight prompts of different lengths decoded side by side and one after another, in turns.",
        ("batch",),
    ),
    Section(
        "peers-bfloat16",
        "Beside other engines, 16 bits",
        "Greedy, the same prompts in the same run. OpenVINO GenAI reads the same GGUF in 4 bits.",
        ("text --drafters prompt-lookup,ensemble,auto --max-new-tokens 96 --limit 7 --peers",),
    ),
    Section(
        "peers-int4",
        "Beside other engines, 4 bits",
        "As above, ours in 4 bits.",
        ("text --dtype int4 --drafters prompt-lookup,ensemble,auto --max-new-tokens 96 --limit 7 --peers",),
    ),
    Section(
        "greedy",
        "Without training, greedy",
        "Every drafter that needs no training, and those that take the small draft model that ships. The datastore of "
        "`rest` is the language reference that Python brings along.",
        (f"text --drafters {_FREE} {_OPTIONS} --max-new-tokens 96 --limit 48 --calibrate sequoia,draft-verify",),
        _BUILD,
    ),
    Section(
        "sampled",
        "Without training, temperature 0.7",
        "The same, drawn; all of these keep the law of the output.",
        (f"text --drafters {_FREE} {_OPTIONS} --max-new-tokens 96 --limit 48 --temperature 0.7",),
        _BUILD,
    ),
    Section(
        "rules",
        "Relaxed rules for text, temperature 0.7",
        "These change the output's law; what they cost is in each trace (`relaxed price`).",
        tuple(
            f"text --drafters {drafter} --rule {rule} --max-new-tokens 96 --limit 48 --temperature 0.7"
            for drafter, rule in (("draft-model", "top-beta"), ("bild", "bild"), ("draft-model", "verify-every"))
        ),
    ),
    Section(
        "editing",
        "Editing",
        "Rewriting with small changes and correcting, where the output repeats the input.",
        ("text --tasks editing --drafters input-guided,prompt-lookup,suffix,ensemble --max-new-tokens 96",),
    ),
    Section(
        "given",
        "All tasks of a given set",
        "The best of those without training over a whole set of prompts, and the guard.",
        ("text --prompts {prompts} --drafters ensemble,suffix,auto,guarded --max-new-tokens 96",),
    ),
    Section(
        "trained",
        "Trained drafters",
        "Those whose weights ship, beside the best without training, over a whole set of prompts; and how often their "
        "guesses are right, by place in the draft, on answers that were held out of training.",
        (
            f"text --prompts {{prompts}} --drafters {_TRAINED} {_TREES} --max-new-tokens 96",
            f"text --prompts {{prompts}} --drafters {_TRAINED} {_TREES} --max-new-tokens 96 --temperature 1",
        ),
        _CURVES,
    ),
    Section(
        "crowd",
        "Batches of 1 to 32",
        "Requests that enter and leave a batch, twice as many as it has rows, plainly and with drafting.",
        (
            "crowd --max-new-tokens 32 --repeat 2",
            "crowd --dtype int4 --rows 1,8,32 --max-new-tokens 32 --repeat 2",
        ),
    ),
    Section(
        "quantised",
        "Drafting in fewer bits",
        "Plain decoding and drafters in 16, 8 and 4 bits; qspec drafts with the same weights in 4 bits.",
        (
            "text --drafters prompt-lookup,qspec,auto --max-new-tokens 64 --limit 7",
            "text --dtype int8 --drafters prompt-lookup,qspec,auto --max-new-tokens 64 --limit 7",
            "text --dtype int4 --drafters prompt-lookup,auto --max-new-tokens 64 --limit 7",
        ),
    ),
    Section(
        "offload",
        "Layers read from the disk",
        "So much of the layers stays in memory, and the rest is read in every pass; drafters stay.",
        ("offload --limit 2 --max-new-tokens 32 --repeat 2",),
    ),
    Section(
        "long",
        "Prompts of 6,000 and 8,000 tokens",
        "The source of Python's argparse before a question, over a cache of 16 and one of 8 bits; speeds are those "
        "behind the prompt. sparse-cache and triforce draft with a copy of part of the cache. 'As exact' is how much "
        "was decoded before it differs from plain decoding over the cache of 16 bits.",
        ("long --repeat 2",),
    ),
    Section(
        "larger",
        "A larger target",
        "Qwen2.5-Coder-1.5B-Instruct, for which leaving out layers, and a small model with another vocabulary, cost "
        "a smaller share of a pass.",
        (
            "text --model qwen2.5-coder-1.5b --dtype int8 --draft-model smollm2-135m --calibrate draft-verify "
            "--drafters cross-vocabulary,draft-verify,swift,draft-on-the-fly,ensemble --max-new-tokens 64 --limit 7",
        ),
    ),
)


def report(
    modality: Annotated[str, typer.Argument(metavar="MODALITY", help="text")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Default: reports/MODALITY.")] = None,
    only: Annotated[str, typer.Option(metavar="NAMES", help="These sections, with commas between them.")] = "",
    prompts: Annotated[
        Path | None, typer.Option(metavar="FILE", help="JSON lines: a set of your own, for the section 'given'.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help=f"{_QUICK} prompts a command.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Measure nothing; write the page anew.")] = False,
) -> None:
    """Measure a modality's sections, and write a page with every figure beside the command that found it."""
    from outrider.core.errors import unknown

    if modality != "text":
        raise unknown("modality with a report", modality, ("text",))
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {one.name: one for one in TEXT}
    for name in names:
        if name not in known:
            raise unknown("section", name, known)
    folder = out or Path("reports") / modality
    folder.mkdir(parents=True, exist_ok=True)
    places: dict[str, str | Path] = {"store": folder / "python.store", "python": sysconfig.get_path("stdlib")}
    places["folder"] = folder
    places |= {} if prompts is None else {"prompts": prompts}
    for one in TEXT if not page else ():
        wanted = not names or one.name in names
        if not wanted or (prompts is None and any("{prompts}" in command for command in one.commands)):
            continue
        if one.before:
            _call(_words(one.before, places))
        for command, file in zip(one.commands, one.files(folder), strict=True):
            words = _words(f"bench {command}", places)
            words = _hurried(words) if quick else words
            _call([*words, "--json", str(file)])
            _note(file, words)
    path = folder / "REPORT.md"
    path.write_text(written(folder), encoding="utf-8")
    print(path)


def _words(command: str, places: Mapping[str, str | Path]) -> list[str]:
    return shlex.split(command.format_map({name: shlex.quote(str(place)) for name, place in places.items()}))


def _call(words: Sequence[str]) -> None:
    from outrider.core.errors import OutriderError

    said = shlex.join(["outrider", *words])
    print(said, file=sys.stderr)
    called = [sys.executable, "-m", "outrider.app.cli", *words]
    if subprocess.run(called, stdout=subprocess.DEVNULL, check=False).returncode:
        raise OutriderError(f"`{said}` failed; what is measured so far is kept")


def _hurried(words: Sequence[str]) -> list[str]:
    kept = list(words)
    if "--limit" in kept:
        place = kept.index("--limit")
        del kept[place : place + 2]
    return [*kept, "--limit", str(_QUICK)]


def _note(file: Path, words: Sequence[str]) -> None:
    """The command goes into the file, and of where other files are only their names."""
    found = json.loads(file.read_text(encoding="utf-8"))
    said = ["outrider", *(re.sub(r"(?:/[^/=]+)+/", "", word) for word in words)]
    file.write_text(json.dumps(found | {"command": shlex.join(said)}, indent=1, ensure_ascii=False) + "\n", "utf-8")


def written(folder: Path) -> str:
    """The page of what a folder holds."""
    parts = ["# Text, measured\n"]
    described = False
    for section in TEXT:
        found = [json.loads(file.read_text(encoding="utf-8")) for file in section.files(folder) if file.is_file()]
        found = [one for one in found if "command" in one]
        if not found:
            continue
        if not described:
            parts.append(_place(found[0]) + "\n")
            described = True
        parts += [f"## {section.title}\n", section.about + "\n"]
        parts += [f"`{one['command']}`\n" for one in found]
        parts += _tables(found)
        if section.before == _CURVES and (folder / "curves.md").is_file():
            parts += ["![acceptance by place](curves.png)\n", (folder / "curves.md").read_text(encoding="utf-8")]
    return "\n".join(parts).rstrip() + "\n"


def _place(found: Mapping[str, Any]) -> str:
    machine = ", ".join(f"{key} {value}" for key, value in found["machine"].items() if value not in (None, "", []))
    versions = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)
    return (
        f"Machine: {machine}. Versions: {versions}.\n\n"
        "Speeds are medians over prompts; a speedup is the median of ratios to plain decoding in the same run, in "
        "turns, with a 95 % interval; passes/tok counts every pass of every model by the bytes it reads, a whole pass "
        "of the target being 1."
    )


def _tables(found: Sequence[Mapping[str, Any]]) -> list[str]:
    from outrider.app.bench_engine import lines as engine_lines
    from outrider.app.bench_views import COLUMNS, name_of, remarks

    first = found[0]["rows"][0]
    if "engine" in found[0]:
        return [_table(*engine_lines(one["rows"])) for one in found]
    if "perplexity" in first:
        rows = [
            [
                row["dtype"],
                f"{row['perplexity']:.2f}",
                f"{row['agreement']:.1%}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['slowest']:.0f}-{row['fastest']:.0f}",
            ]
            for row in found[0]["rows"]
        ]
        return [_table(("", "perplexity", "agrees", "tok/s", "slowest to fastest"), rows)]
    if "together" in first:
        rows = [
            [
                row["dtype"],
                row["drafter"],
                f"{row['together']:.0f}",
                f"{row['alone']:.0f}",
                f"{row['together'] / row['alone']:.2f}",
                f"{row['same']} of {row['rows']}",
            ]
            for row in found[0]["rows"]
        ]
        return [_table(("", "drafter", "tok/s in all", "one after another", "ratio", "same output"), rows)]
    reports = [one for one in found if one["rows"]]
    if len({one["settings"].get("dtype") for one in reports}) > 1:  # each beside a plain decoding of its own
        return [part for one in reports for part in (f"In {one['settings']['dtype']}:\n", *_tables([one]))]
    everyone = [row for number, one in enumerate(reports) for row in one["rows"][min(number, 1) :]]
    everyone += [row for one in reports for row in one["peers"]]
    parts = [_benched(everyone, name_of, COLUMNS)]
    looping = reports[0]["settings"].get("looping", [])
    without = [{**row, **row["without_looping"]} for row in everyone if row["without_looping"]]
    if looping and without:
        count = reports[0]["settings"]["prompts"]
        parts += [f"Without the {len(looping)} of {count} prompts on which plain decoding goes round in circles:\n"]
        parts.append(_benched(without, name_of, COLUMNS))
    tasks = sorted({task for row in everyone for task in row["tasks"]})
    if len(tasks) > 1:
        parts += ["By task, times plain decoding's tokens a second:\n", _by_task(everyone, tasks, name_of)]
    lines = [f"- {line.plain}" for one in reports for line in remarks(one)]
    return [*parts, *(["\n".join(lines) + "\n"] if lines else [])]


def _benched(rows: Sequence[Mapping[str, Any]], name: Any, columns: Mapping[str, Any]) -> str:
    titles = [title for title in columns if title != "quartiles"]
    body = [[_named(row, name), *(str(columns[title][0](row)) for title in titles)] for row in rows]
    return _table(("", *titles), body)


def _named(row: Mapping[str, Any], name: Any) -> str:
    return str(name(row)) if row["rule"] == "exact" or row["drafter"] == "plain" else f"{name(row)}, rule {row['rule']}"


def _by_task(rows: Sequence[Mapping[str, Any]], tasks: Sequence[str], name: Any) -> str:
    body = []
    for row in rows:
        parts = [row["tasks"].get(task) for task in tasks]
        body.append(
            [_named(row, name), *("-" if not one or not one["speedup"] else f"{one['speedup']:.2f}" for one in parts)]
        )
    return _table(("", *tasks), body)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(titles)} |", "|---|" + "---:|" * (len(titles) - 1)]
    lines += [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join(lines) + "\n"
