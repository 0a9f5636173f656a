"""`outrider rag` and `outrider bench rag`: answer questions from documents; measure what speculation saves.

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

from outrider.app.options import DEVICE, Device, JsonFile, MaxNewTokens, Seed, TextDtype, TextModelName, waiting
from outrider.core.assets.files import write_atomically

Documents = Annotated[str, typer.Option(help="Built-in documents (named-things, speeches), or a text file or folder.")]
RetrievalStride = Annotated[int, typer.Option(min=1, help="Tokens generated between two retrievals.")]
QueryLength = Annotated[int, typer.Option(min=1, help="Most recent tokens used as the query.")]
DraftModel = Annotated[
    str | None,
    typer.Option(metavar="NAME[:DTYPE]", help="Model that writes the drafts of speculative-rag. Default: the target."),
]


def rag(
    question: Annotated[str, typer.Argument(help="Question to answer.")],
    method: Annotated[
        str, typer.Option(help="Method: iterative, ralm-spec, rag or speculative-rag; see `outrider methods`.")
    ] = "ralm-spec",
    documents: Documents = "named-things",
    retriever: Annotated[str, typer.Option(help="Retriever: dense, dense-approximate or bm25.")] = "dense",
    speculation_stride: Annotated[
        int | None,
        typer.Option(min=1, help="Retrievals speculated on before they are verified together. Default: scheduled."),
    ] = None,
    async_verification: Annotated[
        bool, typer.Option("--async-verification", help="Verify while the next retrieval is being speculated on.")
    ] = False,
    drafter: Annotated[
        str | None, typer.Option(help="Drafter of tokens between retrievals, from `outrider methods`. Default: none.")
    ] = None,
    retrieval_stride: RetrievalStride = 4,
    query_length: QueryLength = 32,
    max_new_tokens: MaxNewTokens = 64,
    model: TextModelName = "smollm2-135m",
    draft_model: DraftModel = None,
    dtype: TextDtype = "bfloat16",
    device: Device = DEVICE,
    seed: Seed = 0,
) -> None:
    """Answer a question from documents, speculating on retrievals or on whole drafts."""
    from outrider.text.rag.methods import Answerer, AnswerMethod
    from outrider.text.rag.ralm import Speculation

    speculation = Speculation(ahead=speculation_stride, overlap=async_verification) if method == "ralm-spec" else None
    answer_method = AnswerMethod(method=method, speculation=speculation, drafter=drafter)
    lm, small, store = _ready(model, draft_model, device, dtype, documents, retriever)
    answerer = Answerer(
        lm,
        store,
        small=small,
        max_new_tokens=max_new_tokens,
        stride=retrieval_stride,
        window=query_length,
        seed=seed,
    )
    with waiting(f"Answering by {method} ..."):
        answer = answerer.answer(answer_method, question)
    print(answer.text)
    lookups = answer.lookups
    line = f"{lookups.calls} retriever calls with {lookups.queries} queries"
    if method == "ralm-spec":
        line += (
            f"; {lookups.right} of {lookups.guesses} speculated retrievals right, {lookups.taken_back} tokens undone"
        )
    print(line, file=sys.stderr)
    for number in dict.fromkeys(answer.documents):
        print(f"- {store.passages[number]}", file=sys.stderr)


def bench_rag(
    questions: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="JSON lines with `question` and `answers`. Default: fifty built-in questions."
        ),
    ] = None,
    documents: Documents = "named-things",
    retrievers: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated retrievers.")] = (
        "dense,dense-approximate,bm25"
    ),
    methods: Annotated[str, typer.Option(metavar="NAMES", help="Comma-separated methods.")] = (
        "iterative,ralm-spec,rag,speculative-rag"
    ),
    num_prompts: Annotated[int | None, typer.Option(min=1, help="Number of questions. Default: all.")] = None,
    retrieval_stride: RetrievalStride = 4,
    query_length: QueryLength = 32,
    max_new_tokens: MaxNewTokens = 48,
    model: TextModelName = "smollm2-135m",
    draft_model: DraftModel = None,
    dtype: TextDtype = "bfloat16",
    device: Device = DEVICE,
    seed: Seed = 0,
    times: Annotated[
        bool, typer.Option("--timing/--no-timing", help="Report seconds and speedups; needs an idle machine.")
    ] = True,
    json_file: JsonFile = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page of all JSON files in FILE's folder.")
    ] = None,
) -> None:
    """Measure retriever calls and correct answers with and without speculation; check that RaLMSpec is lossless."""
    from rich.console import Console

    from outrider.app.bench.progress import bar
    from outrider.app.viz.fitted import Fitted
    from outrider.text.rag.documents import questions as load_questions
    from outrider.text.rag.methods import ANSWER_METHODS, METHODS, Answerer, RagBench, report
    from outrider.text.rag.retrievers import RETRIEVERS

    names = _names(methods, "method", METHODS)
    answer_methods = [method for method in ANSWER_METHODS if method.method in names]
    items = load_questions(questions, num_prompts)
    console = Console(stderr=True, highlight=False)
    lm = small = None
    measured: list[RagBench] = []
    for name in _names(retrievers, "retriever", RETRIEVERS):
        lm, small, store = _ready(model, draft_model, device, dtype, documents, name, lm, small)
        settings = {
            "max_new_tokens": max_new_tokens,
            "stride": retrieval_stride,
            "window": query_length,
            "seed": seed,
        }
        bench = RagBench(Answerer(lm, store, small=small, **settings), items, answer_methods)
        measured.append(bench)
        try:
            with bar(console, len(items) * len(answer_methods), store.name) as step:
                for name in bench.run():
                    step(name)
        except KeyboardInterrupt:
            console.print("Stopped; these are the results so far.")
            break
    about = {"documents": documents, "questions_from": str(questions) if questions else "built in"}
    results = report(measured, {**about, "passages": len(measured[0].answerer.retriever.passages), "timed": times})
    text = json.dumps(results, indent=1, ensure_ascii=False, allow_nan=False)
    if json_file is not None and str(json_file) == "-":
        print(text)
        return
    Console(highlight=False).print(Fitted(_table(results, times)))
    if json_file is not None:
        write_atomically(json_file, text + "\n")
    if page is not None:
        write_atomically(page, result_page(page.parent))


def _names(given: str, what: str, known: Mapping[str, Any]) -> list[str]:
    from outrider.core.errors import unknown

    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise unknown(what, name, known)
    return names


def _ready(
    model: str,
    draft_model: str | None,
    device: str,
    dtype: str,
    documents: str,
    retriever: str,
    lm: Any = None,
    small: Any = None,
) -> tuple[Any, Any, Any]:
    """The target, the draft model and the retriever; models that are loaded already are reused."""
    from rich.console import Console

    from outrider import text
    from outrider.core.engine.loading.folder import DTYPES
    from outrider.text.drafter_inputs import companion
    from outrider.text.rag.documents import documents as read
    from outrider.text.rag.retrievers import retriever as make

    with Console(stderr=True).status(f"Reading {documents} ...") as status:
        store = make(retriever, read(documents))
        if lm is None:
            status.update(f"Loading {model} ...")
            lm = text.load(model, device=device, dtype=dtype)
        if small is None and draft_model:
            # its answers are not verified token by token, so they have the target's precision unless another is named
            named = draft_model.rpartition(":")[2] in DTYPES
            small = companion(lm, draft_model if named else f"{draft_model}:{lm.dtype}")
    return lm, small or lm, store


COLUMNS = (
    "questions",
    "identical",
    "correct",
    "calls",
    "queries",
    "hit rate",
    "undone",
    "tokens per target pass",
    "tokens read",
)


def cells(row: Mapping[str, Any], times: bool) -> list[str]:
    """The cells of a table row."""
    lookups = row["lookups"]
    guesses = lookups["guesses"]
    parts = [
        str(row["questions"]),
        "-" if row["identical"] is None else str(row["identical"]),
        str(row["correct"]),
        str(lookups["calls"]),
        str(lookups["queries"]),
        f"{lookups['right'] / guesses:.0%}" if guesses else "-",
        f"{lookups['taken_back'] / row['tokens']:.1%}" if guesses else "-",
        "-" if row["tokens_per_pass"] is None else f"{row['tokens_per_pass']:.2f}",
        f"{row['read']:.0f}" if row["read"] else "-",
    ]
    if times:
        parts += [f"{row['seconds']:.2f}", "-" if row["speedup"] is None else f"{row['speedup']:.2f}"]
    return parts


def command(results: Mapping[str, Any]) -> str:
    """The command that repeats a measurement."""
    from inspect import signature

    settings, rows = results["settings"], results["rows"]
    options = {name: settings[name] for name in ("documents", "max_new_tokens", "model", "dtype", "seed")}
    options |= {"retrieval_stride": settings["stride"], "query_length": settings["window"]}
    for name in ("retriever", "method"):
        options[f"{name}s"] = ",".join(dict.fromkeys(row[name] for row in rows))
    if settings["small"] != f"{settings['model']}:{settings['dtype']}":
        options["draft_model"] = settings["small"]
    if settings["questions_from"] != "built in":
        options["questions"] = settings["questions_from"]
    defaults = signature(bench_rag).parameters
    words = ["outrider", "bench", "rag", *(() if settings["timed"] else ("--no-timing",))]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)] if value != defaults[name].default else []
    return shlex.join(words)


def result_page(folder: Path) -> str:
    """A page of tables from the JSON files of a folder."""
    parts = ["# Answers from documents, measured\n"]
    parts.append(
        "`identical`: answers with the same tokens and documents as retrieval without speculation. `correct`: "
        "answers that contain the expected one. `calls`: retriever calls, each with one query or several. `hit "
        "rate`: speculated retrievals that were right. `undone`: tokens that a wrong one cost. `tokens read`: by the "
        "target per answer, for methods with one retrieval. RaLMSpec is lossless; `scheduled` depends on measured "
        "times, so its calls vary between runs. Speculative RAG differs from plain RAG: a draft sees two documents "
        "of ten.\n"
    )
    for file in sorted(folder.glob("*.json")):
        results = json.loads(file.read_text(encoding="utf-8"))
        settings, rows, times = results["settings"], results["rows"], results["settings"]["timed"]
        methods = ", ".join(dict.fromkeys(row["method"] for row in rows))
        parts.append(
            f"## {methods}: {settings['documents']}, {settings['passages']:,} passages\n\n"
            f"{settings['model']}, {settings['dtype']}, greedy, up to {settings['max_new_tokens']} tokens, a retrieval "
            f"every {settings['stride']} tokens with the last {settings['window']} as query; drafts of speculative-rag "
            f"by {settings['small']}.\n\n`{command(results)}`\n"
        )
        titles = ("", "retriever", *COLUMNS, *(("seconds", "speedup") if times else ()))
        lines = [f"| {' | '.join(titles)} |", "|---|---|" + "---:|" * (len(titles) - 2)]
        lines += [f"| {' | '.join((row['name'], row['retriever'], *cells(row, times)))} |" for row in rows]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _table(results: Mapping[str, Any], times: bool) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for title in ("", "retriever", *COLUMNS, *(("seconds", "speedup") if times else ())):
        table.add_column(title, justify="left" if title in ("", "retriever") else "right")
    for row in results["rows"]:
        table.add_row(row["name"], row["retriever"], *cells(row, times))
    return table
