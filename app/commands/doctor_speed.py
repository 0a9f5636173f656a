"""What `outrider doctor --speed` measures: how fast this machine reads and multiplies, and what our own loop costs.

Knows the measuring functions of the core and how to draw what they found; nothing of models.
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

PRECISIONS = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes a weight
VOCABULARY = 49_152
_SECONDS, _STEPS = 0.5, 60
Tell = Callable[[str], object]

READING = {
    "GB/s": "weights streamed from memory; one token a pass cannot go faster than this",
    "Gop/s": "a large matrix product, in billions of operations a second",
    "µs an op": "what calling the smallest operation takes, however little it computes",
    "free tokens": "how many tokens a pass checks for the price of one, in a dense model: where drafts stop being free",
}
SPENDING = {
    "drafting": "handling the drafts on the drafter's side: its distributions, drawing or ranking tokens, the tree",
    "loop": "rule and the rest together: distributions of the target where needed, verdict, commit, trace",
    "untraced": "the same when no nodes are recorded",
    "accepted": "guesses accepted a step, of 16: the more are accepted, the more there is to judge",
}


@dataclass(frozen=True)
class Speed:
    """What was measured."""

    machines: list[Machine]  # one a device and precision
    unsupported: list[str]  # devices and precisions that can't multiply
    threads: int  # that torch used on the processor
    vocabulary: int
    loop: list[Overhead]  # on one thread

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def devices() -> list[str]:
    import torch

    found = ["cpu", *(f"cuda:{index}" for index in range(torch.cuda.device_count()))]
    return [*found, "mps"] if torch.backends.mps.is_available() else found


def measure(
    tell: Tell = lambda words: None, *, seconds: float = _SECONDS, steps: int = _STEPS, vocabulary: int = VOCABULARY
) -> Speed:
    """Measure everything, which takes about half a minute; `tell` hears what is being done."""
    import torch

    from outrider.core.bench import overhead
    from outrider.core.cost import theory

    machines: list[Machine] = []
    unsupported: list[str] = []
    for device in devices():
        for precision in PRECISIONS:
            tell(f"Measuring {device} in {precision} ...")
            try:
                machines.append(theory.measure(device, getattr(torch, precision), seconds))
            except (RuntimeError, TypeError):  # torch's words for a kernel that isn't there, or memory that is taken
                unsupported.append(f"{device} {precision}")
    tell("Measuring the loop ...")
    with threads(1):
        loop = overhead.measure_loop(vocabulary, steps)
    return Speed(machines, unsupported, torch.get_num_threads(), vocabulary, loop)


def free_tokens(machine: Machine) -> float:
    """Of a model that is all matrix products: two operations for each weight and token."""
    from outrider.core.cost.theory import Workload
    from outrider.core.cost.theory import free_tokens as free

    return free(machine, Workload(weight_bytes=PRECISIONS[machine.dtype], flops_per_token=2))


def draw(console: Console, speed: Speed) -> None:
    """Both tables, each column explained in a line."""
    _table(
        console,
        f"This machine, {speed.threads} threads",
        ["device", "precision"],
        READING,
        [
            [
                one.device,
                one.dtype,
                f"{one.bandwidth / 1e9:.1f}",
                f"{one.flops / 1e9:,.0f}",
                f"{one.launch * 1e6:.1f}",
                f"{free_tokens(one):.0f}",
            ]
            for one in speed.machines
        ],
    )
    if speed.unsupported:
        console.print(f"Not measured, for torch can't: {', '.join(speed.unsupported)}\n")
    _table(
        console,
        f"Our own loop, one thread: ms a step, 16 guesses, {speed.vocabulary:,} tokens",
        ["draft", "sampling"],
        SPENDING,
        [
            [
                one.draft,
                one.sampling,
                f"{one.drafting:.2f}",
                f"{one.loop:.2f}",
                f"{one.loop_untraced:.2f}",
                f"{one.accepted:.1f}",
            ]
            for one in speed.loop
        ],
    )
    console.print("Other programs that compute meanwhile show in every figure: measure on a quiet machine.")


def _table(console: Console, title: str, names: list[str], columns: Mapping[str, str], rows: list[list[str]]) -> None:
    """Names on the left, numbers on the right, and a line on each of these below."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1), pad_edge=False
    )
    for name in names:
        table.add_column(name, style="cyan")
    for column in columns:
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(*row)
    console.print(table)
    for column, words in columns.items():
        console.print(Text.assemble((f"{column}: ", "bold"), words))
    console.print()
