"""`outrider doctor --speed`: memory bandwidth, arithmetic throughput and the overhead of the decoding loop.

Calls the measuring functions of the core and prints their results; loads no models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from outrider.app.commands.threads import threads

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.core.bench.overhead import Overhead
    from outrider.core.cost.theory import Machine

PRECISIONS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes per weight
VOCABULARY = 49_152
_SECONDS, _STEPS = 0.5, 60
Progress = Callable[[str], object]

READING = {
    "GB/s": "bandwidth of reading weights from memory: the upper bound of a pass over one token",
    "Gop/s": "a large matrix product, in billions of operations per second",
    "µs per op": "the overhead of calling the smallest operation",
    "free tokens": "how many tokens a pass of a dense model scores in the time of one: where drafts stop being free",
}
SPENDING = {
    "drafting": "the drafter's part: distributions, sampling or ranking tokens, the tree",
    "loop": "the rule and the rest: the target's distributions, verdict, commit, trace",
    "untraced": "the same without recording nodes",
    "accepted": "draft tokens accepted per round, of 16; more accepted tokens mean more work for the rule",
}


@dataclass(frozen=True)
class Speed:
    """The measurements."""

    machines: list[Machine]  # one per device and precision
    unsupported: list[str]  # devices and precisions without matrix products
    threads: int  # of torch on the CPU
    vocabulary: int
    loop: list[Overhead]  # on one thread

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def devices() -> list[str]:
    import torch

    names = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [*names, "mps"] if torch.backends.mps.is_available() else names


def measure(
    progress: Progress = lambda description: None,
    *,
    seconds: float = _SECONDS,
    steps: int = _STEPS,
    vocabulary: int = VOCABULARY,
) -> Speed:
    """Measure everything, in about half a minute. `progress` is called with a description of each step."""
    import torch

    from outrider.core.bench import overhead
    from outrider.core.cost import theory

    machines: list[Machine] = []
    unsupported: list[str] = []
    for device in devices():
        for precision in PRECISIONS:
            progress(f"Measuring {device} in {precision} ...")
            try:
                machines.append(theory.measure(device, getattr(torch, precision), seconds))
            except (RuntimeError, TypeError):  # no kernel for this precision, or out of memory
                unsupported.append(f"{device} {precision}")
    progress("Measuring the loop ...")
    with threads(1):
        loop = overhead.measure_loop(vocabulary, steps)
    return Speed(machines, unsupported, torch.get_num_threads(), vocabulary, loop)


def free_tokens(machine: Machine) -> float:
    """Free tokens of a dense model: two operations for each weight and token."""
    from outrider.core.cost.theory import Workload
    from outrider.core.cost.theory import free_tokens as free

    return free(machine, Workload(weight_bytes=PRECISIONS[machine.dtype], flops_per_token=2))


def draw(console: Console, speed: Speed) -> None:
    """Print both tables, with a line on each column."""
    _table(
        console,
        f"This machine, {speed.threads} threads",
        ["device", "precision"],
        READING,
        [
            [
                machine.device,
                machine.dtype,
                f"{machine.bandwidth / 1e9:.1f}",
                f"{machine.flops / 1e9:,.0f}",
                f"{machine.launch * 1e6:.1f}",
                f"{free_tokens(machine):.0f}",
            ]
            for machine in speed.machines
        ],
    )
    if speed.unsupported:
        console.print(f"Not supported by torch: {', '.join(speed.unsupported)}\n")
    _table(
        console,
        f"The decoding loop on one thread: ms per round, 16 draft tokens, {speed.vocabulary:,} tokens",
        ["draft", "sampling"],
        SPENDING,
        [
            [
                row.draft,
                row.sampling,
                f"{row.drafting:.2f}",
                f"{row.loop:.2f}",
                f"{row.loop_untraced:.2f}",
                f"{row.accepted:.1f}",
            ]
            for row in speed.loop
        ],
    )
    console.print("Other running programs affect every figure; measure on an idle machine.")


def _table(console: Console, title: str, names: list[str], columns: Mapping[str, str], rows: list[list[str]]) -> None:
    """A table with names on the left and numbers on the right, and a line on each column below."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    from outrider.app.viz.fitted import Fitted

    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for name in names:
        table.add_column(name, style="cyan")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(Fitted(table))
    for column, description in columns.items():
        console.print(Text.assemble((f"{column}: ", "bold"), description))
    console.print()
