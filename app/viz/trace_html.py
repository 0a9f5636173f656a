"""A trace in words: its headline, its tokens by who wrote them, and one step of it, with the tree that was drafted.

Pure functions of traces, on a page and in a notebook alike: each gives a Drawing, and every figure in one is the
trace's own. What a token is called comes as a function; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from outrider.app.viz.svg import Drawing, box, cut, drawing, label, safe, visible
from outrider.app.viz.token_styles import LOOKS, UNTRIED, Kind, placed
from outrider.core.trace import Step, Trace

Name = Callable[[int], str]
_NODES = 72  # of a tree that are drawn
_TINT = "44"  # of a colour behind letters


def numbered(token: int) -> str:
    """What a token is called where nobody knows better."""
    return f"#{token} "


# ---- figures in words


def facts(trace: Trace) -> dict[str, str]:
    """The headline of a trace: what came out, by how many calls, how fast, where."""
    found = trace.summary()
    said = {
        "tokens": f"{found.tokens}",
        "calls of the target": f"{found.target_passes}",
        "tokens per call": f"{found.tokens_per_pass:.2f}",
        "accepted": f"{found.accepted} of {found.drafted}" if found.drafted else "nothing drafted",
        "time": f"{found.seconds:.2f} s" if found.seconds >= 1 else f"{1e3 * found.seconds:.0f} ms",
        "tokens a second": f"{found.tokens_per_second:.1f}",
    }
    if not trace.lossless:
        said["total_variation"] = f"{found.total_variation:.2f} in all"
    return said


def conditions(trace: Trace) -> str:
    """Under which conditions it was made, as one line."""
    where, asked = trace.machine, trace.options
    device = where.get("gpu") or f"{where.get('processor', 'CPU')}, {where.get('threads', '?')} threads"
    parts = [trace.method, f"rule {trace.rule}", f"{asked.get('model', '')} {asked.get('dtype', '')}".strip()]
    parts += [f"temperature {asked['temperature']:g}"] if isinstance(asked.get("temperature"), int | float) else []
    parts += [f"seed {trace.seed}", str(device), f"{trace.memory / 2**30:.2f} GiB at most" if trace.memory else ""]
    return " · ".join(part for part in parts if part)


def badge(lossless: bool) -> Drawing:
    """Whether the distribution of what comes out is the target's own."""
    if lossless:
        look, words, why = "#009E73", "lossless", "what comes out has exactly the target's own distribution"
    else:
        look, words, why = (
            "#E69F00",
            "relaxed",
            "what comes out is near the target's distribution; every step notes its price",
        )
    mark = "✓" if lossless else "~"
    return Drawing(
        f'<span class="or-badge" title="{safe(why)}" style="border:1.5px solid {look};background:{look}{_TINT};'
        f'border-radius:99px;padding:1px 9px;white-space:nowrap">{mark} {words}</span>'
    )


def legend(kinds: Iterable[Kind] = LOOKS) -> Drawing:
    """What the colours and lines mean."""
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
    "rejected": "a guess not taken",
    "resampled": "the target's, in its place",
    "bonus": "the target's own",
    "relaxed": "accepted by leave of the rule",
}


# ---- tokens


def style(kind: Kind) -> str:
    """Of a word of this kind."""
    look = LOOKS[kind]
    faint = ";opacity:.75;font-size:.85em" if kind == "rejected" else ""
    return f"background:{look.colour}{_TINT};text-decoration:{look.line} {look.colour};border-radius:3px{faint}"


def tokens(
    steps: Sequence[Step],
    name: Name = numbered,
    *,
    rejected: bool = True,
    current: int | None = None,
    clock: Sequence[float] | None = None,
    before: str = "",
) -> Drawing:
    """What was written, each token by who wrote it, the guesses that were rejected where they were made.

    `current`: the step that is looked at, what comes behind it faint. `clock`: when each step appears, in seconds.
    """
    found = [f'<span style="opacity:.6">{_words(before)}</span>'] if before else []
    for place, step in enumerate(steps):
        look = ""
        if current is not None and place > current:
            look = ";opacity:.28"
        elif current == place:
            look = ";outline:1.5px solid currentColor"
        look += f";--at:{clock[place]:.3f}s" if clock is not None else ""
        found.append(step_tokens(step, name, rejected=rejected, look=look))
    return running_text("".join(found), race=clock is not None)


def step_tokens(step: Step, name: Name, *, rejected: bool = True, look: str = "", tips: bool = True) -> str:
    """One step's part of that."""
    found = []
    for kind, token, node, level in placed(step):
        if kind == "rejected" and not rejected:
            continue
        tag = "s" if kind == "rejected" else "span"
        tip = f' tabindex="-1" title="{safe(explained(step, kind, token, node, level, name))}"' if tips else ""
        found.append(
            f'<{tag} class="or-t"{tip} style="{style(kind)}{look}">{_words(name(token), kind != "rejected")}</{tag}>'
        )
    return "".join(found)


def running_text(inner: str, *, race: bool = False) -> Drawing:
    """Tokens one behind the other, as text runs."""
    kind = "or-tokens or-race" if race else "or-tokens"
    return Drawing(
        f'<div class="{kind}" style="white-space:pre-wrap;overflow-wrap:anywhere;line-height:1.75">{inner}</div>'
    )


def _words(text: str, breaks: bool = True) -> str:
    return safe(text).replace("⏎", "⏎<br>" if breaks else "⏎")


def explained(step: Step, kind: Kind, token: int, node: int | None, level: int | None, name: Name) -> str:
    """All that is known of one token."""
    said = [f"“{visible(name(token))}” {LOOKS[kind].words}"]
    if node is not None and step.p:
        said.append(f"p {step.p[node]:.3f}, {drawn(step, node)}, chance {step.chance[node]:.3f}")
    if level is not None and level < len(step.alternatives):
        likely = ", ".join(f"“{visible(name(one))}” {share:.1%}" for one, share in step.alternatives[level])
        said.append(f"the target's likeliest: {likely}")
    if level is not None and level < len(step.total_variation) and step.total_variation[level]:
        said.append(f"price {step.total_variation[level]:.4f}")
    return " · ".join([*said, f"call {step.index + 1}"])


def drawn(step: Step, node: int) -> str:
    return "a fixed guess" if step.fixed[node] else f"q {step.q[node]:.3f}"


# ---- one step


def draft_tree(step: Step, root: str = "", name: Name = numbered) -> Drawing:
    """A step's draft: the path that was accepted, what was rejected, what was never reached, whose word followed."""
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
            own = name(step.emitted[-1])
            parts.append(_node(x, y, own, "the target's own", step.sources[len(step.path)], f"“{visible(own)}”"))
            continue
        kind: Kind | None = "rejected" if step.tried[node] else None
        if node in step.path:
            kind = step.sources[step.path.index(node)]
        word = name(step.drafted[node])
        numbers, tip = "", f"“{visible(word)}”"
        if step.p:
            numbers = f"p {step.p[node]:.2f}  {'fixed' if step.fixed[node] else f'q {step.q[node]:.2f}'}"
            tip += f" p {step.p[node]:.4f}, {drawn(step, node)}, chance {step.chance[node]:.4f}"
        parts.append(_node(x, y, word, numbers, kind, tip))
    missing = len(step.drafted) - len(shown)
    high = 12 + (lowest + 1) * (height + 8) + (14 if missing else 0)
    if missing:
        parts.append(label(6, high - 4, f"{missing} more that were not tried", anchor="start", size=10, dim=True))
    wide = max(102 + deepest * (width + gap), 200)
    tree = drawing(parts, wide, high, f"draft of call {step.index + 1}")
    return Drawing(f'<div class="or-wide" style="overflow-x:auto"><div style="min-width:{wide}px">{tree}</div></div>')


def _shown_nodes(step: Step) -> list[int]:
    """All, or those that mattered and as many others as there is room for, their parents with them."""
    if len(step.drafted) <= _NODES:
        return list(range(len(step.drafted)))
    wanted = {node for node in range(len(step.drafted)) if step.tried[node] or node in step.path}
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
    """How deep each node is, and in which row: a first child beside its parent, others below all before them."""
    kids: dict[int, list[int]] = {}
    for node in nodes:
        kids.setdefault(parents[node], []).append(node)
    across, row = dict[int, int](), dict[int, int]()
    below, waiting = 0, [(kid, 1, place > 0) for place, kid in reversed(list(enumerate(kids.get(-1, []))))]
    while waiting:
        node, depth, lower = waiting.pop()
        below += lower
        across[node], row[node] = depth, below
        waiting += [(kid, depth + 1, place > 0) for place, kid in reversed(list(enumerate(kids.get(node, []))))]
    return across, row


def _edge(start: tuple[float, float] | None, end: tuple[float, float]) -> str:
    x, y = (76, 23) if start is None else (start[0] + 92, start[1] + 17)
    left, high = end[0], end[1] + 17
    middle = (x + left) / 2
    return (
        f'<path d="M{x:.0f} {y:.0f} C{middle:.0f} {y:.0f} {middle:.0f} {high:.0f} {left:.0f} {high:.0f}" fill="none" '
        'stroke="currentColor" stroke-opacity=".35"/>'
    )


def _node(x: float, y: float, word: str, numbers: str, kind: Kind | None, tip: str) -> str:
    colour = LOOKS[kind].colour if kind else UNTRIED
    dashed = "" if kind else ' stroke-dasharray="3 3"'
    mark = {None: "", "rejected": "✗ ", "drafted": "✓ "}.get(kind, f"{LOOKS[kind].mark} " if kind else "")
    struck = ' text-decoration="line-through"' if kind == "rejected" else ""
    said = f"{tip}, {LOOKS[kind].words}" if kind else f"{tip}, not tried"
    edge = f' stroke="{colour}" stroke-width="1.6"{dashed}'
    return (
        f"<g>{box(x, y, 92, 34, colour + _TINT, title=said, more=edge, round_=6)}"
        f"{label(x + 46, y + 15, mark + cut(visible(word), 11), more=struck)}"
        f"{label(x + 46, y + 28, numbers, size=9, dim=True)}</g>"
    )


def step_table(step: Step, name: Name = numbered) -> list[list[str]]:
    """Every tried node and committed token of a step with its numbers: kind, token, p, q, chance, price."""
    rows = []
    for kind, token, node, level in placed(step):
        total_variation = (
            f"{step.total_variation[level]:.4f}" if level is not None and level < len(step.total_variation) else ""
        )
        numbers = ["", "", ""]
        if node is not None and step.p:
            q = "fixed" if step.fixed[node] else f"{step.q[node]:.4f}"
            numbers = [f"{step.p[node]:.4f}", q, f"{step.chance[node]:.4f}"]
        rows.append([kind, visible(name(token)), *numbers, total_variation])
    return rows
