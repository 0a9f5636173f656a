"""`outrider datastore`: text files made into what the drafter 'rest' looks things up in.

Heavy packages are imported when something is to be built.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

datastore = typer.Typer(
    help="Datastores: corpora in which the drafter 'rest' looks up what comes next.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@datastore.command()
def build(
    files: Annotated[
        list[Path], typer.Argument(help="Text files, UTF-8; of folders all .txt, .md, .rst and .py files.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="Where the datastore goes.")],
    model: Annotated[str, typer.Option(help="The model whose tokenizer it is for.")] = "smollm2-135m",
) -> None:
    """Tokenise text files and sort every place of them."""
    from outrider.core.errors import InvalidOption
    from outrider.text import datastore as stores
    from outrider.text.loading import find
    from outrider.text.tokenizer import Tokens

    found = [inner for path in files for inner in _files(path)]
    if not found:
        raise InvalidOption("there are no files; give text files, or folders that hold .txt, .md, .rst or .py files")
    if not output.absolute().parent.is_dir():
        raise InvalidOption(f"{output} can't be written: {output.absolute().parent} is no folder")
    store = stores.build(Tokens.load(find(model)[0]), found)
    store.save(output)
    print(f"{output}: {len(store):,} tokens of {len(found)} files; use it with --drafter rest")


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    return sorted(one for one in path.rglob("*") if one.suffix in (".txt", ".md", ".rst", ".py") and one.is_file())


@datastore.command()
def show(
    file: Annotated[Path, typer.Argument(help="A datastore.")],
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable, on stdout.")] = False,
) -> None:
    """What a datastore holds; an error if it is damaged."""
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
