"""The picture of `outrider advise`: predicted speedup by draft length, and by batch size. matplotlib is imported when
it is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from outrider.core.advice.advise import Advice

_LINES = 5  # drafters of the left picture


def draw(given: Advice, sizes: Sequence[int], path: Path) -> None:
    """Write the picture; the file's suffix says the format."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    for each in given.best[:_LINES]:
        candidate, lengths = each.candidate, each.candidate.lengths
        if lengths == (0,):
            left.axhline(each.speedup, linestyle=":", linewidth=1, label=f"{candidate.name}")
            continue
        predicted = [given.machine.predict(candidate, length) for length in lengths]
        (line,) = left.plot(lengths, [one.speedup for one in predicted], marker=".", label=candidate.name)
        band = [one.low for one in predicted], [one.high for one in predicted]
        left.fill_between(lengths, *band, color=line.get_color(), alpha=0.12)
    left.set_xlabel("draft tokens (dotted: chosen by the drafter)")
    left.set_ylabel("predicted speedup, one row")
    if given.best:
        first = given.best[0].candidate
        for length in (length for length in first.lengths if length in (0, 1, 2, 3, 5, 8, 12, 16)):
            speeds = [given.machine.speedup(first, length, rows) for rows in sizes]
            right.plot(sizes, speeds, marker=".", label=f"{length} tokens" if length else first.name)
        right.set_title(first.name)
    right.set_xlabel("batch size")
    right.set_xscale("log", base=2)
    right.set_xticks(list(sizes), [str(size) for size in sizes])
    for axes in (left, right):
        axes.axhline(1, color="#808080", linewidth=0.8)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize="small")
    figure.savefig(path, dpi=144)
