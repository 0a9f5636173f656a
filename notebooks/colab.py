"""Point the Colab links and set-up cells of the notebooks at a repository: `python notebooks/colab.py OWNER/NAME`.

Without a name they ask: the links open Colab's dialog, and the set-up cells ask for the address of the repository.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import nbformat
from save import notebooks

COLAB = "https://colab.research.google.com/github/"
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"
ASK = 'input("Address of the repository, as for git clone: ")'
_BADGE = re.compile(re.escape(BADGE) + r"\([^)]*\)")
_SOURCE = re.compile(r"SOURCE = .*")


def point(path: Path, repository: str = "", branch: str = "main") -> None:
    """Rewrite the link and the set-up cell of one notebook; no name restores those that ask."""
    notebook = nbformat.read(path, as_version=4)
    link = f"{COLAB}{repository}/blob/{branch}/notebooks/{path.name}" if repository else COLAB
    address = f'"https://github.com/{repository}"' if repository else ASK
    first, setup = notebook.cells[0], notebook.cells[1]
    first.source, links = _BADGE.subn(lambda _: f"{BADGE}({link})", first.source)
    setup.source, sources = _SOURCE.subn(lambda _: f"SOURCE = {address}", setup.source)
    assert links == sources == 1, path
    nbformat.write(notebook, path)


def main(names: list[str]) -> None:
    repository = names[0] if names else ""
    if repository and not re.fullmatch(r"[\w.-]+/[\w.-]+", repository):
        sys.exit(f"'{repository}' is no repository; give OWNER/NAME")
    for path in notebooks():
        if "find_spec" in path.read_text(encoding="utf-8"):
            point(path, repository)


if __name__ == "__main__":
    main(sys.argv[1:])
