"""A trace as HTML: its headline figures, and the draft of a step as a tree.

Pure functions of traces, for the page and for notebooks. The text of a token is given by a function; independent of
models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from outrider.app.viz.svg import Drawing, box, cut, drawing, label, safe, visible
from outrider.app.viz.token_styles import STYLES, UNTRIED, Kind
from outrider.core.trace import Step, Trace

Name = Callable[[int], str]
_NODES = 72  # nodes of a tree that are drawn at most
_TINT = "44"  # alpha of background colours


def numbered(token: int) -> str:
    """The text of a token whose text is not known: its id."""
    return f"#{token} "


# ---- figures in words


def facts(trace: Trace) -> dict[str, str]:
    """The headline figures of a trace by name."""
    summary = trace.summary()
    facts = {
        "tokens": f"{summary.tokens}",
        "target passes": f"{summary.target_passes}",
        "tokens per target pass": f"{summary.tokens_per_pass:.2f}",
        "guesses accepted": f"{summary.accepted} of {summary.drafted}" if summary.drafted else "no guesses",
        "time": f"{summary.seconds:.2f} s" if summary.seconds >= 1 else f"{1e3 * summary.seconds:.0f} ms",
        "tokens / s": f"{summary.tokens_per_second:.1f}",
    }
    if rate := trace.bytes_per_second:
        own = trace.machine.get("bandwidth")
        of = f" of {own / 1e9:.1f}" if isinstance(own, int | float) and own else ""
        facts["GB / s of weights read"] = f"{rate / 1e9:.1f}{of}"
    if trace.launches:
        facts["launches and waits per target pass"] = f"{trace.launches:.0f}, {trace.waits:.1f}"
    if not trace.lossless:
        facts["total variation, summed"] = f"{summary.total_variation:.2f}"
    return facts


def conditions(trace: Trace) -> str:
    """The method, the settings and the machine of a trace in one line."""
    machine, options = trace.machine, trace.options
    device = machine.get("gpu") or f"{machine.get('processor', 'CPU')}, {machine.get('threads', '?')} threads"
    parts = [trace.method, f"rule {trace.rule}", f"{options.get('model', '')} {options.get('dtype', '')}".strip()]
    if isinstance(options.get("temperature"), int | float):
        parts.append(f"temperature {options['temperature']:g}")
    parts += [f"seed {trace.seed}", str(device), f"{trace.memory / 2**30:.2f} GiB peak memory" if trace.memory else ""]
    return " · ".join(cut(part, 200) for part in parts if part)


def badge(lossless: bool) -> Drawing:
    """A badge that says whether the rule is lossless."""
    colour, text, tip = "#009E73", "✓ lossless", "the output has exactly the target's distribution"
    if not lossless:
        colour, text = "#E69F00", "~ relaxed"
        tip = "the output's distribution differs from the target's; every step records the total variation"
    return Drawing(
        f'<span class="or-badge" title="{safe(tip)}" style="border:1.5px solid {colour};background:{colour}{_TINT};'
        f'border-radius:99px;padding:1px 9px;white-space:nowrap">{text}</span>'
    )


def proposal(step: Step, node: int) -> str:
    return "fixed guess" if step.fixed[node] else f"q {step.q[node]:.3f}"


def draft_tree(step: Step, root: str = "", name: Name = numbered) -> Drawing:
    """A step's draft as a tree: the accepted path, rejected and untried nodes, and the target's token after the path.
    `root` is the text before the draft."""
    shown = shown_nodes(step)
    nodes = [*shown, *([len(step.drafted)] if len(step.path) < len(step.emitted) else [])]
    parent_of = {node: step.parents[node] for node in shown}
    if len(nodes) > len(shown):
        parent_of[len(step.drafted)] = step.path[-1] if step.path else -1
    across, row = layout(nodes, parent_of)
    width, height, gap = 92, 34, 26
    places = {
        node: (14 + gap + 62 + (across[node] - 1) * (width + gap), 6 + row[node] * (height + 8)) for node in nodes
    }
    deepest, lowest = max(across.values(), default=0), max(row.values(), default=0)
    parts = [box(6, 10, 70, 26, "none", more=' stroke="currentColor" stroke-opacity=".5"', round_=13)]
    parts.append(label(41, 27, cut(visible(root), 9) or "prompt"))
    parts += [_edge(places.get(parent_of[node]), at) for node, at in places.items()]
    for node, (x, y) in places.items():
        if node == len(step.drafted):
            text = name(step.emitted[-1])
            parts.append(_node(x, y, text, "from the target", step.sources[len(step.path)], f"“{visible(text)}”"))
            continue
        kind: Kind | None = "rejected" if step.tried[node] else None
        if node in step.path:
            kind = step.sources[step.path.index(node)]
        text = name(step.drafted[node])
        numbers, tip = "", f"“{visible(text)}”"
        if step.p:
            numbers = f"p {step.p[node]:.2f}  {'fixed' if step.fixed[node] else f'q {step.q[node]:.2f}'}"
            tip += f" p {step.p[node]:.4f}, {proposal(step, node)}, acceptance probability {step.chance[node]:.4f}"
        parts.append(_node(x, y, text, numbers, kind, tip))
    missing = len(step.drafted) - len(shown)
    high = 12 + (lowest + 1) * (height + 8) + (14 if missing else 0)
    if missing:
        parts.append(label(6, high - 4, f"{missing} more nodes, not tried", anchor="start", size=10, dim=True))
    wide = max(102 + deepest * (width + gap), 200)
    tree = drawing(parts, wide, high, f"draft of target pass {step.index + 1}")
    return Drawing(f'<div class="or-wide" style="overflow-x:auto"><div style="min-width:{wide}px">{tree}</div></div>')


def shown_nodes(step: Step) -> list[int]:
    """All nodes, or if there are too many, the accepted ones, then those tried, then others, as many as fit; always
    with their parents."""
    if len(step.drafted) <= _NODES:
        return list(range(len(step.drafted)))
    tried = (node for node in range(len(step.drafted)) if step.tried[node])
    wanted = set(islice(dict.fromkeys([*step.path, *tried]), _NODES))
    for node in [*sorted(wanted), *range(len(step.drafted))]:
        chain = []
        while node >= 0 and node not in wanted:
            chain.append(node)
            node = step.parents[node]
        if len(wanted) + len(chain) > _NODES:
            break
        wanted.update(chain)
    return sorted(node for node in wanted if step.parents[node] < 0 or step.parents[node] in wanted)


def layout(nodes: Sequence[int], parents: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
    """The depth and the row of each node: a first child is in its parent's row, each further child in a new row."""
    children: dict[int, list[int]] = {}
    for node in nodes:
        children.setdefault(parents[node], []).append(node)
    depths, rows = dict[int, int](), dict[int, int]()
    last_row, pending = 0, [(-1, 0, False)]
    while pending:
        node, depth, new_row = pending.pop()
        last_row += new_row
        depths[node], rows[node] = depth, last_row
        pending += [(child, depth + 1, i > 0) for i, child in reversed(list(enumerate(children.get(node, []))))]
    del depths[-1], rows[-1]
    return depths, rows


def _edge(start: tuple[float, float] | None, end: tuple[float, float]) -> str:
    x, y = (76, 23) if start is None else (start[0] + 92, start[1] + 17)
    left, high = end[0], end[1] + 17
    middle = (x + left) / 2
    return (
        f'<path d="M{x:.0f} {y:.0f} C{middle:.0f} {y:.0f} {middle:.0f} {high:.0f} {left:.0f} {high:.0f}" fill="none" '
        'stroke="currentColor" stroke-opacity=".35"/>'
    )


def _node(x: float, y: float, text: str, numbers: str, kind: Kind | None, tip: str) -> str:
    colour = STYLES[kind].colour if kind else UNTRIED
    dashed = "" if kind else ' stroke-dasharray="3 3"'
    mark = {None: "", "rejected": "✗ ", "drafted": "✓ "}.get(kind, f"{STYLES[kind].mark} " if kind else "")
    struck = ' text-decoration="line-through"' if kind == "rejected" else ""
    tip = f"{tip}, {STYLES[kind].description}" if kind else f"{tip}, not tried"
    edge = f' stroke="{colour}" stroke-width="1.6"{dashed}'
    return (
        f"<g>{box(x, y, 92, 34, colour + _TINT, title=tip, more=edge, round_=6)}"
        f"{label(x + 46, y + 15, mark + cut(visible(text), 11), more=struck)}"
        f"{label(x + 46, y + 28, numbers, size=9, dim=True)}</g>"
    )
