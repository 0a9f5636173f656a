"""Checks in the syntax trees of all code and notebooks who opens weights, unpickles, runs code or uses the network."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SECURITY = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
FILES = sorted(path for folder in ("core", "modalities", "app", "notebooks") for path in (ROOT / folder).rglob("*.py"))
FILES += sorted((ROOT / "notebooks").glob("*.ipynb"))

# Functions that read weights or build models from files, by the end of their names, and the files that may use them.
OPENERS = {
    "torch.load": {"core/assets/store.py"},
    "serialization.load": set(),
    "torch.jit.load": {"modalities/image/inception_lpips.py"},
    "torch.export.load": set(),
    "torch.hub.load": set(),
    "torch.package": set(),
    "checkpoint.load": set(),  # torch.distributed's
    "load_state_dict_from_url": set(),
    "load_library": set(),
    "cpp_extension": set(),
    "safe_open": {"core/assets/store.py"},
    "load_file": set(),  # safetensors'
    "load_model": set(),  # safetensors' and onnx's
    "safetensors.torch.load": set(),
    "safetensors.numpy": set(),
    "safe_globals": {"core/assets/store.py"},
    "add_safe_globals": set(),
    "GGUFReader": set(),
    "from_pretrained": {
        *("core/assets/store.py", "modalities/text/untrusted/child.py", "modalities/text/bench/peer_worker.py"),
        "core/engine/adapters/model_parts.py",  # from tensors
        "notebooks/11-cache-rollback.ipynb",  # a model of the reader's own
    },
    "from_config": {"core/assets/store.py"},  # without weights, of a configuration that may not name code
    "transformers.pipeline": set(),
    "DiffusionPipeline": set(),
    "load_state": {"core/training/optim.py"},  # accelerate's
    "register_for_checkpointing": set(),  # accelerate unpickles such objects
    "load_checkpoint_in_model": set(),
    "load_checkpoint_and_dispatch": set(),
    "onnx.load": {"modalities/speech/training/kokoro.py"},
    "InferenceSession": {"modalities/speech/training/kokoro.py", "modalities/speech/evaluation/metrics.py"},
    "WhisperModel": {"modalities/speech/evaluation/metrics.py"},
    "LLMPipeline": {"modalities/text/bench/peer_worker.py"},
    "vllm.LLM": {"modalities/text/bench/peer_worker.py"},
    "read_model": set(),  # OpenVINO's
    "snapshot_download": {"core/assets/store.py"},
    "hf_hub_download": set(),
}
# Functions that read other untrusted files, use the network, or run code and programs.
OTHERS = {
    "numpy.load": {"modalities/image/inception_lpips.py", "modalities/text/rag/retrievers.py"},
    "numpy.fromfile": set(),
    "numpy.memmap": {"core/assets/gguf.py", "core/drafters/lookup/retrieval.py"},
    "Tokenizer.from_file": {
        "modalities/text/tokenizer.py",
        "modalities/text/untrusted/child.py",
        "modalities/text/rag/retrievers.py",
    },
    "tarfile.open": {
        "core/assets/archives.py",
        "modalities/image/training/data.py",
        "modalities/speech/training/kokoro.py",
        "modalities/text/bench/llama_cpp.py",
    },
    "zipfile.ZipFile": {"core/assets/npz.py", "core/assets/store.py", "core/assets/sources.py"},
    "extractall": {"modalities/text/bench/llama_cpp.py"},  # of an archive whose hash is checked
    "unpack_archive": set(),
    "urlopen": {
        "core/assets/sources.py",
        "modalities/text/vllm/client.py",
        "modalities/text/bench/peer_worker.py",  # of its own server on this machine
    },
    "urlretrieve": set(),
    "yaml.load": set(),
    "jinja2.Environment": set(),
    "ImmutableSandboxedEnvironment": {"modalities/text/untrusted/child.py"},
    "ctypes.CDLL": {
        "core/engine/native/training_block.py",
        "core/kernels/native.py",
        "core/device.py",
        "core/kernels/neighbour_mass.py",
        "core/kernels/vocoder.py",
        "core/rules/native_walk.py",
        "app/interrupt.py",
    },
    "import_module": {"app/commands/probe.py", "app/commands/train.py", "core/assets/hub_models.py"},
    "spec_from_file_location": set(),
    "runpy": set(),
    "subprocess.run": {
        "app/setup/install.py",
        "app/commands/probe.py",
        "app/report/command.py",
        "app/bench/vllm.py",
        "core/kernels/native.py",
        "modalities/text/bench/venvs.py",
        "modalities/text/vllm/server.py",
    },
    "subprocess.Popen": {
        "core/assets/sources.py",
        "modalities/text/bench/peer_worker.py",
        "modalities/text/bench/peers.py",
        "modalities/text/untrusted/process.py",
        "modalities/text/vllm/server.py",
    },
    **{f"subprocess.{name}": set() for name in ("call", "check_call", "check_output", "getoutput")},
    **{
        f"os.{name}": set()
        for name in ("system", "popen", "execv", "execve", "execvp", "spawnv", "posix_spawn", "startfile")
    },
    **{name: set() for name in ("eval", "exec", "compile", "__import__")},
    **{f"builtins.{name}": set() for name in ("eval", "exec", "compile", "__import__")},
}
UNPICKLERS = {"pickle", "cPickle", "_pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}
CLIENTS = {
    "requests",
    "httpx",
    "aiohttp",
    "ftplib",
}  # downloads go through core/assets/sources.py and huggingface_hub
BARE = {"eval", "exec", "compile", "__import__"}  # only as bare names: model.eval() and re.compile() are allowed


@cache
def tree(path: Path) -> ast.Module:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        text = re.sub(r"^( *)%pip ", r"\1pass  # ", text, flags=re.MULTILINE)
    return ast.parse(text)


class PromptEncoder:
    """Return the dotted names used in a file, with imported names in full."""

    def __init__(self, path: Path) -> None:
        parsed = tree(path)
        kinds = ast.Attribute | ast.Name | ast.Call | ast.Import | ast.ImportFrom
        self.nodes = [node for node in ast.walk(parsed) if isinstance(node, kinds)]
        self.own = {node.name for node in parsed.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        self.full: dict[str, str] = {}
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module:
                self.full |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Import):
                self.full |= {alias.asname: alias.name for alias in node.names if alias.asname}

    def of(self, node: ast.AST) -> str:
        if isinstance(node, ast.Attribute):
            return f"{self.of(node.value)}.{node.attr}"
        if isinstance(node, ast.Name):
            return f"outrider.{node.id}" if node.id in self.own else self.full.get(node.id, node.id)
        if isinstance(node, ast.Call) and self.of(node.func) == "getattr" and len(node.args) > 1:
            named = node.args[1].value if isinstance(node.args[1], ast.Constant) else "?"
            return f"{self.of(node.args[0])}.{named}"
        return "?"

    def imported(self) -> Iterator[str]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)

    def names_used(self) -> set[str]:
        """Names that are called, passed on or imported, without our own functions but with names they re-export."""
        result = {self.of(node) for node in self.nodes} | set(self.imported())
        ours = {f"outrider.{name}" for name in self.own} | {
            name for name in self.imported() if name.startswith("outrider.")
        }
        return result - ours


@cache
def names(path: Path) -> PromptEncoder:
    return PromptEncoder(path)


@cache
def names_used(path: Path) -> frozenset[str]:
    return frozenset(names(path).names_used())


def uses(path: Path, name: str) -> bool:
    ends = () if name in BARE else (f".{name}",)
    starts = (f"{name}.",) if name in ("runpy", "torch.package", "safetensors.numpy") else ()
    return any(used == name or used.endswith(ends) or used.startswith(starts) for used in names_used(path))


@cache
def calls(path: Path) -> list[tuple[str, ast.Call]]:
    """Yield every call in a file with the dotted name of the callee."""
    return [(names(path).of(node.func), node) for node in names(path).nodes if isinstance(node, ast.Call)]


def argument(call: ast.Call, name: str) -> object:
    """Return a call's constant argument by name, or the call if it is not a constant."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value.value if isinstance(keyword.value, ast.Constant) else call
    return None


def named(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("name", [*OPENERS, *OTHERS])
def test_only_allowed_modules_use_it(name: str) -> None:
    assert {named(path) for path in FILES if uses(path, name)} == (OPENERS | OTHERS)[name]


def test_security_md_lists_every_module_that_opens_weights() -> None:
    for file in set().union(*OPENERS.values()):
        assert f"`{file}`" in SECURITY, file


def test_nothing_is_unpickled() -> None:
    for path in FILES:
        assert not (UNPICKLERS | CLIENTS) & {name.partition(".")[0] for name in names(path).imported()}, path
        assert not any(name.endswith(".read_pickle") for name in names_used(path)), path
        for name, call in calls(path):
            if name == "torch.load":
                assert argument(call, "weights_only") is True, path
            if name == "numpy.load":
                assert argument(call, "allow_pickle") is False, path
            assert argument(call, "allow_pickle") in (None, False), path


def test_no_untrusted_code_runs() -> None:
    for path in FILES:
        for name, call in calls(path):
            assert argument(call, "trust_remote_code") in (None, False), path
            if name.endswith(".from_pretrained"):
                assert argument(call, "trust_remote_code") is False, (
                    f"{path}: left out, transformers asks at the keyboard"
                )
                weightless = ("AutoTokenizer", "AutoProcessor", "AutoConfig")
                reads_no_weights = name.endswith(tuple(f"{kind}.from_pretrained" for kind in weightless))
                assert reads_no_weights or argument(call, "use_safetensors") is True, path
            assert argument(call, "custom_pipeline") is None, path
            assert argument(call, "shell") in (None, False), path


BROKEN = {
    "safetensors.torch.load_file": "from safetensors.torch import load_file as read\nread('x')",
    "torch.load": "import torch as t\nfor one in map(t.load, files): ...",
    "torch.jit.load": "from torch import jit\nkept = jit.load",
    "numpy.load": "import numpy\ngetattr(numpy, 'load')('x')",
    "safetensors.safe_open": "def f():\n    from safetensors import safe_open",
    "?.from_pretrained": "make('x').from_pretrained('y')",
    "accelerator.load_state": "def restore(accelerator):\n    accelerator.load_state('x')",
    "pickle": "import pickle",
}


@pytest.mark.parametrize("name", BROKEN)
def test_violations_are_detected(name: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(BROKEN[name])
    assert name in names_used(bad)
    assert name == "pickle" or any(uses(bad, other) for other in (OPENERS | OTHERS))


def test_our_functions_of_the_same_name_are_allowed(tmp_path: Path) -> None:
    good = tmp_path / "good.py"
    good.write_text(
        "def load_file(path): ...\nload_file('x')\nfrom outrider.speech.training.data import load_file as r\nr('x')"
    )
    assert not uses(good, "load_file")


def test_arguments_are_detected(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text("import torch\ntorch.load('x', weights_only=w)\n")
    result = dict(calls(bad))
    assert argument(result["torch.load"], "weights_only") is result["torch.load"]
