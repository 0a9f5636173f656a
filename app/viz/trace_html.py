"""A trace as HTML: its headline figures, its tokens coloured by source, and single steps with their draft trees.

Pure functions of traces, for the page and for notebooks. The text of a token is given by a function; independent of
models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice

from outrider.app.viz.svg import Drawing, box, cut, drawing, label, safe, visible
from outrider.app.viz.token_styles import STYLES, UNTRIED, Kind, nodes_of
from outrider.core.trace import Step, Trace

Name = Callable[[int], str]
_NODES = 72  # nodes of a tree that are drawn at most
_ROWS = 64  # of a table
_ROOM = 3_000_000  # characters of HTML after which no more tokens of a trace are drawn
_LIKELIEST = 8  # tokens in a tooltip
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
        "draft tokens accepted": f"{summary.accepted} of {summary.drafted}" if summary.drafted else "none drafted",
        "time": f"{summary.seconds:.2f} s" if summary.seconds >= 1 else f"{1e3 * summary.seconds:.0f} ms",
        "tokens / s": f"{summary.tokens_per_second:.1f}",
    }
    if rate := trace.bytes_per_second:
        own = trace.machine.get("bandwidth")
        of = f" of {own / 1e9:.1f}" if isinstance(own, int | float) and own else ""
        facts["GB / s of weights read"] = f"{rate / 1e9:.1f}{of}"
    if trace.launches:
        facts["launches and waits per round"] = f"{trace.launches:.0f}, {trace.waits:.1f}"
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


def legend(kinds: Iterable[Kind] = STYLES) -> Drawing:
    """The kinds of tokens with their colours and lines."""
    parts = [
        f'<span style="margin-right:1.1em;white-space:nowrap"><span style="{style(kind)}">{_EXAMPLES[kind]}</span> '
        f'<span style="opacity:.75">{safe(_SHORT[kind])}</span></span>'
        for kind in kinds
    ]
    return Drawing(f'<div class="or-legend" style="line-height:1.9">{" ".join(parts)}</div>')


_EXAMPLES: Mapping[Kind, str] = {
    "drafted": "drafted",
    "rejected": "rejected",
    "resampled": "resampled",
    "bonus": "bonus",
    "relaxed": "relaxed",
}
_SHORT: Mapping[Kind, str] = {
    "drafted": "and accepted",
    "rejected": "by the rule",
    "resampled": "by the target after a rejection",
    "bonus": "token after an accepted draft",
    "relaxed": "acceptance (only by a relaxed rule)",
}


# ---- tokens


def style(kind: Kind) -> str:
    """The CSS of a token of this kind."""
    token = STYLES[kind]
    faint = ";opacity:.75;font-size:.85em" if kind == "rejected" else ""
    return f"background:{token.colour}{_TINT};text-decoration:{token.line} {token.colour};border-radius:3px{faint}"


def tokens(
    steps: Sequence[Step],
    name: Name = numbered,
    *,
    rejected: bool = True,
    current: int | None = None,
    clock: Sequence[float] | None = None,
    before: str = "",
) -> Drawing:
    """The output, each token coloured by its source, with rejected tokens where they were drafted. `before` is text
    in front of it. Steps after `current` are faint; with `clock`, each step appears at its second. Tokens beyond
    about 3 MB of HTML are counted, not drawn.
    """
    parts = [f'<span style="opacity:.6">{_escaped(before)}</span>'] if before else []
    room, drawn = _ROOM, 0
    for index, step in enumerate(steps):
        css = ""
        if current is not None and index > current:
            css = ";opacity:.28"
        elif current == index:
            css = ";outline:1.5px solid currentColor"
        css += f";--at:{clock[index]:.3f}s" if clock is not None else ""
        for kind, html in _step_tokens(step, name, rejected, css):
            room, drawn = room - len(html), drawn + (kind != "rejected")
            parts.append(html)
            if room < 0:
                break
        if room < 0:
            parts.append(f"… {sum(len(step.emitted) for step in steps) - drawn} more tokens, not shown")
            break
    return running_text("".join(parts), race=clock is not None)


def step_tokens(step: Step, name: Name, *, rejected: bool = True, css: str = "", tips: bool = True) -> str:
    """The tokens of one step as HTML; `tips` adds tooltips."""
    return "".join(html for _, html in _step_tokens(step, name, rejected, css, tips))


def _step_tokens(step: Step, name: Name, rejected: bool, css: str, tips: bool = True) -> Iterator[tuple[Kind, str]]:
    for kind, token, node, level in nodes_of(step):
        if kind == "rejected" and not rejected:
            continue
        tag = "s" if kind == "rejected" else "span"
        tip = f' tabindex="-1" title="{safe(tooltip(step, kind, token, node, level, name))}"' if tips else ""
        text = _escaped(name(token), kind != "rejected")
        yield kind, f'<{tag} class="or-t"{tip} style="{style(kind)}{css}">{text}</{tag}>'


def running_text(inner: str, *, race: bool = False) -> Drawing:
    """Tokens in a block of text that keeps white space and wraps."""
    kind = "or-tokens or-race" if race else "or-tokens"
    return Drawing(
        f'<div class="{kind}" style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75">{inner}</div>'
    )


def _escaped(text: str, breaks: bool = True) -> str:
    return safe(text).replace("⏎", "⏎<br>" if breaks else "⏎")


def tooltip(step: Step, kind: Kind, token: int, node: int | None, level: int | None, name: Name) -> str:
    """What the trace records about one token."""
    parts = [f"“{visible(name(token))}” {STYLES[kind].description}"]
    if node is not None and step.p:
        numbers = f"p {step.p[node]:.3f}, {proposal(step, node)}"
        parts.append(f"{numbers}, acceptance probability {step.chance[node]:.3f}")
    if level is not None and level < len(step.alternatives):
        shares = step.alternatives[level][:_LIKELIEST]
        likely = ", ".join(f"“{visible(name(other))}” {share:.1%}" for other, share in shares)
        parts.append(f"most likely for the target: {likely}")
    if level is not None and level < len(step.total_variation) and step.total_variation[level]:
        parts.append(f"total variation {step.total_variation[level]:.4f}")
    return " · ".join([*parts, f"target pass {step.index + 1}"])


def proposal(step: Step, node: int) -> str:
    return "fixed guess" if step.fixed[node] else f"q {step.q[node]:.3f}"


# ---- one step


def draft_tree(step: Step, root: str = "", name: Name = numbered) -> Drawing:
    """A step's draft as a tree: the accepted path, rejected and untried nodes, and the target's token after the path.
    `root` is the text before the draft."""
    shown = _shown_nodes(step)
    nodes = [*shown, *([len(step.drafted)] if len(step.path) < len(step.emitted) else [])]
    parent_of = {node: step.parents[node] for node in shown}
    if len(nodes) > len(shown):
        parent_of[len(step.drafted)] = step.path[-1] if step.path else -1
    across, row = _layout(nodes, parent_of)
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


def _shown_nodes(step: Step) -> list[int]:
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


def _layout(nodes: Sequence[int], parents: Mapping[int, int]) -> tuple[dict[int, int], dict[int, int]]:
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


def step_table(step: Step, name: Name = numbered) -> list[list[str]]:
    """Rows of the first tried nodes and committed tokens of a step: kind, token, p, q, acceptance probability, total
    variation."""
    rows = []
    for kind, token, node, level in islice(nodes_of(step), _ROWS):
        total_variation = (
            f"{step.total_variation[level]:.4f}" if level is not None and level < len(step.total_variation) else ""
        )
        numbers = ["", "", ""]
        if node is not None and step.p:
            q = "fixed" if step.fixed[node] else f"{step.q[node]:.4f}"
            numbers = [f"{step.p[node]:.4f}", q, f"{step.chance[node]:.4f}"]
        rows.append([kind, visible(name(token)), *numbers, total_variation])
    return rows
