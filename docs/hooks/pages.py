"""MkDocs hooks that generate pages from the repository: the API reference, the method table and the examples.

A generated page cannot fall behind the code. The sources are the packages listed in pyproject.toml, the folder
`examples/` and the tables of `outrider.core.methods`; independent of how pages look.
"""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
ROOTS = sorted(SETUPTOOLS["package-dir"])  # outrider.core, outrider.text, ...
REPOSITORY = {  # pages of the site, and the files of the repository that they show
    "architecture.md": "ARCHITECTURE.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changes.md": "CHANGELOG.md",
}
PICTURES = ("reports/image/sheet.png", "reports/page/text-wide-light.png", "reports/page/image-wide-light.png")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Add the generated pages to the navigation."""
    assert config.nav is not None
    reference = [{root: [page(name) for name in packages(root)]} for root in ROOTS]
    config.nav += [
        {"Examples": "examples.md"},
        {"API reference": reference},
        {"Project": list(REPOSITORY)},
    ]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages and the images that the repository keeps elsewhere."""
    generated = {page(name): reference(name) for root in ROOTS for name in packages(root)}
    generated |= {"methods.md": methods(), "examples.md": examples()}
    generated |= {name: shown(source) for name, source in REPOSITORY.items()}
    for name, content in generated.items():
        files.append(File.generated(config, name, content=content))
    files.append(File.generated(config, "viewer.html", content=viewer()))
    for name in PICTURES:
        files.append(File(name, str(ROOT), config.site_dir, use_directory_urls=False))
    return files


def viewer() -> str:
    """The trace viewer, a page of its own."""
    from outrider.app.viewer.html import page as viewer_page

    return viewer_page()


def shown(source: str) -> str:
    """A file of the repository, its links pointing to the site's pages."""
    text = (ROOT / source).read_text(encoding="utf-8")
    for name, other in REPOSITORY.items():
        text = text.replace(f"]({other})", f"]({name})")
    return text


def packages(root: str) -> list[str]:
    return [name for name in SETUPTOOLS["packages"] if name == root or name.startswith(f"{root}.")]


def page(package: str) -> str:
    return f"reference/{package.removeprefix('outrider.')}.md"


def folder(package: str) -> Path:
    """Where a package's files are: outrider.text.rag is modalities/text/rag."""
    root = ".".join(package.split(".")[:2])
    return ROOT.joinpath(SETUPTOOLS["package-dir"][root], *package.split(".")[2:])


def reference(package: str) -> str:
    """One package: its docstring, then every module with its public classes and functions."""
    place = folder(package)
    modules = sorted(path.stem for path in place.glob("*.py") if path.stem != "__init__")
    parts = [f"# {package}", docstring(place / "__init__.py")]
    parts += [f"::: {package}.{module}\n    options:\n      heading_level: 2" for module in modules]
    return "\n\n".join(parts) + "\n"


def docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""


def methods() -> str:
    """Return the page of methods: the table, then each method with its paper and options."""
    from outrider.app.report.method_table import markdown
    from outrider.core.methods import DRAFTERS, RULES

    parts = [
        "# Methods",
        "Every drafter and acceptance rule by name. ✓: works with the weights that ship, or needs none. ○: works once "
        "`outrider train` has produced the weights. Options are passed as `drafter_options` and `rule_options`.",
        markdown(),
    ]
    for title, table in (("Drafters", DRAFTERS), ("Acceptance rules", RULES)):
        parts.append(f"## {title}")
        for name, method in table.items():
            options = ", ".join(f"`{option}={default!r}`" for option, default in method.options.items())
            facts = [f"*{method.summary}*", f"Paper: {method.paper}", f"Module: `{method.module}`"]
            needs = [f"`{option}`, {method.inputs[option]}" for option in method.needs]
            facts += [f"Needs: {'; '.join(needs)}"] if needs else []
            facts += [f"Options: {options}"] if options else []
            parts.append(f"### {name}\n\n" + "\n\n".join(facts))
    return "\n\n".join(parts) + "\n"


def examples() -> str:
    """Every script of examples/: its docstring, then its code."""
    parts = ["# Examples", "Short scripts, each run by a test. `python examples/NAME.py --help` lists the arguments."]
    for path in sorted((ROOT / "examples").glob("*.py")):
        source, text = path.read_text(encoding="utf-8"), docstring(path)
        code = source.partition('"""')[2].partition('"""')[2].strip()
        parts.append(f"## {path.name}\n\n{text}\n\n```python\n{code}\n```")
    return "\n\n".join(parts) + "\n"
