"""The ONNX graph computes what our decoder computes with the same rounded weights: chains, trees, after any past."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider.core.engine.network import Network, random_network
from outrider.core.engine.quantization import onnx_graph
from outrider.core.engine.types import Config, PassLayout
from outrider.core.errors import Incompatible

np = pytest.importorskip("numpy")
onnxruntime = pytest.importorskip("onnxruntime")
pytest.importorskip("onnx")
SMALL = {"vocabulary": 70, "hidden_size": 64, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 16}
CONFIGS = [Config(**SMALL, intermediate_size=96), Config(**SMALL, intermediate_size=40, tied=False, rope_theta=1e5)]
Pass = Callable[..., tuple[Any, Any]]


def passes(network: Network, file: Path) -> Pass:
    """A function that runs the graph: tokens, their parents in the pass, and the past."""
    described = onnx_graph.write(network, file, file.with_suffix(".bin"), positions=128)
    assert [one["name"] for one in described] == [name for name, _ in onnx_graph.matrices(network)]
    for name, blocks in onnx_graph.matrices(network):
        if name == "embedding":
            (file.parent / "embedding.codes").write_bytes(blocks.codes.numpy().tobytes())
            (file.parent / "embedding.scales").write_bytes(blocks.scales.numpy().tobytes())
            name = "head" if network.config.tied else ""
        if name:
            (file.parent / name).write_bytes(blocks.weight().T.contiguous().numpy().tobytes())
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])

    def run(tokens: list[int], parents: list[int], past: Any) -> tuple[Any, Any]:
        mask, depths = tree_mask(parents)
        length = len(past)
        feeds = {
            "ids": np.array(tokens),
            "positions": length + np.array(depths),
            "mask": np.concatenate([np.ones((len(tokens), length), bool), mask.numpy()], 1),
            "past": past,
            "wanted": np.arange(len(tokens)),
        }
        logits, new = session.run(None, feeds)
        return logits, new

    return run


def tree_mask(parents: list[int]) -> tuple[Tensor, list[int]]:
    mask, depths = torch.eye(len(parents), dtype=torch.bool), list[int]()
    for node, parent in enumerate(parents):
        depths.append(depths[parent] + 1 if parent >= 0 else 0)
        if parent >= 0:
            mask[node] |= mask[parent]
    return mask, depths


def reference(network: Network, tokens: list[int]) -> Tensor:
    """Logits [N, V] of a chain by our decoder, in one pass."""
    config, count = network.config, len(tokens)
    network.ensure_positions(count)
    store = torch.zeros(config.layers, 1, 2 * config.kv_heads, count, config.head_dim)
    mask = torch.ones(count, count, dtype=torch.bool).tril()[None]
    layout = PassLayout(torch.arange(count)[None], count, mask, 0)
    states = network.run(network.embed(torch.tensor([tokens])), store, layout)
    return network.logits(network.final_norm(states, 1))[0]


def nothing(config: Config) -> Any:
    return np.zeros((0, config.layers, 2 * config.kv_heads * config.head_dim), np.float32)


@pytest.mark.parametrize("config", CONFIGS, ids=["tied", "untied"])
def test_a_tree_after_a_past_scores_as_its_paths_do(config: Config, tmp_path: Path) -> None:
    network = random_network(config, seed=3)
    run, ours = passes(network, tmp_path / "model.onnx"), onnx_graph.rounded(network)
    prompt, nodes, parents = [5, 9, 60, 2, 33], [7, 8, 7, 41, 50, 8], [-1, 0, 0, 1, 2, 4]
    logits, past = run(prompt, [-1, 0, 1, 2, 3], nothing(config))
    assert torch.allclose(torch.tensor(logits), reference(ours, prompt), atol=2e-4)
    logits, new = run(nodes, parents, past)
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 4, 5]]
    for node, path in enumerate(paths):
        expected = reference(ours, prompt + [nodes[one] for one in path])[-1]
        assert torch.allclose(torch.tensor(logits[node]), expected, atol=2e-4), node
    kept = np.concatenate([past, new[[0, 2, 4]]])  # the path that was accepted; the others are never in the past
    logits, _ = run([8, 11], [-1, 0], kept)
    assert torch.allclose(torch.tensor(logits), reference(ours, [*prompt, 7, 7, 50, 8, 11])[-2:], atol=2e-4)


def test_weights_of_q4_1_keep_their_codes() -> None:
    generator = torch.Generator().manual_seed(1)
    scales = (torch.rand(40, 6, 1, generator=generator) + 0.5).half().float() * 2**-6
    offsets = torch.randint(3 * 16, 12 * 16, (40, 6, 1), generator=generator) / 16
    codes = torch.randint(0, 16, (40, 6, 32), generator=generator)
    codes[..., 0], codes[..., 1] = 0, 15
    weight = ((codes - offsets) * scales).flatten(1)
    made = onnx_graph.Blocks.of(weight, 4)
    assert torch.equal(torch.stack([made.codes & 15, made.codes >> 4], 3).flatten(2).long(), codes)
    assert torch.allclose(made.weight(), weight, atol=1e-3 * float(weight.abs().max()))
    eight = onnx_graph.Blocks.of(weight, 8).weight()
    assert (eight - weight).abs().max() <= weight.abs().max() / 250


def test_other_parts_are_refused(tmp_path: Path) -> None:
    network = random_network(Config(**SMALL, intermediate_size=40, qk_norm=True, architecture="qwen3"))
    with pytest.raises(Incompatible, match="'qwen3' with other parts"):
        onnx_graph.write(network, tmp_path / "model.onnx", tmp_path / "weights.bin")
