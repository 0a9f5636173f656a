"""Who may open weights, unpickle, run or fetch: read off the syntax tree of all that is installed."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
FILES = sorted(path for folder in ("core", "modalities", "app") for path in (ROOT / folder).rglob("*.py"))

# Calls that read weights or make models of files, by the end of their name, and the files that may.
OPENERS = {
    "torch.load": {"core/assets.py"},
    "torch.jit.load": {"modalities/image/eyes.py"},
    "safe_open": {"core/assets.py"},
    "load_file": set(),  # safetensors'
    "GGUFReader": {"core/gguf.py"},
    "from_pretrained": {"core/assets.py", "modalities/text/tokens.py", "modalities/text/peer_worker.py"},
    "InferenceSession": {"modalities/speech/teacher.py", "modalities/speech/judges.py"},
    "WhisperModel": {"modalities/speech/judges.py"},
    "snapshot_download": {"core/assets.py"},
    "hf_hub_download": set(),
    "load_state_dict_from_url": set(),
    "torch.hub.load": set(),
    "urlretrieve": set(),
    "extractall": set(),
    "yaml.load": set(),
    "os.system": set(),
    "os.popen": set(),
}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
RUNNERS = {"eval", "exec", "compile", "__import__"}


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Every call of a file, with the dotted name of what is called; names that were imported in full."""
    parsed = tree(path)
    full = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in ast.walk(parsed)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    own = {node.name for node in parsed.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    full |= {name: f"outrider.{name}" for name in own}
    found = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Call):
            first, dot, rest = ast.unparse(node.func).partition(".")
            found.append((full.get(first, first) + dot + rest, node))
    return found


def given(call: ast.Call, name: str) -> object:
    """The constant that a call is given by that name; the call itself where it is none."""
    for one in call.keywords:
        if one.arg == name:
            return one.value.value if isinstance(one.value, ast.Constant) else call
    return None


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("opener", OPENERS)
def test_only_those_that_may_open_weights_do(opener: str) -> None:
    found = set()
    for path in FILES:
        for name, _ in calls(path):
            own = name.startswith("outrider.")  # of the same name, but ours
            if not own and (name == opener or name.endswith(f".{opener}")):
                found.add(named(path))
    assert found == OPENERS[opener]


def test_security_names_every_place_that_opens() -> None:
    for file in set().union(*OPENERS.values()):
        assert f"`{file}`" in SECURITY, file


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Import | ast.ImportFrom):
                names = (
                    {alias.name.partition(".")[0] for alias in node.names} if isinstance(node, ast.Import) else set()
                )
                names |= {(getattr(node, "module", None) or "").partition(".")[0]}
                assert not UNPICKLERS & names, path
        for name, call in calls(path):
            if name.endswith("torch.load"):
                assert given(call, "weights_only") is True, path
            if name in ("np.load", "numpy.load"):
                assert given(call, "allow_pickle") is False, path
            assert given(call, "allow_pickle") in (None, False), path


def test_no_code_of_others_runs() -> None:
    for path in FILES:
        for name, call in calls(path):
            assert given(call, "trust_remote_code") in (None, False), path
            if name.endswith(".from_pretrained"):
                assert given(call, "trust_remote_code") is False, f"{path}: left out, transformers asks at the keyboard"
            assert name not in RUNNERS, f"{path}: {name}"
            assert given(call, "shell") in (None, False), path


def test_the_rule_is_broken_by_what_breaks_it(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from safetensors.torch import load_file as read\nimport torch\nread('x')\ntorch.load('x', weights_only=w)\n"
    )
    found = dict(calls(bad))
    assert "safetensors.torch.load_file" in found
    assert given(found["torch.load"], "weights_only") is found["torch.load"]
