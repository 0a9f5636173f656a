"""Cases of the device suite: one generation on the CPU and the same on a device, round by round. The device is the
shadow device, and where there is a GPU (tests marked `gpu`) that too.

`OUTRIDER_SHADOW=all` (`make shadow`) runs whole products and 2,000 rounds; without it a seeded part of them runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

from outrider.core.decode import decode
from outrider.core.distribution import Sampling
from outrider.core.engine.captured_passes import with_graphs
from outrider.core.engine.network import Network, random_network
from outrider.core.engine.transformer import Decoder
from outrider.core.engine.types import Config
from outrider.core.methods import DRAFTERS, RULES, make_rule
from outrider.core.methods.row import Method
from outrider.core.protocol import Drafter
from outrider.core.testing.conformance import trial_drafter
from outrider.core.testing.cuda_device import cuda_device
from outrider.core.testing.shadow.device import shadow_device
from outrider.core.trace import Step

Device = Callable[..., AbstractContextManager[Any]]  # a context in which "cuda" is that device and is counted
DEVICES = [pytest.param(shadow_device, id="shadow"), pytest.param(cuda_device, id="cuda", marks=pytest.mark.gpu)]
ALL = os.environ.get("OUTRIDER_SHADOW") == "all"
CONFIG = Config(vocabulary=61, hidden_size=32, layers=3, heads=4, kv_heads=2, head_dim=8, intermediate_size=64)
PROMPTS = [[1, 2, 3, 4, 5, 2, 3], [6, 7], [8, 9, 8, 9, 8]]
SAMPLINGS = {"greedy": Sampling(temperature=0), "top-p": Sampling(top_p=0.9)}
RELAXED = [name for name, rule in RULES.items() if rule.lossless is False and not rule.inputs]

# Waits of the host in a round, where one is not enough.
WAITS = {
    "cross-vocabulary": 4,  # drafted tokens are translated as text, between the draft model's passes
    "cs-drafting": 4,  # the inner drafter looks n-grams up on the host, between the draft model's passes
    "swift": 4,  # its layer search reads the rows' texts, and on the host how many tokens a set of layers predicts
}


@dataclass
class Outcome:
    """The steps of a generation, and on the shadow device what each round cost."""

    steps: list[tuple[Any, ...]] = field(default_factory=list)
    waits: list[int] = field(default_factory=list)  # a round, pageable uploads included, those of captures not
    captures: list[int] = field(default_factory=list)
    places: list[Any] = field(default_factory=list)  # of the round with the most waits

    @property
    def steady(self) -> int:
        """The most waits in a round without a capture, the first two left out, as they fill caches; the fewest in any
        round if each captured something."""
        rounds = list(zip(self.waits, self.captures, strict=True))[2:]
        return max((waits for waits, captures in rounds if not captures), default=min(self.waits))


def network(device: str, damping: float = 1e-6, config: Config = CONFIG, dtype: torch.dtype = torch.float64) -> Network:
    """Random weights, captured in graphs on a device. Damped norms make a model that is right half of the time."""
    return with_graphs(random_network(replace(config, norm_eps=damping), 1, dtype=dtype, device=device))


def drafter_on(device: str, method: Method, options: int = 0) -> Drafter:
    """The method's drafter with these of its test options."""
    damping = 1e-6 if method.draft_head else 0.3
    return trial_drafter(method, method.test_options[options], lambda: Decoder(network(device, damping)))


def outcome(steps: Iterator[Step], gpu: Any = None) -> Outcome:
    """Run a generation and count by round, if on a device."""
    result, index, known = Outcome(), -1, (0, 0)
    if gpu is not None:
        gpu.reset()
    for step in steps:
        if gpu is not None and step.index != index:
            index, counts = step.index, gpu.counts
            waits, captures = counts.waits + counts.pageable - counts.captures, counts.captures
            result.waits.append(waits - known[0])
            result.captures.append(captures - known[1])
            known = waits, captures
        result.steps.append((step.row, step.emitted, step.sources))
    if gpu is not None:
        result.places = gpu.counts.places.most_common(6)
    return result


def generate(device: str, name: str, rule: str, sampling: str, rows: int, gpu: Any = None, tokens: int = 16) -> Outcome:
    """Decode with our decoder as the target."""
    drafter = drafter_on(device, DRAFTERS[name])
    steps = decode(
        Decoder(network(device)),
        drafter,
        make_rule(rule),
        PROMPTS[:rows],
        sampling=SAMPLINGS[sampling],
        max_new_tokens=tokens,
        seed=1,
    )
    return outcome(steps, gpu)
