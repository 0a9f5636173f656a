"""Our drafters for vLLM: exported weights load and compute the same; vLLM's settings; the client against a fake server.
vLLM itself is not installed by tests; `bench text --engine vllm` runs it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from outrider.app.cli import cli
from outrider.core.assets.store import Checkpoint
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.trained.import_checkpoints import read_foreign
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.protocol import Target
from outrider.core.trace import Summary, Trace
from outrider.core.training.checkpoint import save
from outrider.core.tree import Tree
from outrider.text import load, recipes
from outrider.text.vllm.client import SERVED, Client, Counters, Reply, ServeError
from outrider.text.vllm.export import NOTE, WRITERS, export
from outrider.text.vllm.server import (
    MODULE,
    Setup,
    can_draft,
    check_port,
    interpreter,
    last_words,
    running,
    speculative,
)
from tests.text.tiny import write
from tests.text.vllm.fake_server import PROMPT, Speaks, speaking

pytestmark = pytest.mark.slow
OPTIONS: dict[str, dict[str, Any]] = {
    "draft-model": {"layers": (0, -1), "rank": 4},
    "medusa": {"heads": 3},
    "eagle3": {"lora": 4},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("tiny") / "m", num_hidden_layers=2)


@pytest.fixture(scope="module")
def weights(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Draft heads with random weights over a reduced vocabulary."""
    folder, target = tmp_path_factory.mktemp("weights"), load(str(model)).target()
    result = {}
    for name, options in OPTIONS.items():
        draft_head = recipes.RECIPES[name].make(target, torch.arange(0, 300, 2), **options)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in draft_head.parameters():
                if parameter.dim() > 1:
                    parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
        result[name] = folder / f"m.{name}.safetensors"
        save(draft_head, result[name], {"target": "m"})
    return result


def logits(target: Target, count: int) -> torch.Tensor:
    target.begin([PROMPT], Sampling(), frozenset())
    guess = torch.arange(10, 10 + count)[None]
    draft = Draft.guess(guess, Tree.chain(count), torch.ones_like(guess, dtype=torch.bool))
    result = target.score(draft).logits()[0].float()
    target.end()
    return result


def test_the_exported_draft_model_loads_in_transformers(model: Path, weights: dict[str, Path], tmp_path: Path) -> None:
    folder = export(str(model), "draft-model", tmp_path / "out", weights=weights["draft-model"])
    draft_head = recipes.load(weights["draft-model"], "draft-model", load(str(model)).target())
    ours = logits(draft_head.drafts(load(str(model)).target()), 4)[:, ::2]  # the ids of its reduced vocabulary
    theirs = logits(load(str(folder), dtype="float32").target(), 4)[:, ::2]
    off = (ours - theirs).norm() / theirs.norm()
    assert off < 0.05  # the tolerance of 8-bit weights
    assert load(str(folder)).tokens.encode("the cat", special=False)
    assert json.loads((folder / NOTE).read_text())["drafter"] == "draft-model"


@pytest.mark.parametrize("name", ["medusa", "eagle3"])
def test_exported_heads_load_unchanged(name: str, model: Path, weights: dict[str, Path], tmp_path: Path) -> None:
    folder = export(str(model), name, tmp_path / "out", weights=weights[name])
    target = load(str(model)).target()
    ours: Any = recipes.load(weights[name], name, target).float()
    if name == "medusa":
        tensors = Checkpoint(folder)
        assert tensors["lm_heads.0.weight"].shape == (300, 32)
        for k in range(3):
            rows = slice(32 * k, 32 * (k + 1))
            assert torch.allclose(tensors[f"blocks.{k}.layers.0.weight"].float(), ours.first.weight[rows], atol=2e-3)
        assert json.loads((folder / "config.json").read_text())["num_heads"] == 3
        return
    theirs: Any = read_foreign(folder, target).float()
    for one, other in ((ours.block.attention, theirs.block.attention), (ours.block.mlp, theirs.block.mlp)):
        pairs = zip(one.children(), other.children(), strict=True)
        assert all(torch.allclose(own.weight, again.weight, atol=2e-2) for own, again in pairs)
    assert torch.allclose(ours.fuse.weight, theirs.fuse.weight, atol=2e-2)


def test_speculative_config(model: Path, weights: dict[str, Path], tmp_path: Path) -> None:
    assert speculative(str(model), None) is None
    lookup = speculative(str(model), "prompt-lookup", length=7)
    assert lookup is not None and lookup["method"] == "ngram" and lookup["num_speculative_tokens"] == 7
    assert speculative(str(model), "suffix") == {"method": "suffix"}
    folder = export(str(model), "medusa", tmp_path / "medusa", weights=weights["medusa"])
    result = speculative(str(model), "medusa", weights=folder)
    assert result == {"method": "medusa", "model": str(folder), "num_speculative_tokens": 3}
    with pytest.raises(Incompatible, match="all Medusa heads"):
        speculative(str(model), "medusa", weights=folder, length=2)
    with pytest.raises(InvalidOption, match="contains the drafter medusa"):
        speculative(str(model), "eagle3", weights=folder)
    for name in ("hydra", "jacobi", "nobody"):
        with pytest.raises(Incompatible, match=rf"can't run the drafter '{name}'.*medusa.*prompt-lookup"):
            speculative(str(model), name)
    setup = Setup(
        folder=model,
        name="m",
        drafter="medusa",
        speculative=result,
        parallel={"tensor": 2, "pipeline": 2},
        extra=("--enforce-eager",),
    )
    command = setup.command(Path("python"))
    for words in (
        "--served-model-name m m:medusa --host",
        "--tensor-parallel-size 2",
        "--pipeline-parallel-size 2",
        "--enforce-eager",
        "--host 127.0.0.1",
    ):
        assert words in " ".join(command)
    assert json.loads(command[command.index("--speculative-config") + 1]) == result


def test_missing_vllm_or_a_used_port_raises(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    with pytest.raises(ServeError, match=r"not installed.*--install"):
        interpreter()
    with pytest.raises(ServeError, match="has no vLLM"):
        interpreter(Path(sys.executable))
    with pytest.raises(ServeError, match=r"arctic-inference.*--install --drafter suffix"):
        can_draft(Path(sys.executable), "suffix")
    can_draft(Path(sys.executable), "medusa")
    result = CliRunner().invoke(cli, ["serve"])
    assert isinstance(result.exception, ServeError) and "--install" in str(result.exception)
    result = CliRunner().invoke(cli, ["serve", "--drafter", "hydra"])
    assert isinstance(result.exception, Incompatible)
    result = CliRunner().invoke(cli, ["bench", "text", "--engine", "vllm"])
    assert isinstance(result.exception, ServeError)
    result = CliRunner().invoke(cli, ["bench", "text", "--server", "http://127.0.0.1:9"])
    assert isinstance(result.exception, ServeError) and "outrider serve" in str(result.exception)
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        port = busy.getsockname()[1]
        with pytest.raises(ServeError, match=rf"port {port}.*--port"):
            check_port("127.0.0.1", port)
        monkeypatch.setattr("outrider.text.vllm.server.interpreter", lambda given: Path(sys.executable))
        result = CliRunner().invoke(cli, ["serve", "--port", str(port)])
        assert isinstance(result.exception, ServeError) and "--port" in str(result.exception)
    check_port("127.0.0.1", port)


def test_a_server_that_stops_during_start_up_raises_with_the_reason(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(Setup, "command", lambda self, python: [str(python), "-c", "raise ValueError('no such head')"])
    with (
        pytest.raises(ServeError, match="ValueError: no such head"),
        running(Setup(folder=model, name="m", port=_free()), Path(sys.executable)),
    ):
        pass
    log = tmp_path / "log"
    log.write_text(
        "(EngineCore pid=7) ERROR 11-21 13:33:00 [core.py:99] ValueError: weights missing\n"
        "(APIServer pid=5) RuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert last_words(log) == "ValueError: weights missing"


def _free() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port: int = one.getsockname()[1]
        return port


# ---- a fake vLLM server


@pytest.fixture
def served() -> Iterator[str]:
    with speaking() as address:
        yield address


def test_acceptance_counters_become_steps(served: str) -> None:
    client = Client(served)
    assert client.alive() and client.name == "m"
    for _ in range(2):  # earlier counts are subtracted
        reply = client.complete(PROMPT, 16, end=[2])
        assert reply.tokens == (11, 12, 13, 14, 15, 16, 17) and reply.finish == "length"
        assert reply.counters == Counters(3, 9, 3, (2, 1, 0))
    steps = reply.steps()
    trace = Trace(steps=steps, method="vllm")
    assert Trace.from_json(trace.to_json()).tokens() == list(reply.tokens)
    result = Summary.of(steps)
    assert (result.target_passes, result.tokens, result.drafted, result.accepted) == (4, 7, 9, 3)
    assert result.by_position == pytest.approx((2 / 3, 1 / 3, 0))
    assert [len(step.drafted) for step in steps] == [0, 3, 3, 3]
    assert [step.finish for step in steps] == [None, None, None, "limit"]
    assert [step.p for step in steps] == [()] * 4  # vLLM reports no probabilities
    with pytest.raises(ServeError, match="too long"):
        client.complete(PROMPT, 1)
    with pytest.raises(InvalidOption, match="not a URL"):
        Client("localhost")
    with pytest.raises(ServeError, match="answers at"):
        Client("http://127.0.0.1:9").counters()


def test_the_client_reads_model_drafter_and_text(served: str, monkeypatch: pytest.MonkeyPatch) -> None:
    client = Client(served)
    assert client.drafter == SERVED  # counters but no drafter name
    monkeypatch.setattr(Speaks, "names", ("m", "m:medusa"))
    assert client.drafter == "medusa"
    monkeypatch.setattr(Speaks, "names", ("m", "m:../../etc"))
    assert client.drafter == SERVED
    assert client.encode("Why?") == PROMPT and client.piece(11) == " w11" and client.piece(-1) == "?"
    monkeypatch.setattr(Speaks, "chats", False)
    assert client.encode("Why?") == [*PROMPT, 3]
    monkeypatch.setattr(Speaks, "speculates", False)
    assert client.drafter is None


def test_a_streamed_answer_can_be_closed_early(served: str) -> None:
    answering = Client(served).answer(PROMPT, 16)
    assert next(answering) == (11,) and next(answering) == (12, 13, 14)
    answering.close()
    reply = answering.reply()
    assert reply.tokens == (11, 12, 13, 14) and [len(step.emitted) for step in reply.steps()] == [1, 3]


def test_plain_decoding_has_no_drafts() -> None:
    reply = Reply((1, 2, 3), ((1,), (2,), (3,)), 0.3, "stop", Counters())
    result = Summary.of(reply.steps())
    assert (result.tokens_per_pass, result.drafted, result.accepted) == (1, 0, 0)
    assert reply.steps()[-1].finish == "end"
    assert Counters.read("nothing here\n") == Counters()


def test_the_server_ends_with_its_context(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    script = (
        "import http.server as h, sys\n"
        "class H(h.BaseHTTPRequestHandler):\n"
        "    def do_GET(self):\n        self.send_response(200); self.end_headers()\n"
        "h.HTTPServer(('127.0.0.1', int(sys.argv[1])), H).serve_forever()\n"
    )
    monkeypatch.setattr(Setup, "command", lambda self, python: [str(python), "-c", script, str(self.port)])
    with running(Setup(folder=model, name="m", port=_free()), Path(sys.executable)) as client:
        assert client.alive()
    assert not client.alive()
    assert os.path.getsize(tmp_path / "peers" / "vllm-serve.log") > 0  # the log is kept


def test_serve_passes_its_arguments_to_vllm(model: Path, tmp_path: Path) -> None:
    """As a child: tests/app/test_interrupt.py checks that both end at a signal."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    (tmp_path / "lib").mkdir()
    python.write_text('#!/bin/sh\ncase "$2" in -c) exit 0;; esac\necho "$$ $*"\n')
    python.chmod(0o755)
    words = ["serve", "--model", str(model), "--python", str(python), "--port", str(_free()), "--", "--enforce-eager"]
    command = [sys.executable, "-c", "from outrider.app.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, result = process.communicate(timeout=60)
    assert process.returncode == 0, result
    number, *given = output.split(maxsplit=1)
    assert int(number) != process.pid and "--enforce-eager" in given[0] and MODULE in given[0]


def test_every_exporter_has_a_training_recipe() -> None:
    assert set(WRITERS) <= set(recipes.RECIPES)
