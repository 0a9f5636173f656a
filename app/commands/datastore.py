"""`outrider datastore`: build and describe the indexed corpora of the drafter `rest`.

Heavy packages are imported by the commands when they run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

datastore = typer.Typer(
    help="Datastores: indexed corpora from which the drafter `rest` retrieves continuations.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@datastore.command()
def build(
    files: Annotated[list[Path], typer.Argument(help="UTF-8 text files, or folders of .txt, .md, .rst and .py files.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Write the datastore to FILE.")],
    model: Annotated[str, typer.Option(help="Target whose tokenizer is used.")] = "smollm2-135m",
) -> None:
    """Build a datastore: tokenize text files and sort all their suffixes."""
    from outrider.core.errors import InvalidOption
    from outrider.text import datastore as stores
    from outrider.text.loading import find
    from outrider.text.tokenizer import Tokens

    sources = [inner for path in files for inner in _files(path)]
    if not sources:
        raise InvalidOption("there are no files; give text files, or folders that hold .txt, .md, .rst or .py files")
    if not output.absolute().parent.is_dir():
        raise InvalidOption(f"{output} can't be written: {output.absolute().parent} is not a folder")
    store = stores.build(Tokens.load(find(model, dtype=None)[0]), sources)
    store.save(output)
    print(f"{output}: {len(store):,} tokens of {len(sources)} files; use it with --drafter rest")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(file for file in path.rglob("*") if file.suffix in (".txt", ".md", ".rst", ".py") and file.is_file())


@datastore.command()
def show(
    file: Annotated[Path, typer.Argument(help="Datastore file.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON to stdout.")] = False,
) -> None:
    """Describe a datastore; fails if the file is damaged."""
    from outrider.core.drafters.lookup.retrieval import Datastore

    store = Datastore.load(file)
    facts = {"file": str(file), "tokens": len(store), "bytes": file.stat().st_size, **store.about}
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        print(
            "\n".join(
                f"{name:10}{value:,}" if isinstance(value, int) else f"{name:10}{value}"
                for name, value in facts.items()
            )
        )
