"""Simulation of speculative decoding on other hardware, from the steps of a measured trace.

A pass takes time to read weights, to compute, and a constant per layer; a step is the drafter's passes, one target pass
and bookkeeping. A device is fitted to two traces from it (plain decoding, and chains of four tokens by a small model),
or comes from a table with sources. Tokens per step are the trace's, since drafting and acceptance do not depend on the
device. Unpacking quantized weights is measured separately, on the matrices alone. Processing in memory (SpecPIM, DOI
10.1145/3620666.3651352) is simulated as the drafter in memory and the target on the processor, without SpecPIM's search
over architectures. Nothing was measured on the devices of the table, which `Simulation` says wherever it is shown.
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
_OVERLAPPED = 8.0  # `overlap` of a device that reads while it computes


@dataclass(frozen=True)
class Model:
    """The work of a model's pass."""

    weight_bytes: float
    flops_per_token: float
    layers: int
    unpacking: tuple[float, float] = (1.0, 0.0)  # reading time relative to 16-bit weights; increase per further token

    def share(self, part: float, layers: int) -> Model:
        """A model that reads the share `part` of this one's bytes, in 16 bits: two bytes and two operations per
        weight."""
        return Model(part * self.weight_bytes, part * self.weight_bytes, layers)


@dataclass(frozen=True)
class Device:
    """A device's parameters; `source` says where they come from."""

    name: str
    bandwidth: float  # bytes per second
    flops: float  # per second, in 16 bits
    layer: float = 0.0  # constant seconds per layer
    call: float = 0.0  # constant seconds per pass
    step: float = 0.0  # seconds of bookkeeping per step
    node: float = 0.0  # seconds of bookkeeping per drafted token
    devices: int = 1  # number that share each layer
    link: float = math.inf  # bytes per second between them
    hop: float = 0.0  # minimum seconds of an exchange
    drafter: Device | None = None  # the device of the drafter, if another
    overlap: float = _OVERLAPPED  # p of the p-norm of reading and arithmetic: 1 adds them, infinity is a roofline
    source: str = ""

    def seconds(self, model: Model, tokens: float, width: int = 0) -> float:
        """The time of a pass; devices that share layers exchange `width` values per token, twice per layer."""
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
    """The draft and the result of one measured step."""

    nodes: int
    passes: int  # of the drafter's model
    read: float  # bytes read by the drafter, in target passes
    emitted: int


@dataclass(frozen=True)
class Workload:
    """The steps of a drafter, whose model has `layers` layers. The time of drafters without a model is neglected."""

    name: str
    shapes: tuple[Shape, ...]
    layers: int = 0

    @classmethod
    def of(cls, name: str, steps: Iterable[Step], *, layers: int = 0) -> Workload:
        """From a trace. A model's chain takes a pass per token; any other draft takes one pass, or none without a
        model."""
        shapes = []
        for step in steps:
            nodes, read = len(step.drafted), step.cost - 1
            chain = bool(layers) and step.parents == tuple(range(-1, nodes - 1))
            passes = 0 if read <= 0 else nodes if chain else 1
            shapes.append(Shape(nodes, passes, read, len(step.emitted)))
        if not shapes:
            raise InvalidOption(f"the trace of {name} has no steps to simulate")
        return cls(name, tuple(shapes), layers)

    @property
    def tokens_per_pass(self) -> float:
        return sum(shape.emitted for shape in self.shapes) / len(self.shapes)


@dataclass(frozen=True)
class Simulation:
    """A simulated speed, not a measurement."""

    drafter: str
    device: str
    tokens_per_second: float
    plain: float  # tokens per second without drafting

    @property
    def speedup(self) -> float:
        return self.tokens_per_second / self.plain

    def __str__(self) -> str:
        return (
            f"{self.drafter} on {self.device}: {self.speedup:.2f}x, {self.tokens_per_second:.0f} tokens per second "
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
    """The speed of these steps on a device, and that of plain decoding."""
    drafting = device.drafter or device
    seconds = 0.0
    for shape in work.shapes:
        if shape.passes:
            small = model.share(shape.read / shape.passes, work.layers)
            tokens = 1 if shape.passes == shape.nodes else max(shape.nodes, 1)
            seconds += shape.passes * drafting.seconds(small, tokens)
        seconds += device.seconds(model, shape.nodes + 1, width) + device.step + shape.nodes * device.node
    plain = device.seconds(model, 1, width) + device.step
    return Simulation(work.name, device.name, sum(shape.emitted for shape in work.shapes) / seconds, 1 / plain)


# ---- devices fitted to measurements


def fit(name: str, model: Model, plain: Sequence[Step], drafted: Sequence[Step], *, tokens: int = 4) -> Device:
    """A device fitted to two traces from it: plain decoding, and chains of `tokens` tokens by a small model.

    Five measured times (a target pass over one token and over the draft, a pass of the drafter, bookkeeping with and
    without a draft) give five parameters: arithmetic from the difference of the two target passes, the constant per
    pass from the drafter's short passes, bandwidth from the remainder of the plain pass. Reading and arithmetic add up,
    as on few cores (the fits of outrider.core.cost.theory have their knee near one token there)."""
    whole = [step for step in drafted if len(step.drafted) == tokens]
    if not plain or not whole:
        raise InvalidOption(f"a fit needs steps of plain decoding, and steps with {tokens} drafted tokens")
    one, many = _typical(step.times.score for step in plain), _typical(step.times.score for step in whole)
    draft = _typical(step.times.draft for step in whole) / tokens
    share = mean(step.cost - 1 for step in whole) / tokens
    if not 0 < share < 1:
        raise InvalidOption(f"the drafter reads {share:.2f} of what the target reads; it must be a smaller model")
    token = max((many - one) / tokens, 0.01 * one / tokens)
    # one = reading + token + call; draft = share (reading + token) + call
    call = min(max((draft - share * one) / (1 - share), 0.0), 0.9 * max(one - token, 0.0))
    reading = max(one - token - call, 0.05 * one)
    idle, busy = (_typical(step.times.rule + step.times.rest for step in steps) for steps in (plain, whole))
    return Device(
        name,
        model.weight_bytes / reading,
        model.flops_per_token / token,
        call=call,
        step=idle,
        node=max(busy - idle, 0.0) / tokens,
        overlap=1.0,
        source=f"fitted to plain decoding and chains of {tokens}",
    )


def unpacking(fewer: Mapping[int, float], whole: Mapping[int, float], ratio: float) -> tuple[float, float]:
    """`Model.unpacking` from the seconds of a model's matrix products by number of tokens, with quantized weights
    (`fewer`) and in 16 bits (`whole`); `ratio` is the quotient of their bytes, 16 bits over quantized."""
    few, many = min(whole), max(whole)
    further = ((fewer[many] - fewer[few]) - (whole[many] - whole[few])) / (many - few) if many > few else 0.0
    return ratio * fewer[few] / whole[few], ratio * max(further, 0.0) / whole[few]


def _typical(values: Iterable[float]) -> float:
    """The mean without the lowest and the highest tenth."""
    ordered = sorted(values)
    cut = len(ordered) // 10
    return mean(ordered[cut : len(ordered) - cut])


# ---- devices


def shared(device: Device, devices: int, link: float, hop: float, source: str = "") -> Device:
    """Several devices that share each layer (tensor parallelism)."""
    if devices < 1:
        raise InvalidOption(f"devices is {devices}; it must be 1 or more")
    name = f"{devices} x {device.name}"
    return replace(device, name=name, devices=devices, link=link, hop=hop, source=source or device.source)


_PIM = Device(
    "HBM2-PIM stack",
    1.2e12,
    1.2e12,
    source=(
        "1.2 TFLOPS in 16 bits: Maximum PC, April 2021; internal bandwidth taken as four times the 0.3 TB/s of a stack "
        "of HBM2 at 2.4 Gbit/s per pin, as Samsung states it (the same, and AnandTech on Aquabolt)"
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
    device.name: device
    for device in (
        _H100,
        shared(
            _H100,
            4,
            450e9,
            1e-5,
            _H100.source + "; NVLink 900 GB/s in both directions, so 450 in one; 10 us per exchange are assumed",
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
ASSUMED = "for these devices the constant times per layer and step are assumed, not sourced"
