"""Progress bars in the terminal for benchmarks and other long work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.core.bench.runner import Bench


def go(bench: Bench, console: Console) -> bool:
    """Run a benchmark under a progress bar; False if Ctrl-C stopped it."""
    with bar(console, bench.turns) as step:
        try:
            for name in bench.go():
                step(name)
        except KeyboardInterrupt:
            console.print("Stopped; these are the results so far.")
            return False
    return True


@contextmanager
def bar(console: Console, total: int, title: str = "Measuring") -> Iterator[Any]:
    """A progress bar; yields `step(name, done, count)`, which advances it by one, or to `done` of `count`."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn(title),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("warming up", total=total)

        def step(name: str, done: int | None = None, count: int | None = None) -> None:
            advance = 1 if done is None else None
            progress.update(task, advance=advance, completed=done, total=count, description=name)

        yield step
