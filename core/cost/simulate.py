"""Simulation of speculative decoding on hardware that isn't here: a cost model fed by shapes that were measured.

A pass reads its weights and computes, the longer of the two or both, and each of its layers takes a moment beside; a
step is what its drafter reads, one pass over the draft, and bookkeeping. What a machine can do is fitted to two traces
from it (plain decoding, and a small model that drafts four tokens), or taken from a table of devices with sources. How
many tokens come of a step is the trace's own: drafting and accepting don't depend on the machine. Weights in fewer bits
are unpacked before they are multiplied, which on few cores takes longer than reading them; how much longer is no matter
of decoding, and is measured by the matrices alone.

Systems that share the work between a processor and memory that computes (SpecPIM, DOI 10.1145/3620666.3651352) are
simulated in the simplest way, the drafter in memory and the target on the processor; SpecPIM's search over
architectures and data flows is left out. Nothing here was ever measured on the devices of the table: whatever comes of
this module is a simulation, and `Simulation` says so wherever it is shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import mean
from typing import Any

from outrider.core.errors import InvalidOption
from outrider.core.trace import Step

WORD = "simulation"
_TOGETHER = 8.0  # `overlap` of a device that reads while it computes


@dataclass(frozen=True)
class Model:
    """What a pass of a model needs."""

    weight_bytes: float
    flops_per_token: float
    layers: int
    unpacking: tuple[float, float] = (1.0, 0.0)  # times as long as reading 16 bits; more for each further token

    def share(self, part: float, layers: int) -> Model:
        """A model whose passes read so much of this one's bytes, in 16 bits: two bytes and two operations a number."""
        return Model(part * self.weight_bytes, part * self.weight_bytes, layers)


@dataclass(frozen=True)
class Device:
    """A machine as the model sees it. `source`: where its figures come from."""

    name: str
    bandwidth: float  # bytes a second
    flops: float  # a second, 16 bits
    layer: float = 0.0  # seconds that a layer takes beside
    call: float = 0.0  # seconds that a pass takes beside
    step: float = 0.0  # seconds of bookkeeping a step
    node: float = 0.0  # and for each drafted token
    devices: int = 1  # that share each layer
    link: float = math.inf  # bytes a second between them
    hop: float = 0.0  # seconds that an exchange takes at least
    drafter: Device | None = None  # where the drafter runs, if elsewhere
    overlap: float = _TOGETHER  # of reading and arithmetic, a p-norm: 1 is one after the other, infinity a roofline
    source: str = ""

    def seconds(self, model: Model, tokens: float, width: int = 0) -> float:
        """One pass over so many tokens; `width`: numbers that shared layers exchange for each, twice a layer."""
        first, further = model.unpacking
        reading = model.weight_bytes * (first + further * (tokens - 1)) / self.bandwidth / self.devices
        computing = tokens * model.flops_per_token / self.flops / self.devices
        longer, shorter = max(reading, computing), min(reading, computing)
        both = longer * math.pow(1 + math.pow(shorter / longer, self.overlap), 1 / self.overlap) if longer else 0.0
        exchanged = 0.0
        if self.devices > 1:
            exchanged = 2 * model.layers * (self.hop + 2 * tokens * width / self.link)
        return both + model.layers * self.layer + self.call + exchanged


@dataclass(frozen=True)
class Shape:
    """One step as it was measured: what was drafted and what came of it."""

    nodes: int
    passes: int  # of the drafter's model
    read: float  # by the drafter, in passes of the target by the bytes they read
    emitted: int


@dataclass(frozen=True)
class Workload:
    """Steps of a drafter on a target; `layers` of the drafter's model. What a drafter without a model takes is nothing
    beside a pass, and left out."""

    name: str
    shapes: tuple[Shape, ...]
    layers: int = 0

    @classmethod
    def of(cls, name: str, steps: Iterable[Step], *, layers: int = 0) -> Workload:
        """From a trace: a chain that a model drafts is a pass a token, whatever else is one pass or none."""
        shapes = []
        for step in steps:
            nodes, read = len(step.drafted), step.cost - 1
            chain = bool(layers) and step.parents == tuple(range(-1, nodes - 1))
            passes = 0 if read <= 0 else nodes if chain else 1
            shapes.append(Shape(nodes, passes, read, len(step.emitted)))
        if not shapes:
            raise InvalidOption(f"the trace of {name} has no steps; there is nothing to simulate")
        return cls(name, tuple(shapes), layers)

    @property
    def tokens_per_pass(self) -> float:
        return sum(one.emitted for one in self.shapes) / len(self.shapes)


@dataclass(frozen=True)
class Simulation:
    """A speed that nobody has measured."""

    drafter: str
    device: str
    tokens_per_second: float
    plain: float  # tokens a second without drafting

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain

    def __str__(self) -> str:
        return (
            f"{self.drafter} on {self.device}: {self.speedup:.2f}x, {self.tokens_per_second:.0f} tokens a second "
            f"({WORD})"
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": WORD,
            "drafter": self.drafter,
            "device": self.device,
            "tokens_per_second": self.tokens_per_second,
            "plain_tokens_per_second": self.plain,
            "speedup": self.speedup,
        }


def simulate(device: Device, model: Model, work: Workload, *, width: int = 0) -> Simulation:
    """How fast these steps would go there, beside a token a pass."""
    drafting = device.drafter or device
    seconds = 0.0
    for one in work.shapes:
        if one.passes:
            small = model.share(one.read / one.passes, work.layers)
            tokens = 1 if one.passes == one.nodes else max(one.nodes, 1)
            seconds += one.passes * drafting.seconds(small, tokens)
        seconds += device.seconds(model, one.nodes + 1, width) + device.step + one.nodes * device.node
    plain = device.seconds(model, 1, width) + device.step
    return Simulation(work.name, device.name, sum(one.emitted for one in work.shapes) / seconds, 1 / plain)


# ---- fitted to what was measured


def fit(name: str, model: Model, plain: Sequence[Step], drafted: Sequence[Step], *, tokens: int = 4) -> Device:
    """A machine from two traces: plain decoding, and a small model that drafts chains of `tokens`.

    Five times are known (a pass over one token and over five, one of the drafter, bookkeeping without a draft and with
    one) and give five figures: arithmetic comes of how much longer the longer pass takes, what a pass takes beside of
    the drafter's, which are short, and bandwidth of what is left of the plain pass. Reading and arithmetic are taken to
    follow one another, as the passes of a few cores do (outrider.core.cost.theory's fits have their knee at about one
    token)."""
    whole = [step for step in drafted if len(step.drafted) == tokens]
    if not plain or not whole:
        raise InvalidOption(f"a fit needs steps of plain decoding, and some in which {tokens} tokens were drafted")
    one, many = _typical(step.times.score for step in plain), _typical(step.times.score for step in whole)
    draft = _typical(step.times.draft for step in whole) / tokens
    share = mean(step.cost - 1 for step in whole) / tokens
    if not 0 < share < 1:
        raise InvalidOption(f"the drafter reads {share:.2f} of what the target reads; it must be a smaller model")
    token = max((many - one) / tokens, 0.01 * one / tokens)
    # one = reading + token + call; draft = share (reading + token) + call
    call = min(max((draft - share * one) / (1 - share), 0.0), 0.9 * max(one - token, 0.0))
    reading = max(one - token - call, 0.05 * one)
    still, busy = (_typical(step.times.rule + step.times.rest for step in steps) for steps in (plain, whole))
    return Device(
        name,
        model.weight_bytes / reading,
        model.flops_per_token / token,
        call=call,
        step=still,
        node=max(busy - still, 0.0) / tokens,
        overlap=1.0,
        source=f"fitted to plain decoding and chains of {tokens}",
    )


def unpacking(fewer: Mapping[int, float], whole: Mapping[int, float], ratio: float) -> tuple[float, float]:
    """What reading fewer bits takes beside reading as many bytes of 16: from the seconds that a model's matrices take
    by themselves, by tokens at once, in either precision; `ratio`: bytes in 16 bits for each byte in fewer."""
    few, many = min(whole), max(whole)
    further = ((fewer[many] - fewer[few]) - (whole[many] - whole[few])) / (many - few) if many > few else 0.0
    return ratio * fewer[few] / whole[few], ratio * max(further, 0.0) / whole[few]


def _typical(values: Iterable[float]) -> float:
    """The mean without the slowest and the quickest tenth."""
    held = sorted(values)
    cut = len(held) // 10
    return mean(held[cut : len(held) - cut])


# ---- devices


def shared(device: Device, devices: int, link: float, hop: float, source: str = "") -> Device:
    """The same several times over, each layer shared (tensor parallelism)."""
    if devices < 1:
        raise InvalidOption(f"devices is {devices}; it must be 1 or more")
    name = f"{devices} x {device.name}"
    return replace(device, name=name, devices=devices, link=link, hop=hop, source=source or device.source)


_PIM = Device(
    "HBM2-PIM stack",
    1.2e12,
    1.2e12,
    source=(
        "1.2 TFLOPS in 16 bits: Maximum PC, April 2021; bandwidth inside taken as four times the 0.3 TB/s of a stack "
        "of HBM2 at 2.4 Gbit/s a pin, as Samsung states it (the same, and AnandTech on Aquabolt)"
    ),
)
_H100 = Device(
    "H100 SXM",
    3.35e12,
    989e12,
    layer=2e-5,
    step=1e-4,
    source="3.35 TB/s, 989 TFLOPS in bfloat16 without sparsity: glennklockwood.com/garden/processors/h100",
)
DEVICES: Mapping[str, Device] = {
    one.name: one
    for one in (
        _H100,
        shared(
            _H100,
            4,
            450e9,
            1e-5,
            _H100.source + "; NVLink 900 GB/s in both directions, so 450 in one; 10 us an exchange is assumed",
        ),
        Device(
            "RTX 4090",
            1.008e12,
            165e12,
            layer=2e-5,
            step=1e-4,
            source="1,008 GB/s, 165 TFLOPS in 16 bits without sparsity: waredb.com/processor/nvidia-geforce-rtx-4090",
        ),
        Device(
            "Jetson Orin Nano Super",
            102e9,
            16.75e12,
            layer=5e-5,
            step=2e-4,
            source="102 GB/s, 67 TOPS in sparse 8 bits, of which a quarter is taken for dense 16 bits: "
            "Jetson Orin Nano Super datasheet, by way of brojogopalsapui.com",
        ),
        replace(_PIM, name="HBM2-PIM alone", layer=1e-6, step=1e-4),
        replace(
            _H100,
            name="H100 SXM, drafter in HBM2-PIM",
            drafter=replace(_PIM, layer=1e-6),
            source=f"{_H100.source}; the drafter on {_PIM.name}: {_PIM.source}",
        ),
    )
}
ASSUMED = "what a layer and a step take beside reading and arithmetic is assumed for these devices, not sourced"
