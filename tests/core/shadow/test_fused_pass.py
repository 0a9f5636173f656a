"""A pass by the kernels in Triton: its launches a layer, and the tokens of torch's pass. Triton's interpreter runs the
kernels, and the shadow device counts each call of one as a launch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from outrider.core.batching import ContinuousBatch
from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import PassLayout
from outrider.core.methods import make_drafter, make_rule
from outrider.core.protocol import Plain
from outrider.core.testing.shadow.device import ShadowDevice, shadow_device
from tests.core.shadow.cases import CONFIG, PROMPTS

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels run in Triton's interpreter")


def fused(gpu: ShadowDevice, layers: int = 3) -> Network:
    """A network with the pass by kernels, each of which the shadow device runs and counts."""
    from outrider.core.engine.fused_pass import FusedPass
    from outrider.core.kernels.gpu import functions

    def counted(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: gpu.call(kernel, args, kwargs)

    config = replace(CONFIG, layers=layers, qk_norm=True, attention_bias=True)
    made = random_network(config, 1, dtype=torch.float32, device="cuda")
    made.fused = FusedPass(config, made.layers, made.dtype, made.device)
    names = ("add_norm_", "rotate_and_write_", "tree_attention", "swiglu", "swiglu_product")
    made.fused.kernels = SimpleNamespace(  # type: ignore[assignment]
        MAX_ROWS=functions.MAX_ROWS, **{name: counted(getattr(functions, name)) for name in names}
    )
    return made


def launches(layers: int, count: int, most: int = 64) -> dict[str, int]:
    """Those of a pass over `count` nodes, by name, if products with SwiGLU inside take `most` of them."""
    with shadow_device() as gpu, torch.no_grad():
        made = fused(gpu, layers)
        made.ensure_positions(64)
        assert made.fused is not None
        made.fused.kernels.MAX_ROWS = most
        store = torch.zeros(layers, 1, 4, 96, 8, device="cuda")
        slots = torch.arange(5, 5 + count, device="cuda")[None]
        mask = torch.ones(1, count, 96, dtype=torch.bool, device="cuda")
        x = torch.randn(count, 32, device="cuda")
        gpu.reset()
        made.run(x, store, PassLayout(slots, 96, mask, None, slots))
        assert gpu.counts.waits == 0
        return dict(gpu.counts.kernels)


@pytest.mark.parametrize("count", [1, 7])
def test_a_layer_is_eight_launches(count: int) -> None:
    few, many = launches(1, count), launches(3, count)
    layer = {name: (many[name] - few.get(name, 0)) / 2 for name in many}
    assert {name: times for name, times in layer.items() if times} == {
        "add_norm_": 2,
        "linear": 3,
        "rotate_and_write_": 1,
        "tree_attention": 1,
        "swiglu_product": 1,
    }
    assert sum(layer.values()) == 8


def test_more_tokens_take_nine() -> None:
    few, many = launches(1, 3, 2), launches(2, 3, 2)
    assert sum(many.values()) - sum(few.values()) == 9


def test_the_tokens_are_those_of_torch() -> None:
    def tokens(network: Network) -> list[tuple[int, tuple[int, ...]]]:
        steps = decode(
            Decoder(with_graphs(network)),
            make_drafter("prompt-lookup"),
            make_rule(),
            PROMPTS[1:2],
            sampling=Sampling(temperature=0),
            max_new_tokens=5,
        )
        return [(step.row, step.emitted) for step in steps]

    with shadow_device() as gpu:
        network = fused(gpu, 2)
        found = tokens(network)
        assert network.graphs is not None and network.graphs.pool.replayed > 0
        assert gpu.counts.kernels["tree_attention"] > 0
        plain = fused(gpu, 2)
        plain.fused = None
        assert found == tokens(plain)


def test_a_batch_in_pages_gives_the_tokens_of_rows_alone() -> None:
    """By the kernels, with rows that come and go; captured passes read the table of pages."""
    asked = [(PROMPTS[0] * 10, 3), (PROMPTS[1], 4), (PROMPTS[1], 2)]
    with shadow_device() as gpu:
        network = with_graphs(fused(gpu, 1))
        target = Decoder(network)
        assert target.page == 64
        batch = ContinuousBatch(target, None, make_rule(), sampling=Sampling(temperature=0), rows=2)
        found: dict[int, list[int]] = {batch.add(prompt, limit): [] for prompt, limit in asked}
        for step in batch:
            found[step.row] += step.emitted
        batch.close()
        assert network.graphs is not None and network.graphs.pool.replayed > 0
    plain = random_network(network.config, 1, dtype=torch.float32)
    for number, (prompt, limit) in enumerate(asked):
        alone = decode(
            Decoder(plain), Plain(), make_rule(), [prompt], sampling=Sampling(temperature=0), max_new_tokens=limit
        )
        assert found[number] == [token for step in alone for token in step.emitted]
