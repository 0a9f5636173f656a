"""Layers that are streamed compute what layers that stay compute, to the last bit, within the budget."""

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
from outrider.core.engine.offload import Shelf, streamed
from outrider.core.engine.quantization.quantize import quantised
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.errors import Incompatible, InvalidOption
from outrider.core.methods import make_rule
from outrider.core.tree import Tree

CONFIG = Config(vocabulary=64, hidden_size=32, layers=7, heads=2, kv_heads=1, head_dim=32, intermediate_size=64)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7]]


def network(form: str) -> Network:
    dtype = torch.float32 if form == "float32" else torch.bfloat16
    made = random_network(CONFIG, 3, dtype=dtype)
    return quantised(made, int(form[3:])) if form.startswith("int") else made.map_linears(fastest)


@pytest.mark.parametrize("form", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("layers", [1, 2, 3, 5, 6, 7])
def test_no_bit_differs(form: str, layers: int, tmp_path: Path) -> None:
    whole = Decoder(network(form))
    under, shelf = streamed(network(form), layers / 7, folder=tmp_path)
    assert shelf.held <= layers * shelf.size
    assert shelf.resident == (7 if layers == 7 else max(layers - 2, 0))
    model = Decoder(under)
    for one in (whole, model):
        one.begin(PROMPTS, Sampling())
    guess = Draft.guess(torch.tensor([[5, 6, 7], [8, 9, 1]]), Tree.of((-1, -1, 0)), torch.ones(2, 3).bool())
    for _ in range(3):
        assert torch.equal(whole.score(guess).logits(), model.score(guess).logits())
    if layers < 7:
        assert shelf.read >= (shelf.passes - 1) * shelf.streamed * shelf.size > 0
        assert model.weight_bytes == whole.weight_bytes
    shelf.close()


def test_a_resident_drafter_with_a_big_tree(tmp_path: Path) -> None:
    """The same tokens, in far fewer passes over the streamed layers."""
    plain, shelf = streamed(network("float32"), 0.3, folder=tmp_path)
    steps = list(
        decode(Decoder(plain), None, make_rule("exact"), PROMPTS, sampling=Sampling(temperature=0), max_new_tokens=20)
    )
    passes = shelf.passes
    small = Decoder(random_network(CONFIG, 3))
    drafter = SpecExec(small, nodes=40, batch=4, width=4, passes=12)
    fast = list(
        decode(
            Decoder(plain), drafter, make_rule("exact"), PROMPTS, sampling=Sampling(temperature=0), max_new_tokens=20
        )
    )
    for row in range(2):
        found, wanted = (
            [token for step in every if step.row == row for token in step.emitted] for every in (fast, steps)
        )
        assert found == wanted
    assert shelf.passes - passes < passes / 3
    shelf.close()


def test_layers_out_of_turn_are_read_again(tmp_path: Path) -> None:
    shelf = Shelf(5, 2 / 5, folder=tmp_path)
    kept = [shelf.put(layer) for layer in random_network(CONFIG, 1).layers[:5]]
    for index in (0, 1, 4, 2, 3, 4, 0, 0, 3):
        shelf.arrive(index)
        assert torch.equal(kept[index].qkv.weight, random_network(CONFIG, 1).layers[index].qkv.weight)
    shelf.close()


def test_what_cannot_be_is_said(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="one layer has"):
        streamed(network("float32"), 0.1, folder=tmp_path)
    with pytest.raises(InvalidOption, match="give bytes"):
        streamed(network("float32"), 0)
    under, shelf = streamed(network("float32"), 0.5, folder=tmp_path)
    model = Decoder(under)
    model.begin(PROMPTS, Sampling())
    with pytest.raises(Incompatible, match="offloaded"):
        model.view(exit=2)
    shelf.close()
