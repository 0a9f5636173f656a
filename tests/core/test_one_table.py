"""The tables of core/methods are the only place that names drafters and rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from outrider.app import options
from outrider.core.methods import AUTO, DRAFTERS, RULES
from outrider.image.options import Options as ImageOptions
from outrider.text.options import Options as TextOptions

ROOT = Path(__file__).parents[2]
NAMES = {*DRAFTERS, *RULES, AUTO.name}
# Experiments and menus: which methods they run, or show first, is what they are about.
EXPERIMENTS = {
    *("app/report/sections.py", "app/page/record_examples.py", "app/commands/simulate.py"),
    *("app/page/drafter_menu.py", "app/page/lab_tab.py", "app/bench/counted.py"),
}
EXCEPTIONS = {  # the defaults of commands, whose help may not wait for torch
    ("app/options.py", "auto"),
    ("app/options.py", "jacobi"),
    ("app/options.py", "prompt-lookup"),
    ("app/options.py", "exact"),
    ("app/page/batch_tab.py", "token-recycling"),  # the first choice of its menu
}
FORMULAS = {  # of relaxed rules, as the compiled kernels call them
    "core/rules/codebook.py": ("annealed",),
    "core/rules/neighbours.py": ("additive-beta", "tolerance"),
    "core/rules/relaxed.py": ("lenience", "threshold", "trust", "verify-every"),
}
FORMULAS["core/rules/native_walk.py"] = tuple(name for names in FORMULAS.values() for name in names)
HOMONYMS = {  # words that mean something else there
    ("app/page/backends/interface.py", "lenience"): "an option",
    ("app/page/backends/interface.py", "threshold"): "an option",
    ("app/formats/engines.py", "token"): "a field of another engine's response",
    ("app/lessons/drawings.py", "rest"): "a part of a round's time",
    ("app/viz/token_styles.py", "rest"): "a part of a round's time",
    ("core/decode.py", "rest"): "a part of a round's time",
    ("core/device.py", "auto"): "the best device of the machine",
    ("core/drafters/draft_model/model.py", "threshold"): "an option",
    ("core/drafters/trained/drafter.py", "threshold"): "an option",
    ("modalities/text/drafter_inputs.py", "threshold"): "an option",
    ("core/drafters/trained/export_checkpoints.py", "dflash"): "a name of another file format",
    ("core/drafters/trained/export_checkpoints.py", "mtp"): "a name of another file format",
    ("core/drafters/trained/falcon.py", "block"): "an entry of a head's config",
    ("core/drafters/trained/export_checkpoints.py", "eagle3"): "a name of another file format",
    ("core/drafters/trained/import_checkpoints.py", "eagle"): "a name of another file format",
    ("core/drafters/trained/import_checkpoints.py", "eagle3"): "a name of another file format",
    ("core/drafters/trained/import_checkpoints.py", "medusa"): "a name of another file format",
    ("core/drafters/trained/import_checkpoints.py", "dflash"): "a name of another file format",
    ("core/drafters/trained/import_checkpoints.py", "hydra"): "a name of another file format",
    ("core/drafters/trained/import_checkpoints.py", "mtp"): "a name of another file format",
    ("core/engine/quantization/onnx_graph.py", "block"): "the size of a block of weights",
    ("core/rules/native_walk.py", "block"): "a compiled function",
    ("core/training/losses.py", "adaptive"): "a loss",
    ("modalities/text/recipes.py", "block"): "an option of a head",
    ("modalities/text/structured/tools.py", "auto"): "the model may call a tool",
    ("modalities/text/vllm/export.py", "medusa"): "a name of another file format",
    **{(file, name): "a compiled formula" for file, names in FORMULAS.items() for name in names},
}


def literals() -> Iterator[tuple[str, str]]:
    """Each file and each name of a method that stands in it as a string."""
    for folder in ("core", "modalities", "app"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            place = str(file.relative_to(ROOT))
            if not place.startswith("core/methods/") and place not in EXPERIMENTS:
                for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
                        yield place, node.value


def test_no_method_is_named_outside_the_tables() -> None:
    assert len(EXCEPTIONS) < 15
    assert {*literals()} == EXCEPTIONS | HOMONYMS.keys()


def test_the_defaults_of_commands_are_those_of_the_modalities() -> None:
    assert TextOptions().drafter == options.TEXT_DRAFTER and ImageOptions().drafter == options.IMAGE_DRAFTER
    assert TextOptions().rule == options.RULE
    assert {options.SPEECH_DRAFTER, options.LOOKUP_DRAFTER} <= DRAFTERS.keys()
