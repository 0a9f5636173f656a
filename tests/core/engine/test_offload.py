"""Offloaded layers give the same results as resident ones, to the last bit, within the budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.draft import Draft
from outrider.core.drafters.draft_model.specexec import SpecExec
from outrider.core.engine.linear import fastest
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.offload import LayerOffload, offload_layers
from outrider.core.engine.quantization.quantize import quantize
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import make_rule
from outrider.core.tree import Tree

CONFIG = Config(vocabulary=64, hidden_size=32, layers=7, heads=2, kv_heads=1, head_dim=32, intermediate_size=64)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]


def network(form: str) -> Network:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    dense = random_network(CONFIG, 3, dtype=dtype)
    return quantize(dense, int(form[3:])) if form.startswith("int") else dense.map_linears(fastest)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 7])
def test_results_are_bit_identical(form: str, layers: int, tmp_path: Path) -> None:
    resident = Decoder(network(form))
    offloaded, state = offload_layers(network(form), layers / 7, folder=tmp_path)
    assert state.held_bytes <= layers * state.layer_bytes
    assert state.resident == (7 if layers == 7 else max(layers - 2, 0))
    model = Decoder(offloaded)
    for decoder in (resident, model):
        decoder.begin(PROMPTS, Sampling())
    guess = Draft.guess(torch.tensor([[5, 6, 7], [8, 9, 1]]), Tree.of((-1, -1, 0)), torch.ones(2, 3).bool())
    for _ in range(3):
        assert torch.equal(resident.score(guess).logits(), model.score(guess).logits())
    if layers < 7:
        assert state.read_bytes >= (state.passes - 1) * state.offloaded * state.layer_bytes > 0
        assert model.weight_bytes == resident.weight_bytes
    state.close()


def test_a_large_tree_of_a_resident_drafter_saves_passes(tmp_path: Path) -> None:
    offloaded, state = offload_layers(network("float32"), 0.3, folder=tmp_path)

    def tokens(drafter: SpecExec | None) -> list[list[int]]:
        greedy, rows = Sampling(temperature=0), list[list[int]]([[], []])
        steps = decode(Decoder(offloaded), drafter, make_rule("exact"), PROMPTS, sampling=greedy, max_new_tokens=20)
        for step in steps:
            rows[step.row] += step.emitted
        return rows

    plain, passes = tokens(None), state.passes
    assert tokens(SpecExec(Decoder(random_network(CONFIG, 3)), nodes=40, batch=4, width=4, passes=12)) == plain
    assert state.passes - passes < passes / 3
    state.close()


def test_layers_out_of_order_are_read_again(tmp_path: Path) -> None:
    state = LayerOffload(5, 2 / 5, folder=tmp_path)
    layers = [state.add(layer) for layer in random_network(CONFIG, 1).layers[:5]]
    for index in (0, 1, 4, 2, 3, 4, 0, 0, 3):
        state.load(index)
        assert torch.equal(layers[index].qkv.weight, random_network(CONFIG, 1).layers[index].qkv.weight)
    state.close()


def test_invalid_budgets_and_views_of_offloaded_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="one layer has"):
        offload_layers(network("float32"), 0.1, folder=tmp_path)
    with pytest.raises(InvalidOption, match="give bytes"):
        offload_layers(network("float32"), 0)
    offloaded, state = offload_layers(network("float32"), 0.5, folder=tmp_path)
    model = Decoder(offloaded)
    model.begin(PROMPTS, Sampling())
    with pytest.raises(Incompatible, match="offloaded"):
        model.view(exit=2)
    state.close()
