"""What is drawn of a trace is bounded, however many nodes a stranger's file has."""

from __future__ import annotations

from outrider.app.viz.reading import preview
from outrider.app.viz.story import story
from outrider.app.viz.trace_html import draft_tree
from outrider.core.trace import Step, Trace


def crowded(nodes: int) -> Step:
    """All nodes are tried siblings; the first is accepted."""
    numbers = (0.5,) * nodes
    return Step(
        row=0,
        index=0,
        drafted=(7,) * nodes,
        parents=(-1,) * nodes,
        fixed=(True,) * nodes,
        tried=(True,) * nodes,
        chance=numbers,
        p=numbers,
        q=numbers,
        path=(0,),
        emitted=(7, 8),
        sources=("drafted", "bonus"),
    )


def test_many_tried_nodes_make_no_larger_page() -> None:
    some, many = crowded(200), crowded(5000)
    for draw in (preview, draft_tree, lambda step: story(Trace((step,)))):
        assert len(str(draw(many))) < 1.1 * len(str(draw(some)))
