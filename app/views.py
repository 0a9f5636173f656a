"""What a trace shows, as drawings: tokens by who wrote them, draft trees, acceptance, time, grids, a strip of speech.

Pure functions of traces, on a page and in a notebook alike: each gives a Drawing, and every figure in one is the
trace's own. What a token is called comes as a function; knows nothing of models.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from outrider.app.marks import LOOKS, PARTS, SERIES, UNTRIED, Kind, placed
from outrider.app.svg import Drawing, Plot, bars, box, cut, drawing, label, number, safe, stroke, visible
from outrider.core.trace import SOURCES, Source, Step, Summary, Times, Trace

Name = Callable[[int], str]
Grid = Sequence[Sequence[float | None]]
_BARS = 160  # calls of which each has a bar of its own
_NODES = 72  # of a tree that are drawn
_RAMP = ((0, 32, 77), (65, 77, 107), (124, 123, 120), (188, 175, 111), (255, 234, 70))  # dark to light, for any eyes
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
        "calls of the target": f"{found.target_calls}",
        "tokens per call": f"{found.tokens_per_call:.2f}",
        "accepted": f"{found.accepted} of {found.drafted}" if found.drafted else "nothing drafted",
        "time": f"{found.seconds:.2f} s" if found.seconds >= 1 else f"{1e3 * found.seconds:.0f} ms",
        "tokens a second": f"{found.tokens_per_second:.1f}",
    }
    if not trace.lossless:
        said["price"] = f"{found.price:.2f} in all"
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
    """Whether the law of what comes out is the target's own."""
    if lossless:
        look, words, why = "#009E73", "lossless", "what comes out has exactly the target's own law"
    else:
        look, words, why = "#E69F00", "relaxed", "what comes out is near the target's law; every step notes its price"
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
    if level is not None and level < len(step.price) and step.price[level]:
        said.append(f"price {step.price[level]:.4f}")
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
        price = f"{step.price[level]:.4f}" if level is not None and level < len(step.price) else ""
        numbers = ["", "", ""]
        if node is not None and step.p:
            q = "fixed" if step.fixed[node] else f"{step.q[node]:.4f}"
            numbers = [f"{step.p[node]:.4f}", q, f"{step.chance[node]:.4f}"]
        rows.append([kind, visible(name(token)), *numbers, price])
    return rows


# ---- a whole trace


def by_position(summary: Summary) -> Drawing:
    """How often each position of a draft was accepted: of all drafts, and of those that got there."""
    count = len(summary.by_position)
    plot = Plot("acceptance by position", "position in the draft", (0.4, max(count, 1) + 0.6), 1.0, percent=True)
    for place, (share, reached) in enumerate(zip(summary.by_position, summary.conditional, strict=True), 1):
        said = f"position {place}: accepted in {share:.1%} of drafts, {reached:.1%} where it was reached"
        plot.bar(place - 0.35, place + 0.35, 0, share, LOOKS["drafted"].colour, said)
    plot.curve(list(enumerate(summary.conditional, 1)), SERIES[1], dots=True)
    plot.key("of all drafts", LOOKS["drafted"].colour)
    plot.key("where reached", SERIES[1])
    return plot.drawn([(place, str(place)) for place in _some(range(1, count + 1))])


def histogram(summary: Summary) -> Drawing:
    """How many guesses a call accepted."""
    counts = summary.histogram
    plot = Plot(
        "guesses accepted a call",
        "guesses accepted by a call",
        (-0.6, max(len(counts), 2) - 0.4),
        max(counts, default=1),
        "calls",
    )
    for accepted, calls in enumerate(counts):
        plot.bar(
            accepted - 0.35, accepted + 0.35, 0, calls, LOOKS["drafted"].colour, f"{accepted} accepted: {calls} calls"
        )
    return plot.drawn([(place, str(place)) for place in _some(range(len(counts)))])


@dataclass(frozen=True)
class Call:
    """What one call of the target brought, or several of them taken together."""

    first: int
    last: int
    sources: Mapping[Source, float]  # tokens a call, of each source
    drafted: float  # how many the draft had


def calls(steps: Sequence[Step], most: int = _BARS) -> list[Call]:
    """The calls of a trace; of more than `most`, neighbours taken together."""
    size = -(-len(steps) // most) if steps else 1
    found = []
    for start in range(0, len(steps), size):
        part = steps[start : start + size]
        sources: dict[Source, float] = {
            name: sum(step.sources.count(name) for step in part) / len(part) for name in SOURCES
        }
        found.append(Call(start, start + len(part) - 1, sources, sum(len(step.drafted) for step in part) / len(part)))
    return found


def per_step(steps: Sequence[Step], current: int | None = None) -> Drawing:
    """What each call of the target brought, by who wrote it, and the running mean: tokens per call."""
    found = calls(steps)
    most = max((sum(one.sources.values()) for one in found), default=1)
    plot = Plot("tokens of each call", "call of the target", (-0.5, max(len(steps), 1) - 0.5), most, "tokens")
    for one in found:
        low = 0.0
        for source in SOURCES:
            high = low + one.sources[source]
            if high > low:
                which = f"call {one.first + 1}" + (f" to {one.last + 1}" if one.last > one.first else "")
                said = f"{which}: {number(one.sources[source])} {source} of {number(one.drafted)} drafted"
                plot.bar(one.first - 0.42, one.last + 0.42, low, high, LOOKS[source].colour, said)
            low = high
    plot.curve(running(steps), "currentColor")
    if current is not None:
        x = plot.at(current)
        plot.parts.append(stroke(x, 10, x, 156, opacity=0.9, more=' stroke-dasharray="2 3"'))
    plot.key("tokens per call so far", "currentColor")
    return plot.drawn([(place, str(place + 1)) for place in _some(range(len(steps)))])


def running(steps: Sequence[Step]) -> list[tuple[float, float]]:
    """Tokens per call after each call."""
    found, tokens_ = [], 0
    for place, step in enumerate(steps):
        tokens_ += len(step.emitted)
        found.append((float(place), tokens_ / (place + 1)))
    return found


def speed(steps: Sequence[Step], span: int = 8) -> Drawing:
    """Tokens a second over the last few calls, along the time."""
    points, at = [], 0.0
    for place, step in enumerate(steps):
        at += step.times.total
        part = steps[max(place - span + 1, 0) : place + 1]
        seconds = sum(one.times.total for one in part)
        if seconds > 0:
            points.append((at, sum(len(one.emitted) for one in part) / seconds))
    plot = Plot(
        "speed",
        f"seconds (mean of {span} calls)",
        (0, at or 1),
        max((y for _, y in points), default=1),
        "tokens a second",
    )
    plot.curve(points, SERIES[0])
    return plot.drawn()


def time_split(times: Times) -> Drawing:
    """Where the time went."""
    total, x, parts = times.total or 1.0, 0.0, []
    for place, part in enumerate(fields(times)):
        seconds, colour = getattr(times, part.name), PARTS[part.name]
        width = 420 * seconds / total
        parts.append(
            box(10 + x, 6, width, 26, colour, title=f"{part.name}: {1e3 * seconds:.1f} ms, {seconds / total:.1%}")
        )
        x += width
        left = 10 + 106 * place
        parts.append(box(left, 43, 10, 10, colour))
        parts.append(label(left + 15, 52, f"{part.name} {seconds / total:.0%}", anchor="start"))
        parts.append(label(left + 15, 67, f"{1e3 * seconds:.0f} ms", anchor="start", size=10, dim=True))
    return drawing(parts, 440, 74, "where the time went", scale=1.35)


def _some(places: Sequence[int], most: int = 10) -> list[int]:
    """Some of many, evenly: for the ticks of an axis."""
    return list(places[:: -(-len(places) // most) or 1])


# ---- pictures


def cells(steps: Sequence[Step], what: str, rows: int, columns: int) -> list[list[float | None]]:
    """One number for each code of a picture in raster order: the `round` that committed it, the `chance` with which it
    was accepted, the `entropy` of the law it was drawn from, or `relaxed`, 1 where only the rule's leave let it in."""
    found: list[float | None] = []
    for step in steps:
        for level in range(len(step.emitted)):
            node = step.path[level] if level < len(step.path) else None
            if what == "round":
                found.append(step.index + 1)
            elif what == "chance":
                found.append(step.chance[node] if node is not None and step.chance else None)
            elif what == "relaxed":
                found.append(float(step.sources[level] == "relaxed"))
            else:
                found.append(step.entropy[level] if level < len(step.entropy) else None)
    found = [*found, *[None] * (rows * columns - len(found))]
    return [found[row * columns : (row + 1) * columns] for row in range(rows)]


def grid(values: Grid, title: str, *, top: float | None = None, form: str = "{:.3g}", light: bool = False) -> Drawing:
    """A number a cell, dark to light; cells without one are hollow. `light`: the numbers themselves are left out."""
    known = [one for line in values for one in line if one is not None]
    most = top if top is not None else max(known, default=1.0) or 1.0
    side, parts = 14, []
    for row, line in enumerate(values):
        for column, one in enumerate(line):
            said = f"row {row + 1}, column {column + 1}: " + ("none" if one is None else form.format(one))
            fill = "none" if one is None else ramp(one / most)
            hollow = ' stroke="currentColor" stroke-opacity=".15"' if one is None else ""
            tied = "" if light else f' data-cell="{row * len(line) + column}"'
            x, y, said = column * side + 0.5, row * side + 0.5, "" if light else said
            parts.append(box(x, y, side - 1, side - 1, fill, title=said, more=hollow + tied))
    wide, high = side * max(map(len, values), default=1), side * len(values)
    parts.append(label(0, high + 14, title, anchor="start"))
    parts += [box(wide - 96 + place * 2.5, high + 5, 2.6, 9, ramp(place / 23)) for place in range(24)]
    parts.append(label(wide - 100, high + 13, "0", anchor="end", size=9))
    parts.append(label(wide, high + 13, number(most), anchor="end", size=9))
    return drawing(parts, wide, high + 20, title)


def ramp(share: float) -> str:
    """Dark to light."""
    at = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    low = min(int(at), len(_RAMP) - 2)
    red, green, blue = (round(a + (b - a) * (at - low)) for a, b in zip(_RAMP[low], _RAMP[low + 1], strict=True))
    return f"#{red:02x}{green:02x}{blue:02x}"


def source_grid(steps: Sequence[Step], rows: int, columns: int, *, light: bool = False) -> Drawing:
    """Who wrote each code of a picture."""
    side, parts = 14, []
    for place, source in enumerate(source for step in steps for source in step.sources):
        x, y = place % columns * side, place // columns * side
        said = "" if light else f"row {place // columns + 1}, column {place % columns + 1}: {LOOKS[source].words}"
        tied = "" if light else f' data-cell="{place}"'
        parts.append(box(x + 0.5, y + 0.5, side - 1, side - 1, LOOKS[source].colour, title=said, more=tied))
        if source != "drafted":
            parts.append(label(x + 7, y + 11, LOOKS[source].mark, size=10, more=' style="pointer-events:none"'))
    parts.append(label(0, rows * side + 14, "who wrote it", anchor="start"))
    marks = "  ".join(f"{LOOKS[kind].mark} {kind}" for kind in ("relaxed", "resampled", "bonus"))
    parts.append(label(columns * side, rows * side + 14, marks, anchor="end", size=8.5, dim=True))
    return drawing(parts, columns * side, rows * side + 20, "who wrote each code")


def grids(steps: Sequence[Step], rows: int = 16, columns: int = 16, *, light: bool = False) -> dict[str, Drawing]:
    """A picture's codes by round, chance, entropy, and who wrote them (relaxed ones among them)."""
    return {
        "round": grid(cells(steps, "round", rows, columns), "round", light=light),
        "chance": grid(cells(steps, "chance", rows, columns), "chance", top=1.0, light=light),
        "entropy": grid(cells(steps, "entropy", rows, columns), "entropy, nats", light=light),
        "source": source_grid(steps, rows, columns, light=light),
    }


def side_by_side(drawings: Iterable[str], least: int = 190) -> Drawing:
    """As many in a row as there is room for."""
    inner = "".join(f"<div>{one}</div>" for one in drawings)
    return Drawing(
        f'<div style="display:grid;grid-template-columns:repeat(auto-fit,minmax(min({least}px,100%),1fr));gap:14px">'
        f"{inner}</div>"
    )


def picture(
    data: str,
    steps: Sequence[Step],
    rows: int,
    columns: int,
    *,
    current: int | None = None,
    clock: Sequence[float] | None = None,
    light: bool = False,
) -> Drawing:
    """A picture (PNG in base64) with what is not committed yet hidden: behind the step that is looked at, or until its
    time has come. `light`: without what a pointer would ask for, for pictures that are under way."""
    side, veils = 16, []
    brought = [count for count, step in enumerate(steps) for _ in step.emitted]
    for cell, count in enumerate(brought[: rows * columns]):
        if clock is None and (current is None or count <= current):
            continue
        x, y = cell % columns * side, cell // columns * side
        timed = f' class="or-lift" style="--at:{clock[count]:.3f}s"' if clock is not None else ""
        veils.append(f'<rect x="{x}" y="{y}" width="16.2" height="16.2" fill="var(--or-veil,#ccc)"{timed}/>')
    wide, high = side * columns, side * rows
    image = f'<image href="data:image/png;base64,{safe(data)}" width="{wide}" height="{high}"/>'
    shown = drawing([image, *veils], wide, high, "the picture", scale=1.1)
    if clock is not None:
        return shown
    upto = steps if current is None else steps[: current + 1]
    return side_by_side([shown, *grids(upto, rows, columns, light=light).values()], least=146)


# ---- speech


def strip(
    steps: Sequence[Step],
    starts: Sequence[float],
    seconds: float,
    *,
    wave: Sequence[float] = (),
    mel: str = "",
    words: Sequence[tuple[float, str]] = (),
    clock: Sequence[float] | None = None,
    current: int | None = None,
) -> Drawing:
    """Sound along the time, and under it which round of verifying brought which part, token by token.

    `starts` are when tokens begin to be heard; `wave` the sound's envelope; `mel` a picture as data; `clock` when each
    round came, for a replay; `current` the round that is looked at."""
    wide, whole = 880.0, max(seconds, 1e-6)

    def at(time: float) -> float:
        return wide * min(time / whole, 1.0)

    parts, y = [], 0.0
    if wave:
        step = wide / len(wave)
        line = " ".join(f"{i * step:.1f},{26 - 24 * h:.1f}" for i, h in enumerate(wave))
        back = " ".join(f"{i * step:.1f},{26 + 24 * h:.1f}" for i, h in reversed(list(enumerate(wave))))
        parts.append(f'<polygon points="{line} {back}" fill="currentColor" fill-opacity=".55"/>')
        y = 56.0
    if mel:
        parts.append(f'<image href="{safe(mel)}" x="0" y="{y}" width="{wide}" height="76" preserveAspectRatio="none"/>')
        y += 82
    place = 0
    for count, one in enumerate(steps):
        mine = list(range(place, min(place + len(one.emitted), len(starts))))
        place += len(one.emitted)
        if not mine:
            continue
        left = at(starts[mine[0]])
        right = at(starts[place] if place < len(starts) else whole)
        timed = f' class="or-late" style="--at:{clock[count]:.3f}s"' if clock is not None else ""
        timed += ' opacity=".22"' if current is not None and count > current else ""
        said = f"round {one.index + 1}: {len(one.emitted)} tokens of {len(one.drafted)} drafted"
        shade = 0.28 if count % 2 else 0.12
        inner = box(left, y, right - left, 12, "currentColor", title=said, more=f' fill-opacity="{shade}"')
        for level, token in enumerate(mine):
            x, end = at(starts[token]), at(starts[token + 1] if token + 1 < len(starts) else whole)
            kind = one.sources[level]
            inner += box(
                x, y + 14, max(end - x - 0.4, 0.6), 18, LOOKS[kind].colour, title=f"{said}; {LOOKS[kind].words}"
            )
        parts.append(f"<g{timed}>{inner}</g>")
    y += 36
    for tick in range(int(whole) + 1):
        parts.append(stroke(at(tick), y - 2, at(tick), y + 3, opacity=0.6))
        parts.append(label(max(at(tick), 6), y + 14, f"{tick} s", size=10))
    parts += [label(at(when) + 2, y + 30, word, anchor="start", size=11) for when, word in words]
    inner = drawing(parts, wide, y + (38 if words else 20), "sound and rounds of verifying", scale=1.4)
    return Drawing(f'<div class="or-wide" style="overflow-x:auto"><div style="min-width:520px">{inner}</div></div>')


# ---- several methods, and theory


def compared(
    rows: Sequence[Mapping[str, Any]], key: str, title: str, unit: str = "", base: float | None = None
) -> Drawing:
    """Bars of one figure of a benchmark's rows, with where it was seen if that is there."""
    found = []
    for row in rows:
        value = row.get(key)
        if isinstance(value, int | float):
            low, high = row.get(f"{key}_low") or value, row.get(f"{key}_high") or value
            found.append((str(row["drafter"]), float(value), float(low), float(high)))
    return bars(title, found, SERIES[0], unit=unit, base=base)


def against(points: Sequence[tuple[str, float, float]], title: str = "predicted and measured") -> Drawing:
    """Predicted across, measured upwards, the line on which both agree."""
    most = 1.1 * max((max(x, y) for _, x, y in points), default=1.0)
    plot = Plot(title, "predicted tokens a second", (0, most), most, "measured")
    plot.curve([(0, 0), (most, most)], UNTRIED, dash="4 4")
    for place, (name, x, y) in enumerate(points):
        plot.mark(x, y, name, SERIES[place % len(SERIES)], lift=(7, -15, 21, -29)[place % 4])
    return plot.drawn()


def curves(
    title: str,
    across: str,
    found: Mapping[str, Sequence[tuple[float, float]]],
    *,
    up: str = "",
    here: tuple[float, float, str] | None = None,
    level: float | None = None,
) -> Drawing:
    """Several curves, a point that is looked at, and a level to compare with."""
    points = [point for line in found.values() for point in line]
    low, high = min((x for x, _ in points), default=0), max((x for x, _ in points), default=1)
    plot = Plot(title, across, (low, high), max([y for _, y in points] + ([level] if level else [])), up)
    if level is not None:
        plot.curve([(low, level), (high, level)], UNTRIED, dash="4 4")
    for place, (name, line) in enumerate(found.items()):
        dash = ("", "6 3", "2 3", "8 3 2 3")[place % 4]
        plot.curve(line, SERIES[place % len(SERIES)], dash=dash)
        plot.key(name, SERIES[place % len(SERIES)], dash)
    if here is not None:
        plot.mark(*here, SERIES[5])
    return plot.drawn()
