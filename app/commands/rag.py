"""`outrider rag` and `outrider bench rag`: questions answered from documents, and what speculating on lookups saves.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

_WIDTH = 140  # of the table; a narrower terminal wraps its lines
Documents = Annotated[str, typer.Option(help="named-things, speeches, or a file or folder of text.")]
Stride = Annotated[int, typer.Option(min=1, help="Tokens between two lookups.")]
Window = Annotated[int, typer.Option(min=1, help="Tokens that are looked up.")]
Model = Annotated[str, typer.Option(help="A name, a hub id, a folder or a GGUF file.")]
Small = Annotated[
    str | None, typer.Option(metavar="NAME", help="Who drafts for speculative-rag, or NAME:DTYPE; left out: the model.")
]
Dtype = Annotated[str, typer.Option(help="float32, bfloat16, float16, int8 or int4.")]


def rag(
    question: Annotated[str, typer.Argument(help="What to ask.")],
    method: Annotated[
        str, typer.Option(help="iterative, ralm-spec, rag or speculative-rag; see `outrider methods`.")
    ] = "ralm-spec",
    documents: Documents = "named-things",
    retriever: Annotated[str, typer.Option(help="dense, dense-approximate or bm25.")] = "dense",
    ahead: Annotated[
        int | None, typer.Option(min=1, help="Lookups speculated before they are verified; left out: scheduled.")
    ] = None,
    overlap: Annotated[bool, typer.Option("--overlap", help="Verify while writing on.")] = False,
    drafter: Annotated[
        str | None, typer.Option(help="Who drafts tokens between lookups; one of `outrider methods`.")
    ] = None,
    stride: Stride = 4,
    window: Window = 32,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="At most so many.")] = 64,
    model: Model = "smollm2-135m",
    small: Small = None,
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option(help="The same seed gives the same answer.")] = 0,
) -> None:
    """Answer a question from documents, with lookups or whole drafts speculated on."""
    from outrider.text.rag.methods import Answerer, AnswerMethod
    from outrider.text.rag.ralm import Speculation

    how = Speculation(ahead=ahead, overlap=overlap) if method == "ralm-spec" else None
    way = AnswerMethod(method=method, how=how, drafter=drafter)
    lm, drafting, store = _ready(model, small, dtype, documents, retriever)
    one = Answerer(lm, store, small=drafting, max_new_tokens=max_new_tokens, stride=stride, window=window, seed=seed)
    said = one.answer(way, question)
    print(said.text)
    looked = said.lookups
    line = f"{looked.calls} calls of the store with {looked.queries} lookups"
    if method == "ralm-spec":
        line += f"; {looked.right} of {looked.guesses} guesses right, {looked.taken_back} tokens taken back"
    print(line, file=sys.stderr)
    for number in dict.fromkeys(said.documents):
        print(f"- {store.passages[number]}", file=sys.stderr)


def bench_rag(
    questions: Annotated[
        Path | None, typer.Option(help="JSON lines with `question` and `answers`; left out: fifty of our own.")
    ] = None,
    documents: Documents = "named-things",
    retrievers: Annotated[str, typer.Option(help="Names with commas between them.")] = "dense,dense-approximate,bm25",
    methods: Annotated[
        str, typer.Option(help="Of iterative, ralm-spec, rag and speculative-rag.")
    ] = "iterative,ralm-spec,rag,speculative-rag",
    limit: Annotated[int | None, typer.Option(min=1, help="So many questions only.")] = None,
    stride: Stride = 4,
    window: Window = 32,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="For each question.")] = 48,
    model: Model = "smollm2-135m",
    small: Small = None,
    dtype: Dtype = "bfloat16",
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    times: Annotated[bool, typer.Option(help="Show seconds and speedups, which want a quiet machine.")] = True,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write everything there; - is stdout.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of all JSON files in its folder.")
    ] = None,
) -> None:
    """Lookups, calls of the store and right answers, with and without speculation; is RaLMSpec's output the same?"""
    from rich.console import Console

    from outrider.app.bench.progress import bar
    from outrider.text.rag.documents import questions as asked
    from outrider.text.rag.methods import METHODS, WAYS, Answerer, Measured, report
    from outrider.text.rag.retrievers import RETRIEVERS

    names = _names(methods, "method", METHODS)
    ways = [way for way in WAYS if way.method in names]
    items = asked(questions, limit)
    console = Console(stderr=True, highlight=False)
    lm = drafting = None
    measured: list[Measured] = []
    for name in _names(retrievers, "retriever", RETRIEVERS):
        lm, drafting, store = _ready(model, small, dtype, documents, name, lm, drafting)
        settings = {"max_new_tokens": max_new_tokens, "stride": stride, "window": window, "seed": seed}
        one = Measured(Answerer(lm, store, small=drafting, **settings), items, ways)
        measured.append(one)
        try:
            with bar(console, len(items) * len(ways), store.name) as step:
                for way in one.go():
                    step(way)
        except KeyboardInterrupt:
            console.print("Stopped: this is what is done.")
            break
    about = {"documents": documents, "questions_from": str(questions) if questions else "built in"}
    found = report(measured, {**about, "passages": len(measured[0].answerer.retriever.passages), "timed": times})
    text = json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)
    if json_file is not None and str(json_file) == "-":
        print(text)
        return
    console = Console(highlight=False)
    (console if console.width >= _WIDTH else Console(width=_WIDTH, highlight=False)).print(_drawn(found, times))
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    if page is not None:
        page.write_text(written(page.parent), encoding="utf-8")


def _names(given: str, what: str, known: Mapping[str, Any]) -> list[str]:
    from outrider.core.errors import unknown

    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown(what, name, known)
    return names


def _ready(
    model: str, small: str | None, dtype: str, documents: str, retriever: str, lm: Any = None, drafting: Any = None
) -> tuple[Any, Any, Any]:
    """The large model, the small one, and documents to look up; models that are loaded already stay."""
    from rich.console import Console

    from outrider import text
    from outrider.text.drafter_inputs import companion
    from outrider.text.rag.documents import documents as read
    from outrider.text.rag.retrievers import retriever as make

    with Console(stderr=True).status(f"Reading {documents} ...") as status:
        store = make(retriever, read(documents))
        if lm is None:
            status.update(f"Loading {model} ...")
            lm = text.load(model, dtype=dtype)
        if drafting is None:
            drafting = companion(lm, small) if small else lm
    return lm, drafting, store


COLUMNS = ("questions", "same", "right", "calls", "lookups", "guessed right", "taken back", "tokens a call", "read")


def cells(row: Mapping[str, Any], times: bool) -> list[str]:
    """One row of the table."""
    looked = row["lookups"]
    guesses = looked["guesses"]
    parts = [
        str(row["questions"]),
        "-" if row["identical"] is None else str(row["identical"]),
        str(row["correct"]),
        str(looked["calls"]),
        str(looked["queries"]),
        f"{looked['right'] / guesses:.0%}" if guesses else "-",
        f"{looked['taken_back'] / row['tokens']:.1%}" if guesses else "-",
        "-" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}",
        f"{row['read']:.0f}" if row["read"] else "-",
    ]
    if times:
        parts += [f"{row['seconds']:.2f}", "-" if row["speedup"] is None else f"{row['speedup']:.2f}"]
    return parts


def command(found: Mapping[str, Any]) -> str:
    """What measures the same again."""
    from inspect import signature

    settings, rows = found["settings"], found["rows"]
    asked = {name: settings[name] for name in ("documents", "stride", "window", "max_new_tokens", "model", "dtype")}
    asked |= {"seed": settings["seed"]}
    for name in ("retriever", "method"):
        asked[f"{name}s"] = ",".join(dict.fromkeys(row[name] for row in rows))
    if settings["small"] != f"{settings['model']}:{settings['dtype']}":
        asked["small"] = settings["small"]
    if settings["questions_from"] != "built in":
        asked["questions"] = settings["questions_from"]
    usual = signature(bench_rag).parameters
    words = ["outrider", "bench", "rag", *(() if settings["timed"] else ("--no-times",))]
    for name, value in asked.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value != usual[name].default else []
    return shlex.join(words)


def written(folder: Path) -> str:
    """The page of what a folder holds."""
    parts = ["# Answers from documents, measured\n"]
    parts.append(
        "`same`: answers that are, token for token and document for document, those of looking up each time. `calls`: "
        "of the store, each with one lookup or several. `right`: answers that hold what was asked for. `read`: tokens "
        "that the large model read for an answer, where one lookup is made. RaLMSpec must give what looking up each "
        "time gives; `scheduled` goes by what was timed, so its calls vary from run to run. Speculative RAG answers "
        "otherwise than plain RAG: a draft sees two documents of ten.\n"
    )
    for file in sorted(folder.glob("*.json")):
        found = json.loads(file.read_text(encoding="utf-8"))
        asked, times = found["settings"], found["settings"]["timed"]
        methods = ", ".join(dict.fromkeys(row["method"] for row in found["rows"]))
        parts.append(
            f"## {methods}: {asked['documents']}, {asked['passages']:,} passages\n\n"
            f"{asked['model']}, {asked['dtype']}, greedy, up to {asked['max_new_tokens']} tokens, a lookup every "
            f"{asked['stride']} by the last {asked['window']}; drafts of speculative-rag by {asked['small']}.\n\n"
            f"`{command(found)}`\n"
        )
        titles = ("", "retriever", *COLUMNS, *(("seconds", "speedup") if times else ()))
        lines = [f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * (len(titles) - 2)]
        lines += [f"| {' | '.join((row['name'], row['retriever'], *cells(row, times)))} |" for row in found["rows"]]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _drawn(found: Mapping[str, Any], times: bool) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("", "retriever", *COLUMNS, *(("seconds", "speedup") if times else ())):
        table.add_column(title, justify="left" if title in ("", "retriever") else "right")
    for row in found["rows"]:
        table.add_row(row["name"], row["retriever"], *cells(row, times))
    return table
