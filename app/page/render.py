"""A recording as a page shows it: what was made, one step of it, its figures, and two of them on one clock.

Puts views together by modality; a recording that was opened looks as one that was just made. Knows no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from outrider.app.page.recordings import Recording
from outrider.app.viz import image_grid, trace_html, waveform
from outrider.app.viz.charts import by_position, histogram, per_step, speed, time_split
from outrider.app.viz.svg import Drawing, safe, side_by_side
from outrider.core.methods import RULES
from outrider.core.trace import Step, Trace


def made(recording: Recording, current: int | None = None) -> Drawing:
    """What came out, as of a step."""
    steps = recording.trace.steps
    if recording.modality == "image":
        if not recording.picture:
            return side_by_side(
                image_grid.grids(_upto(steps, current), recording.rows, recording.columns).values(), least=146
            )
        return image_grid.picture(recording.picture, steps, recording.rows, recording.columns, current=current)
    if recording.modality == "speech":
        return _speech(recording, current=current)
    return trace_html.tokens(steps, recording.name, current=current)


def _upto(steps: Sequence[Step], current: int | None) -> Sequence[Step]:
    return steps if current is None else steps[: current + 1]


def _speech(recording: Recording, current: int | None = None, clock: Sequence[float] | None = None) -> Drawing:
    steps, starts = recording.trace.steps, list(recording.starts)
    count = sum(len(step.emitted) for step in steps)
    if len(starts) != count:  # a bare trace says nothing of time: evenly, as codes are
        starts = [place / 43.07 for place in range(count)]
    wave, mel, seconds = _heard(recording.sound)
    whole = max(seconds, starts[-1] + 0.02 if starts else 0.0)
    strip = waveform.strip(
        steps, starts, whole, wave=wave, mel=mel, words=recording.words, clock=clock, current=current
    )
    return Drawing(strip + (player(recording, "speculative") if clock is None else ""))


def player(recording: Recording, words: str) -> str:
    if not recording.sound:
        return ""
    return (
        f'<div class="or-player"><span>{safe(words)}</span>'
        f'<audio controls preload="metadata" src="data:audio/wav;base64,{safe(recording.sound)}"></audio></div>'
    )


@lru_cache(maxsize=8)
def _heard(sound: str) -> tuple[list[float], str, float]:
    """Envelope, mel and length of a sound."""
    if not sound:
        return [], "", 0.0
    import wave

    from outrider.app.page.backends.speech import envelope, mel_picture, unpacked

    try:
        found = unpacked(sound)
    except (wave.Error, EOFError, ValueError):
        return [], "", 0.0
    return envelope(found), mel_picture(found), found.seconds


def figures(trace: Trace, state: str = "") -> Drawing:
    """The headline: a line of figures under a badge."""
    chips = [f"<span><b>{safe(value)}</b> {safe(name)}</span>" for name, value in trace_html.facts(trace).items()]
    said = f'<span class="or-state">{safe(state)}</span>' if state else ""
    return Drawing(
        f'<div class="or-figures" role="status">{said}{trace_html.badge(trace.lossless)}{"".join(chips)}</div>'
        f'<div class="or-where">{safe(trace_html.conditions(trace))}</div>'
    )


def step(recording: Recording, place: int) -> Drawing:
    """One step: its draft as a tree, its numbers as a table, what its drafter had to say."""
    if not recording.trace.steps:
        return Drawing('<div class="or-empty">No steps.</div>')
    place = min(max(place, 0), len(recording.trace.steps) - 1)
    one = recording.trace.steps[place]
    said = f"Call {place + 1} of {len(recording.trace.steps)}: {len(one.drafted)} drafted, {one.accepted} accepted, "
    said += f"{len(one.emitted)} committed"
    if one.times.total:
        said += f", {1e3 * one.times.total:.1f} ms"
    if one.note:
        said += f" ({one.note[:160]})"
    tree = trace_html.draft_tree(one, recording.root(place), recording.name)
    return Drawing(f'<div class="or-said">{safe(said)}</div>{tree}{_table(trace_html.step_table(one, recording.name))}')


def _table(rows: Sequence[Sequence[str]]) -> str:
    heads = ("", "token", "p", "q", "chance", "total_variation")
    head = "".join(f'<th scope="col">{name}</th>' for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{safe(cell)}</td>" for cell in row) + "</tr>" for row in rows[:64])
    inner = f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody>"
    return f'<div class="or-wide"><table class="or-table">{inner}</table></div>'


def charts(recording: Recording, current: int | None = None) -> Drawing:
    """Every figure of the trace."""
    trace = recording.trace
    found = trace.summary()
    parts = [("Tokens of each call", per_step(trace.steps, current))]
    if found.drafted:
        parts += [("Accepted, by position in the draft", by_position(found))]
        parts += [("How many guesses a call accepted", histogram(found))]
    parts += [("Speed", speed(trace.steps)), ("Where the time went", time_split(found.times))]
    cards = [f'<div class="or-card"><h4>{safe(title)}</h4>{one}</div>' for title, one in parts]
    return side_by_side(cards, 330)


# ---- races


def clock(trace: Trace, slower: float = 1.0) -> list[float]:
    """When each step was done, in seconds from the start."""
    found, at, last = [], 0.0, -1
    for one in trace.steps:
        if one.index != last:  # rows share a round
            at, last = at + one.times.total, one.index
        found.append(at * slower)
    return found


def race(recording: Recording, slower: float = 1.0, round_: int = 0) -> Drawing:
    """Plain decoding and this one, replayed on one clock."""
    if recording.plain is None:
        return Drawing('<div class="or-empty">Press Race: plain decoding, then this drafter, with the same seed.</div>')
    lanes = []
    longest = max(clock(one.trace, slower)[-1:] or [0.0] for one in (recording, recording.plain))[0]
    for name, one in (("plain decoding", recording.plain), (recording.trace.method, recording)):
        times = clock(one.trace, slower)
        end, found = (times[-1] if times else 0.0), one.trace.summary()
        if one.modality == "image" and one.picture:
            inner: str = image_grid.picture(one.picture, one.trace.steps, one.rows, one.columns, clock=times)
        elif one.modality == "speech":
            inner = _speech(one, clock=times)
        else:
            inner = trace_html.tokens(one.trace.steps, one.name, clock=times, rejected=False)
        lanes.append(
            f'<div class="or-lane"><div class="or-lane-head"><b>{safe(name)}</b> {found.seconds:.2f} s, '
            f"{found.target_passes} calls, {found.tokens_per_second:.1f} tokens a second</div>"
            f'<div class="or-track"><div class="or-run" style="--takes:{max(end, 0.01):.3f}s;'
            f'--share:{100 * end / max(longest, 1e-9):.1f}%"></div></div>{inner}{player(one, name)}</div>'
        )
    return Drawing(
        f'<div class="or-said">{safe(verdict(recording))}</div><div class="or-lanes" data-round="{round_}">'
        f"{''.join(lanes)}</div>"
    )


def verdict(recording: Recording) -> str:
    """Who won, by how much, and whether both came to the same."""
    plain = recording.plain
    assert plain is not None
    slow, fast = plain.trace.summary(), recording.trace.summary()
    ratio = fast.tokens_per_second / slow.tokens_per_second if slow.tokens_per_second else 0.0
    said = f"{recording.trace.method} was {ratio:.2f} times as fast as plain decoding"
    if ratio < 1:
        said += ", so slower: drafting doesn't pay here"
    rows = {one.row for one in recording.trace.steps} | {one.row for one in plain.trace.steps}
    if all(plain.trace.tokens(row) == recording.trace.tokens(row) for row in rows):
        return said + "; both came to the same, token for token."
    if not RULES[recording.trace.rule].lossless if recording.trace.rule in RULES else not recording.trace.lossless:
        return said + "; the outputs differ, as the rule is relaxed."
    if recording.trace.options.get("temperature") == 0:
        return said + "; the outputs part where two tokens were about equally likely (rounding)."
    return said + "; both are drawn from the same distribution (the rule gumbel-match would give the very same tokens)."
